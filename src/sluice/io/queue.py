"""What readers have in common: reads queued by deadline, and how they end. It does not know how bytes are moved."""

from __future__ import annotations

import heapq
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Self

from sluice.errors import EngineClosed
from sluice.io.aligned import address_of
from sluice.io.files import ModelFiles
from sluice.io.reader import ReaderStats
from sluice.types import Completion, Read, Segment


class Job:
    """A submitted read. Segments before `next` have been started; `running` of those have not ended.

    The job is over when none is left to start and none is running: only then may its slot be used.
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


class QueuedReader(ABC):
    """The Reader contract but for reading itself, which a subclass does in `_threads`, from `files` into `pool`.

    `locate` gives a read's segments. They start in the order of (deadline, submission), those of one read may run at
    once. The first error of a read is reported, its segments that have not started are dropped, and those that run are
    waited for. Ctrl-C may strike the calling thread between any two lines; their order leaves nothing that hangs, and
    no read that ends while it is written for.
    """

    name = ""

    def __init__(self, files: ModelFiles, pool: memoryview, locate: Callable[[Read], Sequence[Segment]]) -> None:
        if address_of(pool) % mmap.PAGESIZE:
            raise ValueError("the pool must start on a page border")
        self._files = files
        self._pool = pool.cast("B")
        self._pool_bytes = len(self._pool)
        self._locate = locate
        # daemons: the interpreter joins others before anything that would close a forgotten reader
        self._threads: list[threading.Thread] = []
        self._ended: SimpleQueue[Completion | None] = SimpleQueue()  # None: look again
        self._lock = threading.Lock()  # guards all that follows
        self._jobs: dict[int, Job] = {}  # by serial: not over yet
        self._heap: list[tuple[int, int, Job]] = []  # (deadline, order, job); promoted jobs are in it twice
        self._order = 0
        self._closed = False
        self._running = 0  # segments
        self._ticked = 0.0
        self._reads = self._bytes_read = self._bytes_from_disk = self._bounced = 0
        self._busy_s = self._depth_s = 0.0

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
            job = Job(read, segments, self._order)
            heapq.heappush(self._heap, (job.deadline, job.order, job))
            self._jobs[read.serial] = job
            self._start(len(segments))

    def promote(self, read: Read, deadline: int) -> None:
        with self._lock:
            job = self._jobs.get(read.serial)
            if job is not None and deadline < job.deadline and job.next < len(job.segments):
                job.deadline = deadline
                heapq.heappush(self._heap, (deadline, job.order, job))

    def cancel(self, read: Read) -> bool:
        with self._lock:
            self._settle()
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
                self._settle()
                if self._first() is not None:
                    self._start(1)
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
        if threading.current_thread() in self._threads:
            # It collects garbage, this reader's owner among it, perhaps with the lock held: it can't wait for itself.
            threading.Thread(target=self.close, name="sluice-close", daemon=True).start()
            return
        with self._lock:
            self._closed = True
            self._shut()
            self._ended.put(None)
            self._wake()
        for thread in self._threads:
            thread.join()
        self._pool.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _blocks(self, segment: Segment) -> tuple[int, int, int, bool]:
        """The whole blocks around `segment`: how far in it begins, where in the pool they go, their bytes, and whether
        they can be read into that place."""
        block = self._files[segment.file].block
        skew = segment.offset % block
        at, whole = segment.dest - skew, -(-(skew + segment.n_bytes) // block) * block
        return skew, at, whole, at % block == 0 and at >= 0 and at + whole <= self._pool_bytes

    # With the lock held.

    @abstractmethod
    def _start(self, n: int) -> None:
        """Have segments started, of which `n` are new."""

    def _settle(self) -> None:  # noqa: B027  (most have nothing to finish)
        """Finish what Ctrl-C broke off in `_start`."""

    @abstractmethod
    def _wake(self) -> None:
        """Have every thread see that the reader is closed."""

    def _first(self) -> Job | None:
        """The most urgent read with a segment left to start."""
        heap = self._heap
        while heap:
            job = heap[0][2]
            if job.next < len(job.segments) and self._jobs.get(job.read.serial) is job:
                return job
            heapq.heappop(heap)  # over or cancelled, or all started under a sooner deadline
        return None

    def _tick(self) -> None:
        """Account for the time since the last change of what is outstanding or running."""
        now = perf_counter()
        if self._jobs:
            self._busy_s += now - self._ticked
            self._depth_s += (now - self._ticked) * self._running
        self._ticked = now

    def _drop(self, job: Job) -> None:
        self._tick()
        del self._jobs[job.read.serial]

    def _shut(self) -> None:
        """Drop what has not begun, and the rest of what has. May be called again."""
        self._settle()
        self._tick()
        for job in list(self._jobs.values()):
            if job.next == 0:
                self._drop(job)
            elif job.next < len(job.segments):
                self._fail(job, EngineClosed(f"the reader was closed while {job.read} ran"))

    def _fail(self, job: Job, error: Exception) -> None:
        job.error = job.error or error
        job.next = len(job.segments)
        self._end_if_over(job)

    def _end_if_over(self, job: Job) -> None:
        if job.running == 0 and job.next == len(job.segments):
            del self._jobs[job.read.serial]
            self._reads += job.error is None
            self._ended.put(Completion(job.read, job.error))
