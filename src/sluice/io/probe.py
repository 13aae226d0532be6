"""Measures how fast files can be read at a given size and depth. It does not know what the figure is for."""

from __future__ import annotations

import mmap
import os
import random
import threading
from dataclasses import dataclass
from time import perf_counter

from sluice.errors import ModelFileError
from sluice.io.aligned import HUGE_PAGE, AlignedBuffer
from sluice.io.files import ModelFiles


@dataclass(frozen=True)
class ReadRate:
    """`reads` reads in `seconds`. `direct`: past the page cache; otherwise cached pages may have flattered the rate."""

    bytes_per_s: float
    reads: int
    seconds: float
    direct: bool


def measure_read(
    source: str | os.PathLike[str] | ModelFiles,
    *,
    n_bytes: int,
    depth: int,
    seconds: float,
    memory_bytes: int = 0,
    file: int = 0,
    span: tuple[int, int] | None = None,
    seed: int = 0,
) -> ReadRate:
    """Read `n_bytes` (rounded up to blocks) at random block-aligned offsets with `depth` threads for about `seconds`.

    The destinations lie in memory like the expert pool's: one stretch, in huge pages where there are any. Each thread
    uses one place of it over and over, or as many as make up `memory_bytes` in all: memory that stays in the
    processor's cache is written faster than a pool of gigabytes can be, where the processor copies (virtual disks).

    Reads file number `file` of `source`, within `span` (first byte, end) if given. Raises ModelFileError if that holds
    no block, BudgetError if the buffers can't be had, ReadError if a read fails.
    """
    if not isinstance(source, ModelFiles):
        with ModelFiles([source]) as files:
            return measure_read(
                files, n_bytes=n_bytes, depth=depth, seconds=seconds, memory_bytes=memory_bytes, file=file, span=span,
                seed=seed,
            )  # fmt: skip
    if n_bytes <= 0 or depth <= 0:
        raise ValueError(f"size and depth must be positive, not {n_bytes} and {depth}")
    opened = source[file]
    block = opened.block
    first, end = span or (0, opened.size)
    low, high = -(-max(first, 0) // block), min(end, opened.size) // block  # in blocks, high excluded
    if high <= low:
        raise ModelFileError(f"{opened.path} is too small to measure reading; give a larger file")
    blocks = min(-(-n_bytes // block), high - low)
    if not opened.direct:
        source.drop_cache()
    stride = -(-blocks * block // mmap.PAGESIZE) * mmap.PAGESIZE
    counts = [0] * depth
    failures: list[Exception] = []
    stop = threading.Event()
    start = perf_counter()

    def work(i: int, views: list[memoryview]) -> None:
        pick = random.Random(f"{seed}/{i}")
        try:
            while not stop.is_set() and (counts[i] == 0 or perf_counter() - start < seconds):
                source.read_into(file, pick.randint(low, high - blocks) * block, views[counts[i] % len(views)])
                counts[i] += 1
        except Exception as error:
            failures.append(error)
            stop.set()

    places = max(1, memory_bytes // (stride * depth))  # per thread
    with AlignedBuffer(-(-depth * places * stride // HUGE_PAGE) * HUGE_PAGE) as buffer:
        buffer.view[:: mmap.PAGESIZE] = bytes(
            len(buffer.view[:: mmap.PAGESIZE])
        )  # first touches aren't the disk's time
        threads: list[threading.Thread] = []
        try:
            start = perf_counter()
            for i in range(depth):
                mine = range(i * places * stride, (i + 1) * places * stride, stride)
                views = [buffer.view[at : at + blocks * block] for at in mine]
                thread = threading.Thread(target=work, args=(i, views), name=f"sluice-probe-{i}")
                thread.start()
                threads.append(thread)
            for thread in threads:
                thread.join()
            took = perf_counter() - start
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    if failures:
        raise failures[0]
    return ReadRate(sum(counts) * blocks * block / took, sum(counts), took, opened.direct)
