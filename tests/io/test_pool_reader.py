"""Reading threads: what goes through a bounce buffer, any way of opening a file, and whatever threads may meet."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reader_harness import DATA, FILL, ROOM, SIZES, read, wait_for

from sluice.errors import ReadError
from sluice.io import files as files_module
from sluice.io import pool_reader
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.io.pool_reader import PoolReader
from sluice.types import Read, Segment


@pytest.fixture(params=["direct", "buffered", "seek"])
def files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModelFiles]:
    if request.param != "direct":
        monkeypatch.setattr(files_module, "_open_direct", lambda path, flags: (None, 1))
    if request.param == "seek":
        monkeypatch.delattr(os, "preadv", raising=False)
    paths = [tmp_path / f"model-{i}.gguf" for i in range(len(DATA))]
    for path, data in zip(paths, DATA, strict=True):
        path.write_bytes(data)
    with ModelFiles(paths) as opened:
        yield opened


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@st.composite
def layouts(draw: st.DrawFn) -> list[list[Segment]]:
    """Reads of up to three segments anywhere in the files, in disjoint places of a pool with room around each."""
    reads, at = [], ROOM
    for _ in range(draw(st.integers(1, 6))):
        segments = []
        for _ in range(draw(st.integers(1, 3))):
            file = draw(st.integers(0, len(SIZES) - 1))
            n = draw(st.one_of(st.integers(0, SIZES[file]), st.sampled_from([1, 512, 4096, 8192])))
            offset = draw(st.one_of(st.integers(0, SIZES[file] - n), st.just(SIZES[file] - n)))
            dest = at + (offset % ROOM if draw(st.booleans()) else draw(st.integers(0, ROOM - 1)))
            segments.append(Segment(file, offset, n, dest))
            at = -(-(dest + n) // ROOM) * ROOM + 2 * ROOM
        reads.append(segments)
    return reads


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts(), threads=st.integers(1, 4), bounce=st.sampled_from([4096, 3 * 4096, 4 << 20]))
def test_every_byte_lands_and_no_other_is_touched(
    files: ModelFiles, layout: list[list[Segment]], threads: int, bounce: int
) -> None:
    end = max(segment.dest + segment.n_bytes for segments in layout for segment in segments) + 2 * ROOM
    with pytest.MonkeyPatch.context() as patch, AlignedBuffer(end) as pool:
        patch.setattr(pool_reader, "BOUNCE_BYTES", bounce)
        pool.view[:] = bytes([FILL]) * end
        with PoolReader(files, pool.view, lambda r: layout[r.serial], threads=threads) as reader:
            for i in range(len(layout)):
                reader.submit(read(i))
            ended = wait_for(reader, len(layout))
            stats = reader.stats()
        assert sorted(each.read.serial for each in ended) == list(range(len(layout)))
        assert all(each.error is None for each in ended)
        free = bytearray(b"\1" * end)
        for file, offset, n, dest in (segment for segments in layout for segment in segments):
            assert pool.view[dest : dest + n] == DATA[file][offset : offset + n]
            block = files[file].block
            straight = offset % block == dest % block
            low = dest - dest % block if straight else dest
            high = -(-(dest + n) // block) * block if straight else dest + n
            free[low:high] = bytes(high - low)
        assert all(byte == FILL for byte, is_free in zip(pool.view, free, strict=True) if is_free)
    flat = [segment for segments in layout for segment in segments]
    assert stats.reads == len(layout)
    assert stats.bytes_read == sum(segment.n_bytes for segment in flat)
    assert stats.bytes_from_disk >= stats.bytes_read
    assert stats.bounced == sum(s.offset % files[s.file].block != s.dest % files[s.file].block for s in flat)
    assert 0 < stats.depth_s <= stats.busy_s * threads


def test_blocks_that_stick_out_of_the_pool_are_bounced(files: ModelFiles) -> None:
    ends = [Segment(1, 100, 1000, 100), Segment(1, 4096, 4000, 2 * 4096)]
    with AlignedBuffer(2 * 4096 + 4000) as pool:
        with PoolReader(files, pool.view, lambda r: ends) as reader:
            reader.submit(read(0))
            assert wait_for(reader, 1)[0].error is None
            assert reader.stats().bounced == (1 if files.direct else 0)
        assert pool.view[100:1100] == DATA[1][100:1100]
        assert pool.view[2 * 4096 :] == DATA[1][4096:8096]


def test_a_segment_past_the_end_of_the_file_is_an_error(files: ModelFiles) -> None:
    with (
        AlignedBuffer(4 * 4096) as pool,
        PoolReader(files, pool.view, lambda r: [Segment(0, SIZES[0] - 10, 11, 4096 + r.slot)]) as reader,
    ):
        for serial in range(2):  # the first one is aligned
            reader.submit(read(serial, slot=serial + (SIZES[0] - 10) % 512))
        errors = [each.error for each in wait_for(reader, 2)]
    assert all(isinstance(error, ReadError) and "11 bytes at offset" in str(error) for error in errors), errors
    assert all("10 came" in str(error) for error in errors)


class FaultyFiles(ModelFiles):
    """Raises for reads that cover a byte of `bad`."""

    bad: frozenset[int] = frozenset()
    error: BaseException = OSError(errno.EIO, "injected")

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        if any(offset <= at < offset + len(view) for at in self.bad):
            raise self.error
        return super().read_into(file, offset, view)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "injected"), MemoryError(), KeyError("bug"), SystemExit(3)])
def test_whatever_is_raised_becomes_an_error_and_threads_live_on(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "model").write_bytes(DATA[2])
    with FaultyFiles([tmp_path / "model"]) as files, AlignedBuffer(8 * 4096) as pool:
        files.bad, files.error = frozenset([4096]), error

        def locate(r: Read) -> list[Segment]:
            return [Segment(0, 4096 * (r.serial % 2), 4096, 4096)]

        with PoolReader(files, pool.view, locate, threads=1) as reader:
            for serial in range(6):
                reader.submit(read(serial))
            ended = wait_for(reader, 6)
    assert [each.error is None for each in ended] == [True, False] * 3
    assert all(isinstance(each.error, Exception) for each in ended[1::2])


def test_a_hook_that_raises_fails_the_read(files: ModelFiles) -> None:
    def hook(which: Read, segment: Segment) -> None:
        raise RuntimeError("hook")

    with AlignedBuffer(3 * 4096) as pool:
        with PoolReader(files, pool.view, lambda r: [Segment(1, 0, 4096, 4096)], on_start=hook) as reader:
            reader.submit(read(0))
            assert isinstance(wait_for(reader, 1)[0].error, RuntimeError)
        assert not any(pool.view)
