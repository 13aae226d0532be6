"""Every access way delivers the file's bytes, and what goes wrong is named."""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.errors import BudgetError, ModelFileError, ReadError
from sluice.io import files as files_module
from sluice.io.aligned import HUGE_PAGE, AlignedBuffer, address_of
from sluice.io.files import ModelFiles

DATA = random.Random(1).randbytes(3 * 4096 + 777)  # ends inside a block
SHM = Path("/dev/shm")


@pytest.fixture(params=["direct", "buffered", "seek"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The platform as it is, one that refuses O_DIRECT, and one that has no pread either."""
    if request.param != "direct":
        monkeypatch.setattr(files_module, "_open_direct", lambda path, flags: (None, 1))
    if request.param == "seek":
        monkeypatch.delattr(os, "preadv", raising=False)
    return request.param


def open_descriptors() -> int:
    listed = Path("/proc/self/fd")
    return len(list(listed.iterdir())) if listed.is_dir() else 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(DATA)
    return file


def test_modes(way: str, path: Path) -> None:
    with ModelFiles([path]) as files:
        assert len(files) == 1
        assert files[0].path == path and files[0].size == len(DATA)
        assert files[0].mode in (("direct", "nocache", "buffered") if way == "direct" else ("nocache", "buffered"))
        assert files.direct == files[0].direct == (files[0].block > 1)
        assert files.block == files[0].block


def test_o_direct_is_used_where_the_file_system_takes_it(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (AttributeError, OSError):
        pytest.skip("no O_DIRECT here")
    with ModelFiles([path]) as files:
        assert files[0].mode == "direct" and files[0].block in (512, 1024, 2048, 4096)


@pytest.mark.parametrize("told", [None, 0, 4096, 1 << 20])
def test_what_statx_may_tell(told: int | None, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_statx_block", lambda fd: told)
    with ModelFiles([path]) as files, AlignedBuffer(8192) as buffer:
        if told in (0, 1 << 20):
            assert not files.direct
        if told == 4096 and hasattr(os, "O_DIRECT"):
            assert files.block in (1, 4096)
        assert files.read_into(0, 4096, buffer.view[:4096]) == 4096
        assert buffer.view[:4096] == DATA[4096:8192]


def test_o_direct_refused_by_the_test_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_takes", lambda fd, block: False)
    before = open_descriptors()
    with ModelFiles([path]) as files:
        assert not files.direct and files.block == 1
    assert open_descriptors() == before


def test_whole_blocks_and_the_end_of_the_file(way: str, path: Path) -> None:
    with ModelFiles([path]) as files, AlignedBuffer(8192) as buffer:
        assert files.read_into(0, 4096, buffer.view) == 8192
        assert buffer.view == DATA[4096:12288]
        assert files.read_into(0, 12288, buffer.view) == 777
        assert buffer.view[:777] == DATA[12288:]
        assert files.read_into(0, 16384, buffer.view) == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_range_into_any_memory(way: str, path: Path, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, len(DATA)))
    n = data.draw(st.integers(0, len(DATA) - offset))
    into = bytearray(n + 2)
    with ModelFiles([path]) as files, AlignedBuffer(data.draw(st.sampled_from([4096, 8192, 5000]))) as scratch:
        fetched = files.read_exact(0, offset, memoryview(into)[1 : n + 1], scratch)
    assert into[1 : n + 1] == DATA[offset : offset + n]
    assert into[0] == into[-1] == 0
    assert fetched >= n


def test_read_exact_refuses_too_little_scratch(path: Path) -> None:
    with ModelFiles([path]) as files, AlignedBuffer(100) as scratch:
        if files.block == 1:
            pytest.skip("buffered files take any scratch")
        with pytest.raises(ValueError, match="smaller than a block"):
            files.read_exact(0, 0, memoryview(bytearray(10)), scratch)


def test_a_range_past_the_end_is_an_error_of_read_exact(way: str, path: Path) -> None:
    expected = rf"{path}.* 200 bytes at offset {len(DATA) - 50}, 50 came; .*truncated"
    with ModelFiles([path]) as files, AlignedBuffer(4096) as scratch, pytest.raises(ReadError, match=expected):
        files.read_exact(0, len(DATA) - 50, memoryview(bytearray(200)), scratch)


def test_a_file_on_tmpfs() -> None:
    if not SHM.is_dir():
        pytest.skip("no /dev/shm here")
    path = SHM / f"sluice-test-{os.getpid()}"
    try:
        path.write_bytes(DATA)
        into = bytearray(len(DATA) - 3)
        with ModelFiles([path]) as files, AlignedBuffer(4096) as scratch:
            files.read_exact(0, 3, memoryview(into), scratch)
        assert into == DATA[3:]
    finally:
        path.unlink(missing_ok=True)


def test_a_truncated_file(way: str, path: Path) -> None:
    with ModelFiles([path]) as files, AlignedBuffer(8192) as buffer:
        assert files.changed() is None
        os.truncate(path, 5000)
        with pytest.raises(ReadError) as caught:
            files.read_into(0, 4096, buffer.view)
        text = str(caught.value)
        assert str(path) in text and "8192 bytes at offset 4096, 904 came" in text
        assert f"from {len(DATA)} to 5000 bytes" in text and "\n" not in text
        assert "5000 bytes" in (files.changed() or "")


def test_a_rewritten_file_of_the_same_size(path: Path) -> None:
    with ModelFiles([path, path]) as files:
        at_open = files[0].mtime_ns
        path.write_bytes(DATA[::-1])
        os.utime(path, ns=(at_open, at_open + 1))
        assert str(path) in (files.changed() or "")


def test_a_deleted_file_is_still_read(way: str, path: Path) -> None:
    with ModelFiles([path]) as files, AlignedBuffer(4096) as buffer:
        path.unlink()
        assert files.read_into(0, 0, buffer.view) == 4096
        assert buffer.view == DATA[:4096]


@pytest.mark.parametrize("at_most", [1, 512, 700, 4096])
def test_short_reads_are_continued(at_most: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    with ModelFiles([path]) as files, AlignedBuffer(8192) as buffer:
        block = files.block
        if at_most < block:
            at_most += block  # no progress at all would be an error

        def interrupted(fd: int, views: Sequence[memoryview], offset: int) -> int:
            return min(real(fd, views, offset), at_most)

        monkeypatch.setattr(os, "preadv", interrupted)
        assert files.read_into(0, 4096, buffer.view) == 8192
        assert buffer.view == DATA[4096:12288]
        assert files.read_into(0, 8192, buffer.view) == len(DATA) - 8192


def test_an_error_names_file_offset_and_errno(way: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with ModelFiles([path]) as files, AlignedBuffer(4096) as buffer:
        monkeypatch.setattr(files_module, "_pread", broken)
        with pytest.raises(ReadError, match=rf"{path}: reading 4096 bytes at offset 8192 .*errno {errno.EIO}, EIO\)"):
            files.read_into(0, 8192, buffer.view)


def test_unaligned_reads_of_direct_files_are_errors_not_wrong_bytes(path: Path) -> None:
    with ModelFiles([path]) as files, AlignedBuffer(8192) as buffer:
        if files[0].mode != "direct":
            pytest.skip("no O_DIRECT here")
        with pytest.raises(ReadError, match="EINVAL"):
            files.read_into(0, 7, buffer.view[:100])


def test_what_can_not_be_opened(tmp_path: Path, path: Path) -> None:
    before = open_descriptors()
    for wrong in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ModelFileError, match=str(wrong)):
            ModelFiles([path, wrong])
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ModelFileError, match="not a regular file"):
            ModelFiles([tmp_path / "pipe"])
    with pytest.raises(ValueError, match="no file"):
        ModelFiles([])
    assert open_descriptors() == before


def test_an_empty_file(way: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with ModelFiles([tmp_path / "empty"]) as files, AlignedBuffer(4096) as buffer:
        assert files.read_into(0, 0, buffer.view) == 0


def test_close_twice(path: Path) -> None:
    files = ModelFiles([path])
    fd = files[0].fd
    files.close()
    files.close()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_aligned_memory() -> None:
    with AlignedBuffer(5000) as buffer:
        assert buffer.address % 4096 == 0 and len(buffer.view) == buffer.n_bytes == 5000
        assert not any(buffer.view)
        buffer.view[4999] = 7
        assert address_of(buffer.view[4999:]) == buffer.address + 4999
    buffer.close()
    with pytest.raises(ValueError):
        buffer.view[0]


def test_large_memory_asks_for_huge_pages() -> None:
    smaps = Path("/proc/self/smaps")
    if not smaps.exists() or not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("no huge pages here")
    with AlignedBuffer(2 * HUGE_PAGE) as buffer:
        flags: list[str] = []
        inside = False
        for line in smaps.read_text().splitlines():
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(match[1], 16) <= buffer.address < int(match[2], 16)
            elif inside and line.startswith("VmFlags:"):
                flags = line.split()
        assert "hg" in flags


def test_aligned_memory_outlives_close_while_it_is_viewed() -> None:
    buffer = AlignedBuffer(4096)
    part, over_all = buffer.view[10:20], np.frombuffer(buffer.view, np.uint8)
    part[0] = 42
    buffer.close()
    buffer.close()
    assert part[0] == over_all[10] == 42
    with pytest.raises(ValueError):
        buffer.view[0]


def test_memory_that_can_not_be_had() -> None:
    with pytest.raises(BudgetError, match="--ram"):
        AlignedBuffer(1 << 62)
    with pytest.raises(ValueError):
        AlignedBuffer(0)
