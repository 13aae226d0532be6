"""Reads segments of model files into the pool with a few threads. It does not know what a segment holds."""

from __future__ import annotations

import heapq
import mmap
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Self

from sluice.errors import EngineClosed, ReadError
from sluice.io.aligned import AlignedBuffer, address_of
from sluice.io.files import ModelFiles
from sluice.io.reader import ReaderStats
from sluice.types import Completion, Read, Segment

BOUNCE_BYTES = 4 << 20  # per thread, the most that a bounce buffer grows to; longer segments go through it in pieces


class _Job:
    """A submitted read. Segments before `next` were handed to threads; `running` of those are being read.

    The job is over when none is left to hand out and none is running: only then may its slot be used.
    """

    __slots__ = ("deadline", "error", "next", "order", "read", "running", "segments")

    def __init__(self, read: Read, segments: Sequence[Segment], order: int) -> None:
        self.read = read
        self.segments = segments
        self.order = order
        self.deadline = read.deadline
        self.next = 0
        self.running = 0
        self.error: Exception | None = None


class PoolReader:
    """A Reader over `files` whose threads write into `pool`, a writable view with a page-aligned base.

    `locate` gives a read's segments. A segment whose offset and destination agree modulo the file's block goes straight
    into the pool, together with the rest of its first and last block: up to `block - 1` bytes on either side are
    overwritten. Other segments of direct files take a bounce buffer (see BOUNCE_BYTES) and write exactly their bytes.

    Segments start in the order of (deadline, submission), those of one read may run at once. The first error of a read
    is reported, its segments that have not started are dropped, and those that run are waited for.
    `on_start` is called by the reading thread before each segment; what it raises fails the read.
    """

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
        if address_of(pool) % mmap.PAGESIZE:
            raise ValueError("the pool must start on a page border")
        self._files = files
        self._blocks = [files[i].block for i in range(len(files))]
        self._pool = pool.cast("B")
        self._pool_bytes = len(self._pool)
        self._locate = locate
        self._on_start = on_start
        self._lock = threading.Lock()  # guards all that follows
        self._jobs: dict[int, _Job] = {}  # by serial: not over yet
        self._heap: list[tuple[int, int, _Job]] = []  # (deadline, order, job); promoted jobs are in it twice
        self._order = 0
        self._idle = 0  # threads that wait for a token
        self._tokens: SimpleQueue[None] = SimpleQueue()  # each wakes one idle thread, cheaper than a Condition does
        self._ended: SimpleQueue[Completion | None] = SimpleQueue()  # None: look again
        self._closed = False
        self._running = 0
        self._ticked = 0.0
        self._reads = self._bytes_read = self._bytes_from_disk = self._bounced = 0
        self._busy_s = self._depth_s = 0.0
        self._threads: list[threading.Thread] = []
        try:
            for i in range(threads):
                # daemons: the interpreter joins others before anything that would close a forgotten reader
                thread = threading.Thread(target=self._work, name=f"sluice-read-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, read: Read) -> None:
        segments = self._locate(read)
        if not segments:
            raise ValueError(f"{read} has no segments")
        with self._lock:
            if self._closed:
                raise EngineClosed("the reader is closed; open the engine again")
            if read.serial in self._jobs:
                raise ValueError(f"{read} is outstanding already")
            if not self._jobs:
                self._tick()
            self._order += 1
            job = self._jobs[read.serial] = _Job(read, segments, self._order)
            heapq.heappush(self._heap, (job.deadline, job.order, job))
            self._wake(len(segments))

    def promote(self, read: Read, deadline: int) -> None:
        with self._lock:
            job = self._jobs.get(read.serial)
            if job is not None and deadline < job.deadline and job.next < len(job.segments):
                job.deadline = deadline
                heapq.heappush(self._heap, (deadline, job.order, job))

    def cancel(self, read: Read) -> bool:
        with self._lock:
            job = self._jobs.get(read.serial)
            if job is None or job.next > 0:
                return False
            self._drop(job)
            return True

    def completions(self, block: bool = False, timeout: float | None = None) -> list[Completion]:
        ended = self._ended
        found: list[Completion] = []
        if block and ended.empty():
            with self._lock:
                outstanding = bool(self._jobs)
            if outstanding:
                try:
                    first = ended.get(timeout=timeout)
                except Empty:
                    return found
                if first is not None:
                    found.append(first)
        found.extend(each for _ in range(ended.qsize()) if (each := ended.get()) is not None)
        return found

    def stats(self) -> ReaderStats:
        with self._lock:
            self._tick()
            return ReaderStats(
                self._reads, self._bytes_read, self._bytes_from_disk, self._busy_s, self._depth_s, self._bounced
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._tick()
            for job in list(self._jobs.values()):
                if job.next == 0:
                    self._drop(job)
                elif job.next < len(job.segments):
                    self._fail(job, EngineClosed(f"the reader was closed while {job.read} ran"))
            self._ended.put(None)
            for _ in self._threads:
                self._tokens.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # which collects garbage, among it this reader's owner
                thread.join()
        self._pool.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # With the lock held. Ctrl-C may strike between any two lines here; their order leaves nothing that hangs.

    def _tick(self) -> None:
        """Account for the time since the last change of what is outstanding or running."""
        now = perf_counter()
        if self._jobs:
            self._busy_s += now - self._ticked
            self._depth_s += (now - self._ticked) * self._running
        self._ticked = now

    def _wake(self, n: int) -> None:
        for _ in range(min(n, self._idle)):
            self._tokens.put(None)
            self._idle -= 1

    def _drop(self, job: _Job) -> None:
        self._tick()
        job.next = len(job.segments)  # what is left of it in the heap is skipped
        del self._jobs[job.read.serial]

    def _fail(self, job: _Job, error: Exception) -> None:
        job.error = job.error or error
        job.next = len(job.segments)
        self._end_if_over(job)

    def _end_if_over(self, job: _Job) -> None:
        if job.running == 0 and job.next == len(job.segments):
            del self._jobs[job.read.serial]
            self._reads += job.error is None
            self._ended.put(Completion(job.read, job.error))

    def _take(self) -> tuple[_Job, Segment] | None:
        heap = self._heap
        while heap:
            job = heap[0][2]
            if job.next == len(job.segments):  # over, or handed out under a sooner deadline
                heapq.heappop(heap)
                continue
            segment = job.segments[job.next]
            job.next += 1
            self._tick()
            job.running += 1
            self._running += 1
            return job, segment
        return None

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
        block = self._blocks[file]
        skew = offset % block
        at = dest - skew
        whole = -(-(skew + n) // block) * block
        if at % block == 0 and at >= 0 and at + whole <= self._pool_bytes:
            got = self._files.read_into(file, offset - skew, self._pool[at : at + whole])
            if got < skew + n:
                raise self._files.short(file, offset, n, max(got - skew, 0))
            return got, False
        if dest < 0 or n < 0 or dest + n > self._pool_bytes:
            raise ValueError(f"{segment} is outside of a pool of {self._pool_bytes} bytes")
        size = max(block, min(whole, BOUNCE_BYTES))
        if not bounce or bounce[0].n_bytes < size:
            while bounce:
                bounce.pop().close()
            bounce.append(AlignedBuffer(size))
        return self._files.read_exact(file, offset, self._pool[dest : dest + n], bounce[0]), True
