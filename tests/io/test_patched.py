"""Patched files: every read sees the bytes that stand in for others, wherever it begins; the files keep theirs."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest

from sluice.errors import ReadError
from sluice.io.aligned import AlignedBuffer
from sluice.io.patched import PatchedFiles, Patches


def test_any_range_reads_as_patched(tmp_path: Path) -> None:
    rng = random.Random(0)
    contents = [rng.randbytes(20_000), rng.randbytes(9_000)]
    paths = [tmp_path / "0", tmp_path / "1"]
    expected = [bytearray(raw) for raw in contents]
    for path, raw in zip(paths, contents, strict=True):
        path.write_bytes(raw)
    with tempfile.TemporaryFile() as file:
        patches = Patches(file)
        for index, offset, n in ((0, 15_000, 700), (0, 100, 4_000), (1, 8_990, 10), (0, 4_100, 1), (0, 5_000, 5_000)):
            stored = rng.randbytes(n)
            patches.add(index, offset, stored)
            expected[index][offset : offset + n] = stored
        assert patches.n_bytes == 9_711
        with PatchedFiles(paths, patches) as files, AlignedBuffer(1 << 16) as scratch:
            for _ in range(300):
                index = rng.randrange(2)
                offset = rng.randrange(len(contents[index]))
                view = memoryview(bytearray(rng.randint(1, len(contents[index]) - offset)))
                files.read_exact(index, offset, view, scratch)
                assert view == expected[index][offset : offset + len(view)]
    assert [path.read_bytes() for path in paths] == contents


def test_patches_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(bytes(8192))
    with tempfile.TemporaryFile() as file, AlignedBuffer(1 << 16) as scratch:
        patches = Patches(file)
        patches.add(0, 10, bytes(100))
        file.flush()
        file.truncate(50)
        with PatchedFiles([tmp_path / "0"], patches) as files, pytest.raises(ReadError, match="became shorter"):
            files.read_exact(0, 0, memoryview(bytearray(200)), scratch)
