"""The emulated disk's rate is kept by its own clock, and idle time earns nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.io.aligned import AlignedBuffer
from sluice.io.fixed_rate import FixedRateFiles
from sluice.io.pool_reader import PoolReader
from sluice.types import ExpertKey, Read, Segment

DATA = random.Random(5).randbytes(64 * 4096)
RATE = 4096.0  # bytes per second: a block takes a second of the virtual clock


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        with self.lock:
            self.now += seconds


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def files(tmp_path: Path, clock: VirtualClock) -> Iterator[FixedRateFiles]:
    (tmp_path / "model").write_bytes(DATA)
    with FixedRateFiles([tmp_path / "model"], RATE, clock=clock, pause=clock.pause) as opened:
        yield opened


def test_each_read_takes_its_time_and_delivers(files: FixedRateFiles, clock: VirtualClock) -> None:
    with AlignedBuffer(4 * 4096) as buffer:
        for i, blocks in enumerate((1, 4, 2)):
            before = clock.now
            assert files.read_into(0, 4096 * i, buffer.view[: 4096 * blocks]) == 4096 * blocks
            assert clock.now - before == blocks
            assert buffer.view[: 4096 * blocks] == DATA[4096 * i : 4096 * (i + blocks)]


def test_no_credit_for_idle_time(files: FixedRateFiles, clock: VirtualClock) -> None:
    with AlignedBuffer(4096) as buffer:
        files.read_into(0, 0, buffer.view)
        clock.now += 1000
        for _ in range(5):
            before = clock.now
            files.read_into(0, 0, buffer.view)
            assert clock.now - before == 1


def test_reads_at_once_take_turns(tmp_path: Path, clock: VirtualClock) -> None:
    (tmp_path / "model").write_bytes(DATA)
    to_come = [1, 2]  # blocks of the reads that arrive while the one before waits for its end

    def pause(seconds: float) -> None:
        if to_come:
            read(to_come.pop())
        else:
            clock.pause(seconds)

    def read(blocks: int) -> None:
        with AlignedBuffer(2 * 4096) as buffer:
            files.read_into(0, 0, buffer.view[: 4096 * blocks])

    with FixedRateFiles([tmp_path / "model"], RATE, clock=clock, pause=pause) as files:
        read(1)
    assert clock.now == 1 + 2 + 1


def test_through_a_pool_reader(files: FixedRateFiles, clock: VirtualClock) -> None:
    segments = [Segment(0, 4096 * i, 4096, 4096 * (2 * i + 1)) for i in range(3)]
    with AlignedBuffer(8 * 4096) as pool:
        with PoolReader(files, pool.view, lambda r: segments, threads=2) as reader:
            reader.submit(Read(ExpertKey(0, 0), 0, 0, 0))
            assert reader.completions(block=True, timeout=30)[0].error is None
        assert clock.now >= 3
        for _, offset, n, dest in segments:
            assert pool.view[dest : dest + n] == DATA[offset : offset + n]


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_must_be_positive(rate: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="positive"):
        FixedRateFiles([tmp_path / "model"], rate)
