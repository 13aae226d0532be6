"""Reads segments of model files into the pool with a few threads. It does not know what a segment holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from sluice.errors import ReadError
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.io.queue import Job, QueuedReader
from sluice.types import Read, Segment

BOUNCE_BYTES = 4 << 20  # per thread, the most that a bounce buffer grows to; longer segments go through it in pieces


class PoolReader(QueuedReader):
    """A Reader over `files` whose threads write into `pool`, a writable view with a page-aligned base.

    `locate` gives a read's segments. A segment whose offset and destination agree modulo the file's block goes straight
    into the pool, together with the rest of its first and last block: up to `block - 1` bytes on either side are
    overwritten. Other segments of direct files take a bounce buffer (see BOUNCE_BYTES) and write exactly their bytes.

    `on_start` is called by the reading thread before each segment; what it raises fails the read.
    """

    name = "threads"

    def __init__(
        self,
        files: ModelFiles,
        pool: memoryview,
        locate: Callable[[Read], Sequence[Segment]],
        *,
        threads: int = 4,
        on_start: Callable[[Read, Segment], None] | None = None,
    ) -> None:
        if threads < 1:
            raise ValueError(f"a reader needs at least one thread, not {threads}")
        super().__init__(files, pool, locate)
        self._on_start = on_start
        self._idle = 0  # threads that wait for a token
        self._tokens: SimpleQueue[None] = SimpleQueue()  # each wakes one idle thread, cheaper than a Condition does
        try:
            for i in range(threads):
                thread = threading.Thread(target=self._work, name=f"sluice-read-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    # With the lock held.

    def _start(self, n: int) -> None:
        for _ in range(min(n, self._idle)):
            self._tokens.put(None)
            self._idle -= 1

    def _wake(self) -> None:
        for _ in self._threads:
            self._tokens.put(None)

    def _take(self) -> tuple[Job, Segment] | None:
        job = self._first()
        if job is None:
            return None
        segment = job.segments[job.next]
        self._tick()
        job.next += 1
        job.running += 1
        self._running += 1
        return job, segment

    # Without it.

    def _work(self) -> None:
        bounce: list[AlignedBuffer] = []  # none or one, of this thread alone
        try:
            while True:
                with self._lock:
                    taken = self._take()
                    if taken is None:
                        if self._closed:
                            return
                        self._idle += 1
                if taken is None:
                    self._tokens.get()
                    continue
                job, segment = taken
                fetched, bounced, error = 0, False, None
                try:
                    if self._on_start is not None:
                        self._on_start(job.read, segment)
                    fetched, bounced = self._read(segment, bounce)
                except Exception as raised:
                    error = raised
                except BaseException as raised:
                    error = ReadError(f"reading {job.read} was broken off by {raised!r}; start again")
                with self._lock:
                    self._tick()
                    self._running -= 1
                    job.running -= 1
                    if error is not None:
                        self._fail(job, error)
                    else:
                        self._bytes_read += segment.n_bytes
                        self._bytes_from_disk += fetched
                        self._bounced += bounced
                        self._end_if_over(job)
        finally:
            for buffer in bounce:
                buffer.close()

    def _read(self, segment: Segment, bounce: list[AlignedBuffer]) -> tuple[int, bool]:
        """Carry out one segment: the bytes fetched, and whether they went through the bounce buffer."""
        file, offset, n, dest = segment
        skew, at, whole, fits = self._blocks(segment)
        if fits:
            got = self._files.read_into(file, offset - skew, self._pool[at : at + whole])
            if got < skew + n:
                raise self._files.short(file, offset, n, max(got - skew, 0))
            return got, False
        if dest < 0 or n < 0 or dest + n > self._pool_bytes:
            raise ValueError(f"{segment} is outside of a pool of {self._pool_bytes} bytes")
        block = self._files[file].block
        size = max(block, min(whole, BOUNCE_BYTES))
        if not bounce or bounce[0].n_bytes < size:
            while bounce:
                bounce.pop().close()
            bounce.append(AlignedBuffer(size))
        return self._files.read_exact(file, offset, self._pool[dest : dest + n], bounce[0]), True
