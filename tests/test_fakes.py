"""The ordered reader keeps the contract it stands in for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import POISON, OrderedReader

from sluice.errors import ReadError
from sluice.io.files import ModelFiles
from sluice.io.reader import Reader
from sluice.types import ExpertKey, Read, Segment

N = 1000  # bytes an expert
DATA = random.Random(1).randbytes(8 * N)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ModelFiles]:
    (tmp_path / "model").write_bytes(DATA)
    with ModelFiles([tmp_path / "model"]) as opened:
        yield opened


def locate(read: Read) -> list[Segment]:
    return [Segment(0, read.key.expert * N, N, read.slot * N)]


def read(i: int) -> Read:
    return Read(ExpertKey(0, i), slot=i, deadline=i, serial=i)


def test_the_test_orders(files: ModelFiles) -> None:
    pool = memoryview(bytearray(8 * N))
    with OrderedReader(files, pool, locate) as reader:
        as_reader: Reader = reader
        for i in range(4):
            as_reader.submit(read(i))
        assert as_reader.completions() == []
        reader.complete(read(2))
        reader.fail(read(0), ReadError("broken"))
        ended = as_reader.completions(block=True)
        assert [each.read for each in ended] == [read(2), read(0)]
        assert ended[0].error is None and isinstance(ended[1].error, ReadError)
        assert pool[2 * N : 3 * N] == DATA[2 * N : 3 * N]
        assert set(pool[:N]) == {POISON}
        assert as_reader.cancel(read(1)) and not as_reader.cancel(read(1))
        as_reader.promote(read(3), 0)
        assert [each.read.deadline for each in as_reader.completions(block=True)] == [0]
        assert as_reader.completions(block=True) == []
        assert not any(pool[N : 2 * N])


def test_a_seed_orders(files: ModelFiles) -> None:
    def run(seed: int) -> list[int]:
        pool = memoryview(bytearray(8 * N))
        order: list[int] = []
        with OrderedReader(files, pool, locate, seed) as reader:
            for i in range(8):
                reader.submit(read(i))
            while reader.outstanding:
                ended = reader.completions(block=True)
                assert ended
                order += [each.read.serial for each in ended]
        assert bytes(pool) == DATA
        return order

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(5)}) > 1


def test_a_read_that_runs_is_not_cancelled_and_ends(files: ModelFiles) -> None:
    pool = memoryview(bytearray(8 * N))
    with OrderedReader(files, pool, locate, running_share=1.0, poll_share=1.0) as reader:
        reader.submit(read(0))
        assert not reader.cancel(read(0))
        assert set(pool[:N]) == {POISON}
        assert [each.error for each in reader.completions()] == [None]
        assert pool[:N] == DATA[:N]
