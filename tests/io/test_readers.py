"""What every reader keeps: bytes land where they belong, in the order of deadlines; what has ended writes no more."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from reader_harness import DATA, ROOM, SIZES, WAIT_S, Gate, Hold, make_reader, read, wait_for

from sluice.errors import EngineClosed, ReadError
from sluice.io import queue
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.io.reader import Reader
from sluice.io.uring import available
from sluice.types import Completion, Read, Segment


@pytest.fixture(params=["threads", "ring"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ring" and not available():
        pytest.skip("this system has no io_uring")
    return request.param


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ModelFiles]:
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


@pytest.mark.parametrize("dest", [-1, 8192 - 99, 8192])
def test_a_segment_outside_of_the_pool_is_an_error(kind: str, files: ModelFiles, dest: int) -> None:
    with AlignedBuffer(8192) as pool:
        with make_reader(kind, files, pool.view, lambda r: [Segment(0, 0, 100, dest)]) as reader:
            reader.submit(read(0))
            assert isinstance(wait_for(reader, 1)[0].error, ValueError)
        assert not any(pool.view)


@pytest.fixture
def one_at_a_time(kind: str, files: ModelFiles) -> Iterator[Callable[[Gate], Reader]]:
    """Makes a reader of one segment at a time; a read's two segments go to the place of its slot."""
    readers: list[Reader] = []
    with AlignedBuffer(64 * ROOM) as pool:

        def make(gate: Gate) -> Reader:
            def locate(r: Read) -> Sequence[Segment]:
                return [Segment(2, 4096 * r.slot + i * 512, 512, 4096 * r.slot + i * 512) for i in range(2)]

            readers.append(make_reader(kind, files, pool.view, locate, depth=1, hook=gate))
            return readers[-1]

        yield make
        for reader in readers:
            reader.close()


def test_sooner_deadlines_first_then_in_order(one_at_a_time: Callable[[Gate], Reader]) -> None:
    gate = Gate(0)
    with one_at_a_time(gate) as reader:
        reader.submit(read(0, 9))
        assert gate.waiting.wait(WAIT_S)
        for serial, deadline in ((1, 5), (2, 3), (3, 5), (4, 3), (5, 4)):
            reader.submit(read(serial, deadline))
        gate.open.set()
        ended = [each.read.serial for each in wait_for(reader, 6)]
    # Read 0 has begun, but its second segment is due last.
    assert gate.started == [0, 2, 2, 4, 4, 5, 5, 1, 1, 3, 3, 0]
    assert ended == [2, 4, 5, 1, 3, 0]


def test_promote(one_at_a_time: Callable[[Gate], Reader]) -> None:
    gate = Gate(0)
    with one_at_a_time(gate) as reader:
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


def test_cancel(one_at_a_time: Callable[[Gate], Reader]) -> None:
    gate = Gate(0)
    with one_at_a_time(gate) as reader:
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


def test_completions_wait_no_longer_than_told(one_at_a_time: Callable[[Gate], Reader]) -> None:
    gate = Gate(0)
    with one_at_a_time(gate) as reader:
        assert reader.completions(block=True) == [], "nothing is outstanding"
        reader.submit(read(0))
        assert reader.completions() == []
        assert reader.completions(block=True, timeout=0.01) == []
        gate.open.set()
        assert len(wait_for(reader, 1)) == 1


def test_submit_refuses(kind: str, one_at_a_time: Callable[[Gate], Reader], files: ModelFiles) -> None:
    gate = Gate(0)
    with one_at_a_time(gate) as reader:
        reader.submit(read(0))
        with pytest.raises(ValueError, match="outstanding"):
            reader.submit(read(0))
        gate.open.set()
        wait_for(reader, 1)
    with pytest.raises(EngineClosed):
        reader.submit(read(1))
    with AlignedBuffer(4096) as pool:
        with make_reader(kind, files, pool.view, lambda r: []) as empty, pytest.raises(ValueError, match="no segments"):
            empty.submit(read(0))
        with pytest.raises(ValueError, match="page border"):
            make_reader(kind, files, pool.view[512:], lambda r: [])
        with pytest.raises(ValueError, match="at least one"):
            make_reader(kind, files, pool.view, lambda r: [], depth=0)


def test_close_with_work_outstanding(one_at_a_time: Callable[[Gate], Reader]) -> None:
    gate = Gate(0)
    reader = one_at_a_time(gate)
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


def test_a_read_that_runs_to_its_end_survives_close(kind: str, files: ModelFiles) -> None:
    hold = Hold(2)
    segments = [Segment(1, 4096 * i, 4096, 4096 * (2 * i + 1)) for i in range(2)]
    with AlignedBuffer(5 * 4096) as pool:
        reader = make_reader(kind, files, pool.view, lambda r: segments, depth=2, hook=hold)
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


def test_depth_counts_segments_that_run(kind: str, files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(queue, "perf_counter", lambda: now[0])
    hold = Hold(2)
    twice = [Segment(1, 0, 512, 4096)] * 2
    with (
        AlignedBuffer(3 * 4096) as pool,
        make_reader(kind, files, pool.view, lambda r: twice, depth=2, hook=hold) as reader,
    ):
        reader.submit(read(0))
        hold.all_in.wait(WAIT_S)
        now[0] += 3
        hold.open.set()
        wait_for(reader, 1)
        assert (reader.stats().busy_s, reader.stats().depth_s) == (3, 6)


@pytest.mark.parametrize(("offset", "came"), [(SIZES[0] - 10, 10), (SIZES[0] - 123, 123), (SIZES[0], 0), (1 << 20, 0)])
def test_a_segment_past_the_end_of_the_file_is_an_error(kind: str, files: ModelFiles, offset: int, came: int) -> None:
    with AlignedBuffer(4 * 4096) as pool:
        place = Segment(0, offset, came + 1, 4096 + offset % files[0].block)
        with make_reader(kind, files, pool.view, lambda r: [place]) as reader:
            reader.submit(read(0))
            error = wait_for(reader, 1)[0].error
            assert reader.stats().reads == reader.stats().bytes_read == 0
    assert isinstance(error, ReadError)
    assert f"{came + 1} bytes at offset {offset}, {came} came" in str(error)


def test_a_truncated_file_fails_its_reads_only(kind: str, files: ModelFiles) -> None:
    with AlignedBuffer(16 * 4096) as pool:
        with make_reader(
            kind, files, pool.view, lambda r: [Segment(r.serial, 4096, 8192, 4096 + r.slot * 16384)]
        ) as reader:
            files[0].path.write_bytes(DATA[0][:6000])
            reader.submit(read(0))
            reader.submit(read(1, slot=1))
            errors = {each.read.serial: each.error for each in wait_for(reader, 2)}
        assert errors[1] is None
        assert isinstance(errors[0], ReadError)
        assert str(files[0].path) in str(errors[0]) and "offset 4096" in str(errors[0])
        assert pool.view[20480:28672] == DATA[1][4096:12288]


def test_a_failed_read_ends_only_when_nothing_is_written_for_it(kind: str, files: ModelFiles) -> None:
    segments = [Segment(2, 4096 * i, 4096, 4096 * (2 * i + 1)) for i in range(3)]
    failed, go = threading.Event(), threading.Event()
    started: list[int] = []

    def hook(which: Read, segment: Segment) -> None:
        started.append(segment.offset)
        if segment.offset == 4096:
            failed.set()
            raise OSError(errno.EIO, "injected")
        assert go.wait(WAIT_S)

    with AlignedBuffer(8 * 4096) as pool:
        with make_reader(kind, files, pool.view, lambda r: segments, depth=2, hook=hook) as reader:
            reader.submit(read(0))
            assert failed.wait(WAIT_S)
            assert reader.completions(block=True, timeout=0.05) == [], "the first segment still runs"
            assert not reader.cancel(read(0))
            go.set()
            ended = wait_for(reader, 1)
            assert isinstance(ended[0].error, (OSError, ReadError))
            after = bytes(pool.view)
            assert reader.stats().reads == 0
        assert bytes(pool.view) == after
        assert after[4096:8192] == DATA[2][:4096]
        assert sorted(started) == [0, 4096] and after[5 * 4096 : 6 * 4096] == bytes(4096), "the third was dropped"


@pytest.mark.parametrize("seed", range(4))
def test_cancelled_reads_never_write_under_races(kind: str, files: ModelFiles, seed: int) -> None:
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
        with make_reader(kind, files, pool.view, locate, depth=4) as reader:
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


def test_busy_time_and_depth(one_at_a_time: Callable[[Gate], Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(queue, "perf_counter", lambda: now[0])
    gate = Gate(0, 1)
    with one_at_a_time(gate) as reader:
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
