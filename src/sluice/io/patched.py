"""Model files that read as if some of their bytes were others; the files stay as they are. No meaning is known."""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Sequence
from typing import IO, NamedTuple

from sluice.errors import ReadError
from sluice.io.files import ModelFiles


class Patch(NamedTuple):
    """Bytes [offset, offset + n_bytes) of a file that stand at `at` of the file of patches."""

    offset: int
    n_bytes: int
    at: int


class Patches:
    """Bytes that stand in for others, kept in a file that is open for reading and writing. None overlap."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._end = 0
        self._of: dict[int, list[Patch]] = {}  # by number of the file, by offset once sorted
        self._turns = threading.Lock()  # seek and read
        self._sorted = False

    @property
    def n_bytes(self) -> int:
        return self._end

    def add(self, file: int, offset: int, stored: bytes | bytearray) -> None:
        """From now on `stored` stands at `offset` of file number `file`. Raises ReadError."""
        try:
            self._file.seek(self._end)
            self._file.write(stored)
        except OSError as error:
            raise ReadError(
                f"a temporary file can't be written ({error.strerror}): set TMPDIR to a folder with room"
            ) from error
        self._of.setdefault(file, []).append(Patch(offset, len(stored), self._end))
        self._end += len(stored)
        self._sorted = False

    def apply(self, file: int, offset: int, view: memoryview) -> None:
        """Put what stands in for bytes [offset, offset + len(view)) of a file into `view`, which holds those. Raises
        ReadError. May be called by any number of threads."""
        with self._turns:
            if not self._sorted:
                self._file.flush()
                for patches in self._of.values():
                    patches.sort()
                self._sorted = True
            patches = self._of.get(file, [])
            end = offset + len(view)
            first = bisect.bisect_right(patches, offset, key=lambda patch: patch.offset + patch.n_bytes)
            for patch in patches[first:]:
                if patch.offset >= end:
                    return
                start, stop = max(offset, patch.offset), min(end, patch.offset + patch.n_bytes)
                self._read(patch.at + start - patch.offset, view[start - offset : stop - offset])

    def _read(self, at: int, view: memoryview) -> None:
        try:
            self._file.seek(at)
            got = self._file.readinto(view)  # type: ignore[attr-defined]  # of every file opened as binary
        except OSError as error:
            raise ReadError(f"a temporary file can't be read ({error.strerror}): start again") from error
        if got != len(view):
            raise ReadError("a temporary file became shorter: start again")


class PatchedFiles(ModelFiles):
    """ModelFiles of which every read is patched."""

    by_descriptor = False

    def __init__(self, paths: Sequence[str | os.PathLike[str]], patches: Patches) -> None:
        super().__init__(paths)
        self._patches = patches

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        got = super().read_into(file, offset, view)
        self._patches.apply(file, offset, view[:got])
        return got
