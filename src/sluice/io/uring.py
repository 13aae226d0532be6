"""Linux's io_uring for reads, through plain system calls. It does not know what is read, or why.

A ring is two queues in memory shared with the kernel: requests go in, results come out, and one system call hands over
any number of requests. So a read starts in the thread that asks for it, without waking another one first.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterator
from time import sleep
from types import TracebackType
from typing import Self

# The numbers are those of linux/io_uring.h and of the system call table that all newer architectures share.
_SETUP, _ENTER = 425, 426
_OP_NOP, _OP_READ = 0, 22
_ENTER_GETEVENTS = 1
_OFF_SQES = 0x10000000
_FEATURES = 1 | 1 << 9  # one map for both queues, and native workers: Linux 5.12. Before, rings were locked memory
_N_PARAMS = 30  # 32-bit words of struct io_uring_params: ten fields, then offsets into the two queues
_SQE = struct.Struct("<BBHiQQIIQQQQ")  # opcode, flags, priority, fd, offset, address, length, …, user data, …: 64 bytes
_CQE = struct.Struct("<QiI")  # user data, result, flags
_RETRY_S = 0.001  # after the kernel had no memory for a request
_WORD = 0xFFFFFFFF

MAX_READ = 1 << 30  # bytes of one request
NOP = 1 << 63  # the tag of requests that only wake who waits


class Ring:
    """An io_uring of at least `entries` requests; a context manager.

    Requests are numbered: the next one is `position`. Writing one down, starting what was written down and taking
    results are for one thread at a time each; `wait` may block beside them. Raises OSError where the kernel has no
    io_uring or forbids it. A fork must leave its parent's ring alone.
    """

    def __init__(self, entries: int) -> None:
        self._fd = -1
        if not _known_machine():
            raise OSError(errno.ENOSYS, "io_uring is used on Linux on x86-64 only")
        self._enter = ctypes.CDLL(None, use_errno=True).syscall
        self._enter.restype = ctypes.c_long
        params = (ctypes.c_uint32 * _N_PARAMS)()
        self._fd = self._enter(_SETUP, entries, ctypes.byref(params))  # the kernel makes it close on exec
        try:
            if self._fd < 0:
                raise _last_error()
            if params[5] & _FEATURES != _FEATURES:
                raise OSError(errno.ENOSYS, "this kernel's io_uring is too old")
            n_requests, n_results = params[0], params[1]
            sq, cq = params[10:20], params[20:30]
            size = max(sq[6] + 4 * n_requests, cq[5] + _CQE.size * n_results)
            self._queues = mmap.mmap(self._fd, -(-size // 4) * 4, flags=mmap.MAP_SHARED)
            self._requests = mmap.mmap(self._fd, _SQE.size * n_requests, flags=mmap.MAP_SHARED, offset=_OFF_SQES)
            self._words = memoryview(self._queues).cast("I")
            self._sq_head, self._sq_tail, self._sq_array = sq[0] // 4, sq[1] // 4, sq[6] // 4
            self._cq_head, self._cq_tail, self._cqes = cq[0] // 4, cq[1] // 4, cq[5]
            self._sq_mask, self._cq_mask = self._words[sq[2] // 4], self._words[cq[2] // 4]
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> int:
        """The number of the next request, modulo 2³²."""
        return self._words[self._sq_tail]

    def read(self, number: int, fd: int, offset: int, address: int, n_bytes: int) -> None:
        """Write down a read as request `number`, its result's tag; `submit` starts it.

        `number` is `position`, or that of the last request, which is then written anew: until `submit`, that changes
        nothing. No more than `entries` may be written down at a time, MAX_READ bytes each.
        """
        self._write(number, _OP_READ, fd, offset, address, n_bytes, number)

    def nop(self) -> None:
        """Write down a request that ends at once."""
        self._write(self.position, _OP_NOP, -1, 0, 0, 0, NOP)

    def _write(self, number: int, op: int, fd: int, offset: int, address: int, n_bytes: int, tag: int) -> None:
        at = number & self._sq_mask
        _SQE.pack_into(self._requests, at * _SQE.size, op, 0, 0, fd, offset, address, n_bytes, 0, tag, 0, 0, 0)
        self._words[self._sq_array + at] = at
        self._words[self._sq_tail] = number + 1 & _WORD

    def submit(self) -> None:
        """Start what was written down, also what an earlier call was kept from starting. Raises OSError."""
        words = self._words
        while n := words[self._sq_tail] - words[self._sq_head] & _WORD:
            self._call(n, 0)

    def withdraw(self) -> list[int]:
        """Take back what was written down and not started: the requests' tags."""
        words = self._words
        head, n = words[self._sq_head], words[self._sq_tail] - words[self._sq_head] & _WORD
        words[self._sq_tail] = head
        return [head + i & _WORD for i in range(n)]

    def wait(self) -> None:
        """Return when there is at least one result. Raises OSError."""
        self._call(0, 1)

    def _call(self, n: int, least: int) -> None:
        flags = _ENTER_GETEVENTS if least else 0
        while self._enter(_ENTER, self._fd, n, least, flags, None, ctypes.c_size_t(0)) < 0:
            error = _last_error()
            if error.errno in (errno.EAGAIN, errno.EBUSY):
                sleep(_RETRY_S)
            elif error.errno != errno.EINTR:
                raise error

    def results(self) -> Iterator[tuple[int, int]]:
        """(tag, bytes read or negative errno) of what has ended since the last call."""
        words = self._words
        head, tail = words[self._cq_head], words[self._cq_tail]
        while head != tail:
            tag, result, _ = _CQE.unpack_from(self._queues, self._cqes + (head & self._cq_mask) * _CQE.size)
            head = head + 1 & _WORD
            words[self._cq_head] = head
            yield tag, result

    def close(self) -> None:
        """Give the ring back; nothing may be running. May be called again."""
        if self._fd < 0:
            return
        if hasattr(self, "_words"):
            self._words.release()
        for name in ("_queues", "_requests"):
            if hasattr(self, name):
                getattr(self, name).close()
        fd, self._fd = self._fd, -1
        os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def available() -> bool:
    """Whether this system lets this process have a ring. Containers often don't."""
    try:
        with Ring(2):
            return True
    except OSError:
        return False


def _known_machine() -> bool:
    """x86-64: elsewhere Python has no means to order its accesses to the shared queues."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 1 << 32


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
