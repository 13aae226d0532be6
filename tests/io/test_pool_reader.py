"""Bytes land where they belong, in the order of deadlines, and a read that has ended writes no more."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.errors import EngineClosed, ReadError
from sluice.io import files as files_module
from sluice.io import pool_reader
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.io.pool_reader import PoolReader
from sluice.io.reader import Reader
from sluice.types import Completion, ExpertKey, Read, Segment

ROOM = 4096  # the widest block: what the layout leaves free on both sides of a segment
SIZES = (5 * 4096 + 123, 64 * 1024, 300_001)
DATA = [random.Random(size).randbytes(size) for size in SIZES]
FILL = 0xA5
WAIT_S = 30.0  # only a broken reader takes that long


def read(serial: int, deadline: int = 0, slot: int = 0) -> Read:
    return Read(ExpertKey(0, serial), slot, deadline, serial)


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


@pytest.mark.parametrize("dest", [-1, 8192 - 99, 8192])
def test_a_segment_outside_of_the_pool_is_an_error(files: ModelFiles, dest: int) -> None:
    with AlignedBuffer(8192) as pool:
        with PoolReader(files, pool.view, lambda r: [Segment(0, 0, 100, dest)]) as reader:
            reader.submit(read(0))
            assert isinstance(wait_for(reader, 1)[0].error, ValueError)
        assert not any(pool.view)


@pytest.fixture
def one_thread(files: ModelFiles) -> Iterator[Callable[[Gate], PoolReader]]:
    """Makes a reader with one thread; a read's two segments go to the place of its slot."""
    readers: list[PoolReader] = []
    with AlignedBuffer(64 * ROOM) as pool:

        def make(gate: Gate) -> PoolReader:
            def locate(r: Read) -> Sequence[Segment]:
                return [Segment(2, 4096 * r.slot + i * 512, 512, 4096 * r.slot + i * 512) for i in range(2)]

            readers.append(PoolReader(files, pool.view, locate, threads=1, on_start=gate))
            return readers[-1]

        yield make
        for reader in readers:
            reader.close()


def test_sooner_deadlines_first_then_in_order(one_thread: Callable[[Gate], PoolReader]) -> None:
    gate = Gate(0)
    with one_thread(gate) as reader:
        reader.submit(read(0, 9))
        assert gate.waiting.wait(WAIT_S)
        for serial, deadline in ((1, 5), (2, 3), (3, 5), (4, 3), (5, 4)):
            reader.submit(read(serial, deadline))
        gate.open.set()
        ended = [each.read.serial for each in wait_for(reader, 6)]
    # Read 0 has begun, but its second segment is due last.
    assert gate.started == [0, 2, 2, 4, 4, 5, 5, 1, 1, 3, 3, 0]
    assert ended == [2, 4, 5, 1, 3, 0]


def test_promote(one_thread: Callable[[Gate], PoolReader]) -> None:
    gate = Gate(0)
    with one_thread(gate) as reader:
        reader.submit(read(0, 0))
        assert gate.waiting.wait(WAIT_S)
        for serial in (1, 2, 3):
            reader.submit(read(serial, 5))
        reader.submit(read(4, 6))
        reader.promote(read(3, 5), 2)
        reader.promote(read(1, 5), 7)  # never less urgent
        reader.promote(read(2, 5), 4)
        reader.promote(read(2, 5), 1)
        reader.promote(read(99, 5), 1)  # unknown: nothing to do
        gate.open.set()
        ended = wait_for(reader, 5)
        reader.promote(read(1, 5), 0)
        assert reader.completions() == []
    assert [each.read for each in ended] == [read(0, 0), read(2, 5), read(3, 5), read(1, 5), read(4, 6)]
    assert gate.started == [0, 0, 2, 2, 3, 3, 1, 1, 4, 4]


def test_cancel(one_thread: Callable[[Gate], PoolReader]) -> None:
    gate = Gate(0)
    with one_thread(gate) as reader:
        reader.submit(read(0))
        assert gate.waiting.wait(WAIT_S)
        reader.submit(read(1))
        reader.submit(read(2))
        assert not reader.cancel(read(0)), "it runs"
        assert reader.cancel(read(1))
        assert not reader.cancel(read(1)), "it is gone"
        reader.submit(read(1))  # the same expert may be wanted again
        assert reader.cancel(read(2))
        gate.open.set()
        assert [each.read.serial for each in wait_for(reader, 2)] == [0, 1]
        assert not reader.cancel(read(1)), "it has ended"
        assert reader.completions(block=True) == []
        assert reader.stats().reads == 2
    assert 2 not in gate.started


def test_completions_wait_no_longer_than_told(one_thread: Callable[[Gate], PoolReader]) -> None:
    gate = Gate(0)
    with one_thread(gate) as reader:
        assert reader.completions(block=True) == [], "nothing is outstanding"
        reader.submit(read(0))
        assert reader.completions() == []
        assert reader.completions(block=True, timeout=0.01) == []
        gate.open.set()
        assert len(wait_for(reader, 1)) == 1


def test_submit_refuses(one_thread: Callable[[Gate], PoolReader], files: ModelFiles) -> None:
    gate = Gate(0)
    with one_thread(gate) as reader:
        reader.submit(read(0))
        with pytest.raises(ValueError, match="outstanding"):
            reader.submit(read(0))
        gate.open.set()
        wait_for(reader, 1)
    with pytest.raises(EngineClosed):
        reader.submit(read(1))
    with AlignedBuffer(4096) as pool:
        with PoolReader(files, pool.view, lambda r: []) as empty, pytest.raises(ValueError, match="no segments"):
            empty.submit(read(0))
        with pytest.raises(ValueError, match="page border"):
            PoolReader(files, pool.view[512:], lambda r: [])
        with pytest.raises(ValueError, match="at least one thread"):
            PoolReader(files, pool.view, lambda r: [], threads=0)


def test_close_with_work_outstanding(one_thread: Callable[[Gate], PoolReader]) -> None:
    gate = Gate(0)
    reader = one_thread(gate)
    for serial in range(8):
        reader.submit(read(serial))
    assert gate.waiting.wait(WAIT_S)
    closing = threading.Thread(target=reader.close)
    closing.start()
    with pytest.raises(EngineClosed):  # until close() has begun, which must then wait for the read that runs
        for serial in range(8, 1 << 20):
            reader.submit(read(serial))
            time.sleep(0.001)
    assert closing.is_alive(), "it waits for what runs"
    gate.open.set()
    closing.join(WAIT_S)
    reader.close()
    ended = reader.completions(block=True)
    assert [each.read.serial for each in ended] == [0]
    assert isinstance(ended[0].error, EngineClosed), "its second segment was never read"
    assert gate.started == [0]


class Hold:
    """An on_start hook that holds every segment until `open` is set, and `all_in` once `n` are held."""

    def __init__(self, n: int) -> None:
        self.open = threading.Event()
        self.all_in = threading.Barrier(n + 1)

    def __call__(self, which: Read, segment: Segment) -> None:
        self.all_in.wait(WAIT_S)
        assert self.open.wait(WAIT_S)


def test_a_read_that_runs_to_its_end_survives_close(files: ModelFiles) -> None:
    hold = Hold(2)
    segments = [Segment(1, 4096 * i, 4096, 4096 * (2 * i + 1)) for i in range(2)]
    with AlignedBuffer(5 * 4096) as pool:
        reader = PoolReader(files, pool.view, lambda r: segments, threads=2, on_start=hold)
        reader.submit(read(0))
        hold.all_in.wait(WAIT_S)
        closing = threading.Thread(target=reader.close)
        closing.start()
        with pytest.raises(EngineClosed):
            for serial in range(1, 1 << 20):
                reader.submit(read(serial))
                time.sleep(0.001)
        hold.open.set()
        closing.join(WAIT_S)
        assert reader.completions() == [Completion(read(0), None)]
        assert pool.view[3 * 4096 : 4 * 4096] == DATA[1][4096:8192]


def test_depth_counts_segments_that_run(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pool_reader, "perf_counter", lambda: now[0])
    hold = Hold(2)
    twice = [Segment(1, 0, 512, 4096)] * 2
    with (
        AlignedBuffer(3 * 4096) as pool,
        PoolReader(files, pool.view, lambda r: twice, threads=2, on_start=hold) as reader,
    ):
        reader.submit(read(0))
        hold.all_in.wait(WAIT_S)
        now[0] += 3
        hold.open.set()
        wait_for(reader, 1)
        assert (reader.stats().busy_s, reader.stats().depth_s) == (3, 6)


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


def test_a_truncated_file_fails_its_reads_only(files: ModelFiles) -> None:
    with AlignedBuffer(16 * 4096) as pool:
        with PoolReader(files, pool.view, lambda r: [Segment(r.serial, 4096, 8192, 4096 + r.slot * 16384)]) as reader:
            files[0].path.write_bytes(DATA[0][:6000])
            reader.submit(read(0))
            reader.submit(read(1, slot=1))
            errors = {each.read.serial: each.error for each in wait_for(reader, 2)}
        assert errors[1] is None
        assert isinstance(errors[0], ReadError)
        assert str(files[0].path) in str(errors[0]) and "offset 4096" in str(errors[0])
        assert pool.view[20480:28672] == DATA[1][4096:12288]


class FaultyFiles(ModelFiles):
    """Raises for reads that cover a byte of `bad`; holds the others until `go` is set."""

    bad: frozenset[int] = frozenset()
    error: BaseException = OSError(errno.EIO, "injected")
    go: threading.Event | None = None

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        if any(offset <= at < offset + len(view) for at in self.bad):
            raise self.error
        if self.go is not None:
            assert self.go.wait(WAIT_S)
        return super().read_into(file, offset, view)


def test_a_failed_read_ends_only_when_no_thread_writes_for_it(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(DATA[2])
    segments = [Segment(0, 4096 * i, 4096, 4096 * (2 * i + 1)) for i in range(3)]
    with FaultyFiles([tmp_path / "model"]) as files, AlignedBuffer(8 * 4096) as pool:
        files.bad, files.go = frozenset([4096]), threading.Event()
        failed = threading.Event()
        started: list[int] = []

        def hook(which: Read, segment: Segment) -> None:
            started.append(segment.offset)
            if segment.offset == 4096:
                failed.set()

        with PoolReader(files, pool.view, lambda r: segments, threads=2, on_start=hook) as reader:
            reader.submit(read(0))
            assert failed.wait(WAIT_S)
            assert reader.completions(block=True, timeout=0.05) == [], "the first segment still runs"
            assert not reader.cancel(read(0))
            files.go.set()
            ended = wait_for(reader, 1)
            assert isinstance(ended[0].error, OSError)
            after = bytes(pool.view)
            assert reader.stats().reads == 0
        assert bytes(pool.view) == after
        assert after[4096:8192] == DATA[2][:4096]
        assert sorted(started) == [0, 4096] and after[5 * 4096 : 6 * 4096] == bytes(4096), "the third was dropped"


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


@pytest.mark.parametrize("seed", range(4))
def test_cancelled_reads_never_write_under_races(files: ModelFiles, seed: int) -> None:
    """Reads go to slots of their own; a third are cancelled at once or later, by deadline or against it."""
    rng = random.Random(seed)
    n, slot_bytes = 300, 4096 * 3
    source = [rng.randrange(0, SIZES[2] - 5000) for _ in range(n)]
    size = [rng.randrange(1, 5000) for _ in range(n)]

    def locate(r: Read) -> list[Segment]:
        at = source[r.serial]
        half = size[r.serial] // 2
        dest = r.slot * slot_bytes + 4096 + at % 512
        return [Segment(2, at, size[r.serial], dest), Segment(2, at, half, dest)][: 1 + r.serial % 2]

    with AlignedBuffer(n * slot_bytes) as pool:
        cancelled: set[int] = set()
        refused: set[int] = set()
        ended: list[Completion] = []
        with PoolReader(files, pool.view, locate, threads=4) as reader:
            reads = [read(i, rng.randrange(50), slot=i) for i in range(n)]
            for i, each in enumerate(reads):
                reader.submit(each)
                victim = reads[rng.randrange(max(0, i - 8), i + 1)]
                if rng.random() < 0.5 and victim.serial not in cancelled:
                    (cancelled if reader.cancel(victim) else refused).add(victim.serial)
                elif rng.random() < 0.3:
                    reader.promote(victim, rng.randrange(50))
                ended += reader.completions()
            ended += wait_for(reader, n - len(cancelled) - len(ended))
            assert reader.completions(block=True) == []
            stats = reader.stats()
        assert sorted(each.read.serial for each in ended) == sorted(set(range(n)) - cancelled)
        assert all(each.error is None for each in ended)
        assert stats.reads == n - len(cancelled)
        for i in range(n):
            if i in cancelled:
                assert not any(pool.view[i * slot_bytes : (i + 1) * slot_bytes])
            else:
                dest = i * slot_bytes + 4096 + source[i] % 512
                assert pool.view[dest : dest + size[i]] == DATA[2][source[i] : source[i] + size[i]]


def test_busy_time_and_depth(one_thread: Callable[[Gate], PoolReader], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pool_reader, "perf_counter", lambda: now[0])
    gate = Gate(0, 1)
    with one_thread(gate) as reader:
        now[0] += 5  # idle
        reader.submit(read(0))
        assert gate.waiting.wait(WAIT_S)
        reader.submit(read(1))
        now[0] += 2  # one runs, one waits
        assert (reader.stats().busy_s, reader.stats().depth_s) == (2, 2)
        assert reader.cancel(read(1))
        now[0] += 1
        gate.open.set()
        wait_for(reader, 1)
        now[0] += 7  # idle again
        assert (reader.stats().busy_s, reader.stats().depth_s) == (3, 3)
