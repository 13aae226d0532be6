"""The probe reads what it says it reads; how fast is not a test's business."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sluice.errors import ModelFileError, ReadError
from sluice.io import files as files_module
from sluice.io.aligned import address_of
from sluice.io.files import ModelFiles
from sluice.io.probe import measure_read

SIZE = 50 * 4096 + 99


class Noted(ModelFiles):
    """Notes every read and the largest number at a time."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        self.places: set[int] = set()
        self.reads: list[tuple[int, int, int]] = []
        self.together = threading.Barrier(3)

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        self.places.add(address_of(view))
        if len(self.reads) < 3:
            self.reads.append((file, offset, len(view)))
            self.together.wait(30)  # broken unless three read at once
        else:
            self.reads.append((file, offset, len(view)))
        return super().read_into(file, offset, view)


@pytest.fixture(params=["direct", "buffered"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    if request.param == "buffered":
        monkeypatch.setattr(files_module, "_open_direct", lambda path, flags: (None, 1))
    (tmp_path / "model").write_bytes(bytes(SIZE))
    return tmp_path / "model"


def test_reads_of_the_size_and_depth_in_the_span(path: Path) -> None:
    with Noted([path, path]) as files:
        rate = measure_read(files, n_bytes=8192, depth=3, seconds=0.02, file=1, span=(4096, 20 * 4096))
        assert rate.reads == len(files.reads) >= 3
        assert rate.direct == files.direct
        assert rate.bytes_per_s == pytest.approx(rate.reads * 8192 / rate.seconds)
        block = files.block
    assert {file for file, _, _ in files.reads} == {1}
    assert all(n == 8192 and offset % block == 0 and 4096 <= offset <= 18 * 4096 for _, offset, n in files.reads)
    assert len({offset for _, offset, _ in files.reads}) > 1


def test_reads_go_round_in_the_memory_asked_for(path: Path) -> None:
    with Noted([path]) as files:
        measure_read(files, n_bytes=8192, depth=3, seconds=0.0)
        assert len(files.places) == 3
        for seconds in (0.01, 0.1, 1.0, 10.0):  # until each thread has come round
            files.places.clear()
            measure_read(files, n_bytes=8192, depth=3, seconds=seconds, memory_bytes=6 * 8192)
            if len(files.places) == 6:
                break
        assert len(files.places) == 6, "two a thread"


def test_sizes_are_rounded_to_blocks_and_fitted_to_the_file(path: Path) -> None:
    before = set(threading.enumerate())
    with ModelFiles([path]) as files:
        block = files.block
    odd = measure_read(path, n_bytes=5000, depth=1, seconds=0.0)
    assert odd.reads == 1 and odd.bytes_per_s * odd.seconds == pytest.approx(-(-5000 // block) * block)
    whole = measure_read(path, n_bytes=1 << 40, depth=1, seconds=0.0)
    assert whole.reads == 1 and whole.bytes_per_s * whole.seconds == pytest.approx(SIZE // block * block)
    assert set(threading.enumerate()) == before


def test_what_can_not_be_measured(path: Path) -> None:
    with pytest.raises(ValueError):
        measure_read(path, n_bytes=0, depth=1, seconds=0.0)
    with pytest.raises(ModelFileError, match="too small"):
        measure_read(path, n_bytes=1, depth=1, seconds=0.0, span=(100, 100))
    with ModelFiles([path]) as files:
        path.write_bytes(b"")
        with pytest.raises(ReadError, match=str(path)):
            measure_read(files, n_bytes=4096, depth=2, seconds=1.0)
