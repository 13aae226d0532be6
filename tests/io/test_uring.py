"""The ring delivers what was asked for, keeps what was not started, and leaves nothing open."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.io import uring
from sluice.io.aligned import AlignedBuffer
from sluice.io.uring import NOP, Ring, available

DATA = random.Random(1).randbytes(300_001)
needs_ring = pytest.mark.skipif(not available(), reason="this system has no io_uring")


@pytest.fixture
def fd(tmp_path: Path) -> int:
    (tmp_path / "file").write_bytes(DATA)
    return os.open(tmp_path / "file", os.O_RDONLY)


@pytest.fixture(autouse=True)
def nothing_stays_open(fd: int) -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before
    os.close(fd)


def descriptors() -> set[str]:
    place = Path("/proc/self/fd")
    listed = list(place.iterdir()) if place.exists() else []
    return {path.name for path in listed if path.is_symlink()}  # not the one that listed them


def take(ring: Ring, n: int) -> dict[int, int]:
    """Results by tag, all of different tags."""
    found: list[tuple[int, int]] = []
    while len(found) < n:
        ring.wait()
        found += ring.results()
    assert len(dict(found)) == len(found) == n
    return dict(found)


@needs_ring
def test_reads_of_any_size_round_and_round_the_queues(fd: int) -> None:
    rng = random.Random(2)
    with Ring(4) as ring, AlignedBuffer(4 << 16) as buffer:
        for _ in range(100):
            asked: dict[int, tuple[int, int, int]] = {}
            for i in range(rng.randint(1, 4)):
                offset, n = rng.randrange(len(DATA)), rng.randint(1, 1 << 16)
                number = ring.position
                asked[number] = i << 16, offset, n
                ring.read(number, fd, offset, buffer.address + (i << 16), n)
                if rng.random() < 0.5:  # written down again
                    ring.read(number, fd, offset, buffer.address + (i << 16), n)
                if rng.random() < 0.5:
                    ring.submit()
            ring.submit()
            ring.submit()
            for number, n in take(ring, len(asked)).items():
                at, offset, wanted = asked[number]
                expected = DATA[offset : offset + wanted]
                assert buffer.view[at : at + n] == expected and n == len(expected), "no more than the file holds"
        assert list(ring.results()) == []


@needs_ring
def test_a_nop_wakes_who_waits(fd: int) -> None:
    with Ring(2) as ring:
        waiting = threading.Thread(target=ring.wait)
        waiting.start()
        ring.nop()
        ring.submit()
        waiting.join(30)
        assert not waiting.is_alive()
        assert list(ring.results()) == [(NOP, 0)]


@needs_ring
def test_refusals_are_results(fd: int) -> None:
    with Ring(4) as ring, AlignedBuffer(4096) as buffer:
        wrong = {ring.position: errno.EBADF}
        ring.read(ring.position, 1 << 20, 0, buffer.address, 10)
        wrong[ring.position] = errno.EFAULT
        ring.read(ring.position, fd, 0, 8, 4096)
        right = ring.position
        ring.read(right, fd, 1, buffer.address, 10)
        ring.submit()
        found = take(ring, 3)
        assert found.pop(right) == 10 and buffer.view[:10] == DATA[1:11]
        assert found == {number: -code for number, code in wrong.items()}


@needs_ring
def test_what_was_not_started_can_be_taken_back(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ring(4) as ring, AlignedBuffer(4096) as buffer:
        ring.read(ring.position, fd, 0, buffer.address, 10)
        ring.submit()
        numbers = [ring.position, ring.position + 1]
        for number in numbers:
            ring.read(number, fd, 100, buffer.address, 100)
        monkeypatch.setattr(uring, "_ENTER", 1 << 20)
        with pytest.raises(OSError, match="not implemented"):
            ring.submit()
        with pytest.raises(OSError, match="not implemented"):
            ring.wait()
        monkeypatch.undo()
        assert ring.withdraw() == numbers and ring.withdraw() == []
        ring.submit()
        assert set(take(ring, 1).values()) == {10}
        ring.read(ring.position, fd, 7, buffer.address, 5)
        ring.submit()
        assert take(ring, 1) == {numbers[0]: 5} and buffer.view[:5] == DATA[7:12]
        assert bytes(buffer.view[10:200]) == bytes(190)


@needs_ring
def test_a_ring_is_not_inherited_and_closes_twice(fd: int) -> None:
    before = descriptors()
    with Ring(2) as ring:
        own = descriptors() - before
        assert own and not any(os.get_inheritable(int(each)) for each in own)
        ring.close()
        ring.close()


@needs_ring
@pytest.mark.parametrize(("name", "value"), [("_SETUP", 1 << 20), ("_FEATURES", 1 << 31), ("_N_PARAMS", 30)])
def test_systems_without(fd: int, monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(uring, name, value)
    refused = name != "_N_PARAMS"
    assert available() is not refused
    if refused:
        with pytest.raises(OSError, match=r"not implemented|too old"):
            Ring(4)


@needs_ring
def test_too_many_entries_are_refused(fd: int) -> None:
    with pytest.raises(OSError, match="Invalid"):
        Ring(1 << 20)


def test_other_processors_have_none(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring.platform, "machine", lambda: "aarch64")
    assert not available()
    with pytest.raises(OSError, match="x86-64"):
        Ring(2)
