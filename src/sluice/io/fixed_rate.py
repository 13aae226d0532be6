"""An emulated slower disk: model files that let bytes through at a fixed rate. It does not know who reads, or why."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from time import perf_counter, sleep

from sluice.io.files import ModelFiles


class FixedRateFiles(ModelFiles):
    """ModelFiles whose reads together take at least bytes ÷ `bytes_per_s`, however many threads read.

    Each read reserves the next stretch of the disk's time, [max(now, end of the last), + bytes ÷ rate), does the real
    read meanwhile, and returns no sooner than that stretch ends. Time in which nobody reads earns nothing. What counts
    are the bytes asked for, whole blocks of direct files. `clock` and `pause` are in seconds.
    """

    by_descriptor = False

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = perf_counter,
        pause: Callable[[float], None] = sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a read rate must be positive, not {bytes_per_s}")
        super().__init__(paths)
        self._rate = bytes_per_s
        self._clock = clock
        self._pause = pause
        self._reserving = threading.Lock()
        self._free_at = float("-inf")

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        with self._reserving:
            ends = self._free_at = max(self._clock(), self._free_at) + len(view) / self._rate
        got = super().read_into(file, offset, view)
        while (left := ends - self._clock()) > 0:
            self._pause(left)
        return got
