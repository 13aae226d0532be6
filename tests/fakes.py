"""Stand-ins for what a test wants to order itself. They know the contracts they implement and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from sluice.errors import EngineClosed
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.io.reader import ReaderStats
from sluice.types import Completion, Read, Segment

POISON = 0xFF  # four of them are a NaN in f32, two in f16 and bf16


class OrderedReader:
    """A Reader without threads: real bytes, moved when the test or its seeded generator says so.

    `complete(read)` and `fail(read, error)` end one read. `completions(block=True)` ends at least one of those
    outstanding, `completions()` each of them with probability `poll_share`. `start(read)` makes a read run, as a failed
    cancel does (with probability `running_share`): a running read's slot is poisoned, it can't be cancelled, and it
    ends later.
    """

    name = "ordered"

    def __init__(
        self,
        files: ModelFiles,
        pool: memoryview,
        locate: Callable[[Read], Sequence[Segment]],
        rng: random.Random | int = 0,
        *,
        running_share: float = 0.0,
        poll_share: float = 0.0,
    ) -> None:
        self._files = files
        self._pool = pool
        self._locate = locate
        self._rng = rng if isinstance(rng, random.Random) else random.Random(rng)
        self._running_share = running_share
        self._poll_share = poll_share
        self._scratch = AlignedBuffer(1 << 16)
        self._running: set[int] = set()
        self._ended: list[Completion] = []
        self._closed = False
        self._reads = self._bytes_read = self._bytes_from_disk = 0
        self.outstanding: dict[int, Read] = {}  # by serial, with the deadline it has now
        self.cancelled: list[Read] = []

    def submit(self, read: Read) -> None:
        if self._closed:
            raise EngineClosed("the reader is closed; open the engine again")
        assert read.serial not in self.outstanding, f"{read} submitted twice"
        assert all(read.slot != other.slot for other in self.outstanding.values()), f"{read}: its slot is being read"
        self.outstanding[read.serial] = read

    def promote(self, read: Read, deadline: int) -> None:
        known = self.outstanding.get(read.serial)
        if known is not None and deadline < known.deadline:
            self.outstanding[read.serial] = known._replace(deadline=deadline)

    def cancel(self, read: Read) -> bool:
        if read.serial not in self.outstanding or read.serial in self._running:
            return False
        if self._rng.random() < self._running_share:
            self.start(read)
            return False
        self.cancelled.append(self.outstanding.pop(read.serial))
        return True

    def completions(self, block: bool = False, timeout: float | None = None) -> list[Completion]:
        waiting = list(self.outstanding.values())
        self._rng.shuffle(waiting)
        if not block:
            waiting = [read for read in waiting if self._rng.random() < self._poll_share]
        elif self._ended or not waiting:
            waiting = []
        else:
            waiting = waiting[: self._rng.randint(1, len(waiting))]
        for read in waiting:
            self.complete(read)
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> ReaderStats:
        return ReaderStats(self._reads, self._bytes_read, self._bytes_from_disk)

    def close(self) -> None:
        self._closed = True
        for read in list(self.outstanding.values()):
            if read.serial in self._running:
                self.complete(read)
        self.outstanding.clear()
        self._scratch.close()

    def start(self, read: Read) -> None:
        """The read runs from now on: what its slot holds is undefined until it is complete."""
        for segment in self._locate(self.outstanding[read.serial]):
            self._pool[segment.dest : segment.dest + segment.n_bytes] = bytes([POISON]) * segment.n_bytes
        self._running.add(read.serial)

    def complete(self, read: Read) -> None:
        """Move the read's bytes now and report it. What the files raise becomes the completion's error."""
        error = None
        try:
            for file, offset, n, dest in self._locate(read):
                view = self._pool[dest : dest + n]
                self._bytes_from_disk += self._files.read_exact(file, offset, view, self._scratch)
                self._bytes_read += n
            self._reads += 1
        except Exception as raised:
            error = raised
        self._end(read, error)

    def fail(self, read: Read, error: Exception) -> None:
        """End the read with an error, its slot left in an undefined state."""
        self.start(read)
        self._end(read, error)

    def _end(self, read: Read, error: Exception | None) -> None:
        self._running.discard(read.serial)
        self._ended.append(Completion(self.outstanding.pop(read.serial), error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
