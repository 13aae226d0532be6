"""Readers of both kinds for tests, made so that a hook decides when each segment is read; asserts little itself."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from sluice.io.files import ModelFiles
from sluice.io.pool_reader import PoolReader
from sluice.io.reader import Reader
from sluice.io.ring_reader import RingReader
from sluice.io.uring import NOP, Ring
from sluice.types import Completion, ExpertKey, Read, Segment

ROOM = 4096  # the widest block: what the layout leaves free on both sides of a segment
SIZES = (5 * 4096 + 123, 64 * 1024, 300_001)
DATA = [random.Random(size).randbytes(size) for size in SIZES]
FILL = 0xA5
WAIT_S = 30.0  # only a broken reader takes that long

Hook = Callable[[Read, Segment], None]


def read(serial: int, deadline: int = 0, slot: int = 0) -> Read:
    return Read(ExpertKey(0, serial), slot, deadline, serial)


def wait_for(reader: Reader, n: int) -> list[Completion]:
    ended: list[Completion] = []
    while len(ended) < n:
        some = reader.completions(block=True, timeout=WAIT_S)
        assert some, f"{len(ended)} of {n} reads ended"
        ended += some
    return ended


class Gate:
    """An on_start hook that notes what starts and holds the reads named in `held` until `open` is set."""

    def __init__(self, *held: int) -> None:
        self.held = held
        self.open = threading.Event()
        self.waiting = threading.Event()
        self.started: list[int] = []

    def __call__(self, which: Read, segment: Segment) -> None:
        self.started.append(which.serial)
        if which.serial in self.held:
            self.waiting.set()
            assert self.open.wait(WAIT_S)


class Hold:
    """An on_start hook that holds every segment until `open` is set, and `all_in` once `n` are held."""

    def __init__(self, n: int) -> None:
        self.open = threading.Event()
        self.all_in = threading.Barrier(n + 1)

    def __call__(self, which: Read, segment: Segment) -> None:
        self.all_in.wait(WAIT_S)
        assert self.open.wait(WAIT_S)


class HookedRing(Ring):
    """A ring whose requests are read by a thread each, after `hook`; what that raises as OSError is the result.

    `hook` and `most`, the bytes that one read brings, may be changed. `reader` is who uses it.
    """

    reader: RingReader

    def __init__(self, entries: int, hook: Hook = lambda read, segment: None, most: int = 1 << 30) -> None:
        self.entries, self.hook, self.most = entries, hook, most
        self._next = 0
        self._written: dict[int, tuple[int, int, int, int]] = {}
        self._nops = 0
        self._came: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._seen: list[tuple[int, int]] = []
        self.threads: list[threading.Thread] = []

    @property
    def position(self) -> int:
        return self._next

    def read(self, number: int, fd: int, offset: int, address: int, n_bytes: int) -> None:
        assert number in (self._next, self._next - 1)
        self._next = number + 1
        self._written[number] = fd, offset, address, n_bytes
        assert len(self._written) + self._nops <= self.entries

    def nop(self) -> None:
        self._next += 1
        self._nops += 1

    def submit(self) -> None:
        for number in list(self._written):
            thread = threading.Thread(target=self._read, args=(number, *self._written.pop(number)))
            thread.start()
            self.threads.append(thread)
        for _ in range(self._nops):
            self._nops -= 1
            self._came.put((NOP, 0))

    def _read(self, number: int, fd: int, offset: int, address: int, n_bytes: int) -> None:
        request = self.reader._requests[number]
        try:
            self.hook(request.job.read, request.segment)
            to = (ctypes.c_char * min(n_bytes, -(-self.most // ROOM) * ROOM)).from_address(address)
            result = min(os.preadv(fd, [memoryview(to)], offset), self.most)
        except OSError as error:
            result = -(error.errno or 0)
        self._came.put((number, result))

    def withdraw(self) -> list[int]:
        numbers = list(self._written)
        self._written.clear()
        return numbers

    def wait(self) -> None:
        if not self._seen:
            self._seen.append(self._came.get())

    def results(self) -> Iterator[tuple[int, int]]:
        while self._seen:
            yield self._seen.pop()
        while not self._came.empty():
            yield self._came.get()

    def close(self) -> None:
        for thread in self.threads:
            thread.join()


def hooked(
    files: ModelFiles, pool: memoryview, locate: Callable[[Read], Sequence[Segment]], depth: int, ring: HookedRing
) -> RingReader:
    """A RingReader on a HookedRing."""
    ring.reader = RingReader(files, pool, locate, depth=depth, make_ring=lambda entries: ring)
    return ring.reader


def make_reader(
    kind: str, files: ModelFiles, pool: memoryview, locate: Callable[[Read], Sequence[Segment]], *,
    depth: int = 4, hook: Hook | None = None,
) -> Reader:  # fmt: skip
    """A reader that reads `depth` segments at a time, each after `hook`."""
    if kind == "threads":
        return PoolReader(files, pool, locate, threads=depth, on_start=hook)
    if hook is None:
        return RingReader(files, pool, locate, depth=depth)
    return hooked(files, pool, locate, depth, HookedRing(depth + 2, hook))
