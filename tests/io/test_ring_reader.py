"""The ring's own ways to go wrong: partial results, refusals, threads that end, Ctrl-C at any line, a lost owner."""

from __future__ import annotations

import errno
import gc
import linecache
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reader_harness import DATA, FILL, ROOM, SIZES, WAIT_S, Gate, HookedRing, hooked, read, wait_for

from sluice.errors import EngineClosed, ReadError
from sluice.io import queue, ring_reader, uring
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.io.ring_reader import RingReader
from sluice.types import Read, Segment

pytestmark = pytest.mark.skipif(not uring.available(), reason="this system has no io_uring")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ModelFiles]:
    paths = [tmp_path / f"model-{i}.gguf" for i in range(len(DATA))]
    for path, data in zip(paths, DATA, strict=True):
        path.write_bytes(data)
    with ModelFiles(paths) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    gc.collect()
    files, before = Path("/proc/self/fd"), set(threading.enumerate())
    n_open = len(list(files.iterdir()))
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
    assert set(threading.enumerate()) == before and len(list(files.iterdir())) == n_open


@st.composite
def layouts(draw: st.DrawFn) -> list[list[Segment]]:
    """Reads of up to three segments in place, anywhere in the files up to their ends."""
    reads, at = [], ROOM
    for _ in range(draw(st.integers(1, 6))):
        segments = []
        for _ in range(draw(st.integers(1, 3))):
            file = draw(st.integers(0, len(SIZES) - 1))
            n = draw(st.one_of(st.integers(0, SIZES[file]), st.sampled_from([1, 512, 4096, 8192])))
            offset = draw(st.one_of(st.integers(0, SIZES[file] - n), st.just(SIZES[file] - n)))
            segments.append(Segment(file, offset, n, at + offset % ROOM))
            at = -(-(at + offset % ROOM + n) // ROOM) * ROOM + 2 * ROOM
        reads.append(segments)
    return reads


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts(), depth=st.integers(1, 9), most=st.sampled_from([0, 512, 5000, 70_000]))
def test_every_byte_lands_and_no_other_is_touched(
    files: ModelFiles, layout: list[list[Segment]], depth: int, most: int
) -> None:
    flat = [segment for segments in layout for segment in segments]
    end = max(segment.dest + segment.n_bytes for segment in flat) + 2 * ROOM
    most = max(most, files.block) if most else 0

    def make(pool: memoryview) -> RingReader:
        if most:  # results bring no more than that
            return hooked(files, pool, lambda r: layout[r.serial], depth, HookedRing(depth + 2, most=most))
        return RingReader(files, pool, lambda r: layout[r.serial], depth=depth)

    with AlignedBuffer(end) as pool:
        pool.view[:] = bytes([FILL]) * end
        with make(pool.view) as reader:
            for i in range(len(layout)):
                reader.submit(read(i))
            ended = wait_for(reader, len(layout))
            stats = reader.stats()
        assert sorted(each.read.serial for each in ended) == list(range(len(layout)))
        assert all(each.error is None for each in ended)
        free = bytearray(b"\1" * end)
        for file, offset, n, dest in flat:
            assert pool.view[dest : dest + n] == DATA[file][offset : offset + n]
            block = files[file].block
            low, high = dest - dest % block, -(-(dest + n) // block) * block
            free[low:high] = bytes(high - low)
        assert all(byte == FILL for byte, is_free in zip(pool.view, free, strict=True) if is_free)
    assert stats.reads == len(layout)
    assert stats.bytes_read == sum(segment.n_bytes for segment in flat)
    assert stats.bytes_from_disk >= stats.bytes_read
    assert stats.bounced == 0 and 0 < stats.depth_s <= stats.busy_s * depth


@pytest.mark.parametrize("most", [0, 1, 511])
def test_results_that_bring_nothing_end_in_an_error(files: ModelFiles, most: int) -> None:
    if most >= files.block:
        pytest.skip("any number of bytes is progress")
    place, ring = Segment(1, 0, 8192, 4096), HookedRing(3, most=most)
    with AlignedBuffer(4 * 4096) as pool, hooked(files, pool.view, lambda r: [place], 1, ring) as reader:
        reader.submit(read(0))
        error = wait_for(reader, 1)[0].error
    assert isinstance(error, ReadError) and f"{most} came" in str(error)


def test_what_does_not_lie_in_place_is_refused(files: ModelFiles) -> None:
    wrong = [Segment(1, 0, 10, 1), Segment(9, 0, 10, 0), Segment(1, -4096, 10, 0), Segment(1, 1 << 70, 10, 0),
             Segment(1, 0, -1, 0), Segment(1, 0, 8193, 0)]  # fmt: skip
    with AlignedBuffer(8192) as pool, RingReader(files, pool.view, lambda r: [wrong[r.serial]]) as reader:
        if not files.direct:
            wrong.pop(0)
        for serial in range(len(wrong)):
            reader.submit(read(serial))
        assert all(isinstance(each.error, (ValueError, IndexError)) for each in wait_for(reader, len(wrong)))
        wrong[0] = Segment(1, 0, 8192, 0)
        reader.submit(read(0))
        assert wait_for(reader, 1)[0].error is None and pool.view[:] == DATA[1][:8192]


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.EAGAIN, errno.ENOMEM])
def test_errors_name_file_and_cause(files: ModelFiles, code: int) -> None:
    def hook(which: Read, segment: Segment) -> None:
        raise OSError(code, "injected")

    place, ring = Segment(1, 4096, 4096, 4096), HookedRing(6, hook)
    with AlignedBuffer(4 * 4096) as pool, hooked(files, pool.view, lambda r: [place], 4, ring) as reader:
        reader.submit(read(0))
        error = wait_for(reader, 1)[0].error
        ring.hook = lambda read, segment: None
        reader.submit(read(1))
        assert wait_for(reader, 1)[0].error is None
    assert isinstance(error, ReadError) and "\n" not in str(error)
    assert all(text in str(error) for text in (str(files[1].path), os.strerror(code), errno.errorcode[code]))


@pytest.mark.parametrize("code", [errno.EINTR, errno.ECANCELED])
def test_what_was_broken_off_is_read_again(files: ModelFiles, code: int) -> None:
    rng, n = random.Random(code), 40

    def hook(which: Read, segment: Segment) -> None:
        if rng.random() < 0.6:
            raise OSError(code, "injected")

    def locate(r: Read) -> list[Segment]:
        return [Segment(2, 4096 * (r.serial + i), 4096, 8192 * r.serial + 4096 * i) for i in range(2)]

    with AlignedBuffer(n * 8192) as pool:
        with hooked(files, pool.view, locate, 3, HookedRing(5, hook, most=2048)) as reader:
            for serial in range(n):
                reader.submit(read(serial))
            assert all(each.error is None for each in wait_for(reader, n))
            assert reader.stats().bytes_read == n * 8192
        for serial in range(n):
            assert pool.view[8192 * serial : 8192 * (serial + 1)] == DATA[2][4096 * serial : 4096 * (serial + 2)]


def test_threads_that_submit_and_end(files: ModelFiles) -> None:
    n = 200
    with AlignedBuffer(n * 65536) as pool:
        with RingReader(files, pool.view, lambda r: [Segment(1, 0, 65536, 65536 * r.serial)], depth=16) as reader:
            for serial in range(n):
                thread = threading.Thread(target=reader.submit, args=(read(serial),))
                thread.start()
                thread.join()
            assert all(each.error is None for each in wait_for(reader, n))
        assert all(pool.view[65536 * i : 65536 * (i + 1)] == DATA[1] for i in range(n))


def test_a_system_that_refuses_requests_fails_reads(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, ring = Gate(0), HookedRing(6)
    ring.hook = gate
    submit = ring.submit

    def refuse() -> None:
        if ring._written:
            raise OSError(errno.EPERM, "injected")

    place = Segment(1, 0, 4096, 0)
    with AlignedBuffer(4 * 4096) as pool, hooked(files, pool.view, lambda r: [place], 4, ring) as reader:
        reader.submit(read(0))
        monkeypatch.setattr(ring, "submit", refuse)
        reader.submit(read(1))
        [(which, error)] = wait_for(reader, 1)
        assert which == read(1) and isinstance(error, ReadError) and "EPERM" in str(error)
        gate.open.set()
        assert wait_for(reader, 1) == [(read(0), None)]
        monkeypatch.setattr(ring, "submit", submit)
        reader.submit(read(2))
        assert wait_for(reader, 1)[0].error is None


@pytest.mark.parametrize("error", [OSError(errno.EPERM, "injected"), MemoryError(), SystemExit(3)])
def test_a_thread_that_breaks_ends_reads_only_when_they_have_ended(files: ModelFiles, error: BaseException) -> None:
    gate = Gate(0)

    class Broken(HookedRing):
        def wait(self) -> None:
            if gate.waiting.is_set():
                raise error
            super().wait()

    ring = Broken(6, gate)
    with AlignedBuffer(8 * 4096) as pool:
        with hooked(files, pool.view, lambda r: [Segment(1, 0, 4096, 4096 * r.serial)], 1, ring) as reader:
            reader.submit(read(0))
            assert gate.waiting.wait(WAIT_S)
            reader.submit(read(1))
            ring.nop()
            ring.submit()
            assert reader.completions(block=True, timeout=0.05) == [], "the kernel may still write for it"
            gate.open.set()
            ended = wait_for(reader, 2)
            assert {each.read.serial for each in ended} == {0, 1}
            assert all(isinstance(each.error, ReadError) and "broken off" in str(each.error) for each in ended)
            with pytest.raises(EngineClosed):
                reader.submit(read(2))
            assert reader.completions(block=True) == []
        reader.close()


MODULES = {module.__file__ for module in (queue, ring_reader, uring)}


class Interrupt:
    """Raises KeyboardInterrupt before the n-th line that the calling thread runs in the readers' modules.

    Lines that take or leave the lock are left out: there, Python looks for signals only once it is held or free.
    """

    def __init__(self, n: int) -> None:
        self.left = n

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in MODULES:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with self._lock"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize(("depth", "cancelling"), [(1, True), (3, True), (3, False)])
def test_ctrl_c_before_any_line_leaves_the_reader_usable(files: ModelFiles, depth: int, cancelling: bool) -> None:
    """As the engine does after it, what is outstanding is cancelled or waited for: it must end, and write no more."""
    n_slots, slot = 6, 4 * 4096

    def locate(r: Read) -> list[Segment]:
        at = 4096 * (r.serial % 50)
        return [Segment(2, at + 4096 * i, 4096, slot * r.slot + 8192 * i) for i in range(2)]

    struck = serial = 0
    with AlignedBuffer(n_slots * slot) as pool, RingReader(files, pool.view, locate, depth=depth) as reader:
        for n in range(1, 1200):
            reads = [read(serial + i, i % 3, i) for i in range(n_slots)]
            serial += n_slots
            ended: set[int] = set()
            try:
                with Interrupt(n):
                    for each in reads:
                        reader.submit(each)
                    reader.promote(reads[5], 0)
                    if reader.cancel(reads[4]):
                        ended.add(reads[4].serial)
                    while done := reader.completions(block=True, timeout=WAIT_S):
                        ended.update(each.read.serial for each in done)
            except KeyboardInterrupt:
                struck += 1
            else:
                assert ended == {each.serial for each in reads}
                break
            for each in reads if cancelling else ():
                reader.cancel(each)
            while done := reader.completions(block=True, timeout=WAIT_S):
                assert all(each.error is None for each in done)
            assert not reader._jobs and not reader._requests, f"something is left after line {n}"
            pool.view[:] = bytes([FILL]) * len(pool.view)
            again = [read(serial + i, 0, i) for i in range(0, n_slots, 2)]
            serial += n_slots
            for each in again:
                reader.submit(each)
            for which, error in wait_for(reader, len(again)):
                assert error is None
                for file, offset, size, dest in locate(which):
                    assert pool.view[dest : dest + size] == DATA[file][offset : offset + size], f"after line {n}"
            for i in range(1, n_slots, 2):
                assert pool.view[slot * i : slot * (i + 1)] == bytes([FILL]) * slot, f"written after line {n}"
        else:
            raise AssertionError("the lines never ended")
    assert struck > 100


def test_a_start_broken_off_is_finished_before_a_result_is_noted(files: ModelFiles) -> None:
    class Struck(HookedRing):
        left, begun = 2, threading.Event()

        def read(self, number: int, fd: int, offset: int, address: int, n_bytes: int) -> None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            super().read(number, fd, offset, address, n_bytes)
            if self.left < 0:
                self.begun.set()

    ring, halves = Struck(4), [Segment(1, 0, 4096, 0), Segment(1, 4096, 4096, 4096)]
    with AlignedBuffer(8192) as pool, hooked(files, pool.view, lambda r: halves, 2, ring) as reader:
        with pytest.raises(KeyboardInterrupt):
            reader.submit(read(0))
        ring.submit()  # whose result the ring's thread takes while the second is half begun
        ring.begun.wait(WAIT_S)
        assert wait_for(reader, 1) == [(read(0), None)]
        assert pool.view[:] == DATA[1][:8192]


def test_ctrl_c_before_any_line_of_close(files: ModelFiles) -> None:
    struck = 0
    for n in range(1, 400):
        with AlignedBuffer(16 * 4096) as pool:
            reader = RingReader(files, pool.view, lambda r: [Segment(1, 0, 4096, 4096 * r.slot)] * 2, depth=3)
            for serial in range(8):
                reader.submit(read(serial, slot=serial))
            try:
                with Interrupt(n):
                    reader.close()
            except KeyboardInterrupt:
                struck += 1
                reader.close()
                continue
            reader.close()
            break
    else:
        raise AssertionError("the lines never ended")
    assert struck > 20


@pytest.mark.parametrize("locked", [False, True])
def test_an_owner_that_the_rings_thread_collects(files: ModelFiles, locked: bool) -> None:
    """What garbage collection does in whichever thread it strikes, the lock held or not: close the reader."""

    class Collecting(HookedRing):
        def wait(self) -> None:
            super().wait()
            if not locked:
                self.reader.close()

        def results(self) -> Iterator[tuple[int, int]]:
            if locked:
                self.reader.close()
            yield from super().results()

    with AlignedBuffer(4 * 4096) as pool:
        reader = hooked(files, pool.view, lambda r: [Segment(1, 0, 4096, 0)], 2, Collecting(4))
        reader.submit(read(0))
        reader._threads[0].join(WAIT_S)
        assert not reader._threads[0].is_alive()
        wait_for(reader, 1)
        reader.close()


def test_no_ring_no_reader(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring, "_SETUP", 1 << 20)
    with AlignedBuffer(4096) as pool, pytest.raises(OSError, match="not implemented"):
        RingReader(files, pool.view, lambda r: [])
