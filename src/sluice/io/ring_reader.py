"""Reads segments of model files into the pool by io_uring. It does not know what a segment holds.

A read begins in the thread that submits it; one thread of its own notes what has ended and starts what is queued.
Threads that read (pool_reader.py) need a turn of a processor and of the interpreter before each read begins, which they
get late when all cores compute.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from time import sleep
from typing import NamedTuple

from sluice.errors import EngineClosed, ReadError
from sluice.io.aligned import address_of
from sluice.io.files import ModelFiles
from sluice.io.queue import Job, QueuedReader
from sluice.io.uring import MAX_READ, NOP, Ring
from sluice.types import Read, Segment

_AGAIN = {-errno.EINTR, -errno.ECANCELED}  # broken off, as when the thread that made the request ends
_POLL_S = 0.001


class _Request(NamedTuple):
    """Request `number` of the ring: whole blocks of `fd` from `offset` into the pool at `at`, but for `done` bytes.

    With it, `job.next` and `job.running` become `next` and `running`.
    """

    number: int
    job: Job
    segment: Segment
    fd: int
    offset: int
    at: int
    n_bytes: int
    done: int
    next: int
    running: int


class RingReader(QueuedReader):
    """A Reader over direct `files` that keeps up to `depth` segments running, into `pool`, a page-aligned view.

    `locate` gives a read's segments; each must lie as far into a block of the pool as of its file, and up to
    `block - 1` bytes on either side are overwritten. Raises OSError where the system has no io_uring.
    """

    name = "io_uring"

    def __init__(
        self,
        files: ModelFiles,
        pool: memoryview,
        locate: Callable[[Read], Sequence[Segment]],
        *,
        depth: int = 8,
        make_ring: Callable[[int], Ring] = Ring,
    ) -> None:
        if depth < 1:
            raise ValueError(f"a reader needs a depth of at least one, not {depth}")
        super().__init__(files, pool, locate)
        self._address = address_of(self._pool)
        self._depth = depth
        self._requests: dict[int, _Request] = {}  # by number: not ended
        self._starting: _Request | None = None  # some of the steps that make it one of the above may have been taken
        self._ring: Ring | None = make_ring(depth + 2)  # two more, for waking; None: the thread has given it back
        thread = threading.Thread(target=self._work, args=(self._ring,), name="sluice-ring", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._ring.close()
            raise
        self._threads.append(thread)

    # With the lock held.

    def _start(self, n: int) -> None:
        self._settle()
        ring = self._ring
        if ring is None or self._closed:
            return
        self._tick()
        while len(self._requests) < self._depth and (job := self._first()) is not None:
            try:
                request = self._request(ring.position, job)
            except Exception as error:
                self._fail(job, error)
            else:
                self._begin(ring, request)
        self._submit(ring)

    def _request(self, number: int, job: Job) -> _Request:
        """The job's next segment as request `number`. Raises ValueError if it can't be read into its place."""
        segment = job.segments[job.next]
        skew, at, whole, fits = self._blocks(segment)
        if not fits or not 0 <= segment.offset < 1 << 62 or segment.n_bytes < 0:
            raise ValueError(f"{segment} can't be read into its place in a pool of {self._pool_bytes} bytes")
        fd = self._files[segment.file].fd
        return _Request(number, job, segment, fd, segment.offset - skew, at, whole, 0, job.next + 1, job.running + 1)

    def _begin(self, ring: Ring, request: _Request) -> None:
        """Write a request down. Where Ctrl-C breaks this off, `_settle` takes all of the steps again."""
        self._starting = request
        number, job = request.number, request.job
        job.next = request.next
        job.running = request.running
        self._requests[number] = request
        self._running = len(self._requests)
        at, left = request.at + request.done, request.n_bytes - request.done
        ring.read(number, request.fd, request.offset + request.done, self._address + at, min(left, MAX_READ))
        self._starting = None

    def _settle(self) -> None:
        if self._ring is not None:
            if self._starting is not None:
                self._begin(self._ring, self._starting)
            self._submit(self._ring)

    def _submit(self, ring: Ring) -> None:
        try:
            ring.submit()
        except OSError as error:
            for number in ring.withdraw():
                if number in self._requests:
                    self._end(ring, number, -(error.errno or errno.EIO))

    def _wake(self) -> None:
        if self._ring is not None:
            self._ring.nop()
            self._submit(self._ring)

    def _end(self, ring: Ring, number: int, result: int) -> None:
        """Take note of a request's result; ask for the rest where only a part came."""
        request = self._requests.pop(number)
        self._running = len(self._requests)
        job, (file, offset, n, _) = request.job, request.segment
        job.running -= 1
        before = offset - request.offset  # what of the first block isn't the segment's
        came = request.done + max(result, 0)
        again = result in _AGAIN
        if result < 0 and not again:
            error = OSError(-result, os.strerror(-result))
            self._fail(job, self._files.failed(file, request.offset, request.n_bytes, error))
            return
        if came >= before + n and not again:  # not all of the last block, where the file ends in it
            self._bytes_read += n
            self._bytes_from_disk += came
            self._end_if_over(job)
            return
        done = came - came % self._files[file].block  # a direct read can only go on from a block's border
        if done <= request.done and not again:
            self._fail(job, self._files.short(file, offset, n, max(came - before, 0)))
        elif self._closed:
            self._fail(job, EngineClosed(f"the reader was closed while {job.read} ran"))
        elif job.error is not None:
            self._end_if_over(job)
        else:
            rest = request._replace(number=ring.position, done=done, next=job.next, running=job.running + 1)
            self._begin(ring, rest)

    # Without it.

    def _work(self, ring: Ring) -> None:
        try:
            while self._turn(ring):
                pass
        except BaseException as raised:
            self._break_off(ring, raised)
        with self._lock:
            self._ring = None
        ring.close()

    def _turn(self, ring: Ring) -> bool:
        """Wait for results and start what they make room for; False when that was the last time."""
        ring.wait()
        with self._lock:
            self._settle()
            self._tick()
            for tag, result in ring.results():
                if tag != NOP:
                    self._end(ring, tag, result)
            self._start(0)
            if self._closed:
                self._shut()
            return not self._closed or bool(self._requests)

    def _break_off(self, ring: Ring, raised: BaseException) -> None:
        """End every read with an error, but none as long as the kernel may write for it."""
        while True:
            with self._lock:
                self._closed = True
                self._settle()
                for tag, _ in ring.results():
                    self._requests.pop(tag, None)
                if not self._requests:
                    for job in list(self._jobs.values()):
                        job.running = 0
                        self._fail(job, ReadError(f"reading {job.read} was broken off by {raised!r}; start again"))
                    return
            sleep(_POLL_S)
