"""Walks a GGUF header and refuses one whose counts, lengths, types or offsets can't be true; knows nothing of models.

ggml's own parser allocates what a header claims, compares every name with every other, and aborts the process on some
contradictions, so nothing reaches it before this walk has shown that every string, array and tensor lies inside the
file. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from sluice.errors import ModelFileError
from sluice.ggml.library import Library
from sluice.ggml.types import GgmlType

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UINT32, STRING, ARRAY = 4, 8, 9
# What bounds memory (half a GB at worst) and time on a hostile file: ggml takes 64 bytes for the shortest string while
# it reads, and compares all names with each other. A vocabulary of 262,144 tokens with types, scores and 515,000 merges
# is 1.3 million elements in under 20 MB; the largest models have 1,200 tensors and 100 keys.
_MAX_HEADER_BYTES = 1 << 26
_MAX_ELEMENTS = 1 << 21
_MAX_KEYS = _MAX_TENSORS = 1 << 14
_MAX_KEY_BYTES = 65535
_MAX_NAME_BYTES = 63  # GGML_MAX_NAME without its end
_FIRST_READ_BYTES = 1 << 20
_U32, _U64 = struct.Struct("<I").unpack_from, struct.Struct("<Q").unpack_from
_AGAIN = "the file is incomplete or damaged, download it again"


@dataclass
class Header:
    """What the walk saw. `data` are the file's first bytes, and each of `entries` the place of one metadata entry (key,
    type and value) in them. `strings` are the values that are strings or arrays of strings (ggml's calls cut those at
    a NUL, and hand them out one by one). `dims` are the tensors' dimensions as written: none to four, fastest first.
    """

    data: bytes
    entries: dict[str, slice] = field(default_factory=dict)
    strings: dict[str, str | list[str]] = field(default_factory=dict)
    dims: dict[str, tuple[int, ...]] = field(default_factory=dict)


def check_header(path: Path, library: Library) -> Header:
    """Walk the header of the file at `path`.

    Raises ModelFileError unless it is a GGUF file of which every part lies inside the file, as tensors of types that
    `library` knows, one after the other.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: a directory: name the .gguf file in it (any shard of a split model)")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise ModelFileError(f"{path}: not a regular file: copy the model to a disk first")
        with open(path, "rb", buffering=0) as file:
            return _Walk(path, file, status.st_size, library).header()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelFileError(f"{path}: no such file: check the path") from None
    except OSError as e:
        raise ModelFileError(f"{path}: can't be read ({e.strerror}): check the file and its permissions") from e


class _Walk:
    """A cursor on the header that can't leave the file. It reads a copy: a mapping of a file that shrinks is deadly."""

    def __init__(self, path: Path, file: BinaryIO, size: int, library: Library) -> None:
        self.path, self.file, self.size, self.library = path, file, size, library
        self.data, self.at, self.n_elements = b"", 0, 0

    def fail(self, what: str, remedy: str = "the file is damaged, download it again") -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}: {remedy}")

    def upto(self, end: int, what: str) -> bytes:
        """The header's bytes, read at least to `end`."""
        if end > self.size:
            raise self.fail(f"ends inside {what}", _AGAIN)
        if end > _MAX_HEADER_BYTES:
            raise self.fail(f"{what} goes past {_MAX_HEADER_BYTES >> 20} MiB of header")
        while len(self.data) < end:
            more = self.file.read(min(max(len(self.data), _FIRST_READ_BYTES), _MAX_HEADER_BYTES))
            if not more:
                raise self.fail(f"ends inside {what}", _AGAIN)
            self.data += more
        return self.data

    def skip(self, n: int, what: str) -> int:
        """Go on by `n` bytes, which are read; returns where they start."""
        start = self.at
        self.upto(start + n, what)
        self.at += n
        return start

    def u32(self, what: str) -> int:
        return _U32(self.data, self.skip(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64(self.data, self.skip(8, what))[0]

    def string(self, what: str, longest: int = _MAX_HEADER_BYTES) -> bytes:
        n = self.u64(what)
        if self.at + n <= self.size and n > longest:
            raise self.fail(f"{what} has {n} bytes")
        start = self.skip(n, what)
        return self.data[start : self.at]

    def strings(self, n: int, what: str) -> list[str]:
        """`n` strings; a loop of its own because vocabularies have hundreds of thousands."""
        data, end, at, found = self.data, len(self.data), self.at, []
        for _ in range(n):
            start = at + 8
            if start > end:
                data = self.upto(start, what)
                end = len(data)
            at = start + _U64(data, at)[0]
            if at > end:
                data = self.upto(at, what)
                end = len(data)
            found.append(str(data[start:at], "utf-8", "replace"))
        self.at = at
        return found

    def name(self, what: str, longest: int, seen: dict[str, slice] | dict[str, tuple[int, ...]]) -> str:
        """A key's or a tensor's name: not empty, not seen before, and fit to stand in a line of text."""
        raw = self.string(what, longest)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            name = ""
        if not name or not name.isprintable():
            raise self.fail(f"{what} is {str(raw)[1:65]}, which can't be a name")
        if name in seen:
            raise self.fail(f"{what} {name[:64]} is given twice")
        return name

    def value(self, kind: int, what: str) -> str | list[str] | None:
        """Go past a metadata value; the value itself where it is a string or an array of strings."""
        if kind in _SCALAR_BYTES:
            self.skip(_SCALAR_BYTES[kind], what)
        elif kind == STRING:
            return self.string(what).decode(errors="replace")
        elif kind == ARRAY:
            inner, n = self.u32(what), self.u64(what)
            self.n_elements += n
            if self.n_elements > _MAX_ELEMENTS or (inner not in _SCALAR_BYTES and inner != STRING):
                raise self.fail(f"{what} is an impossible array ({n} of type {inner})")
            if inner == STRING:
                return self.strings(n, what)
            self.skip(n * _SCALAR_BYTES[inner], what)
        else:
            raise self.fail(f"{what} has the unknown type {kind}")
        return None

    def header(self) -> Header:
        """The whole header."""
        if not self.size:
            raise self.fail("the file is empty", "download it again")
        first = self.upto(min(24, self.size), "the header")
        if first.startswith(b"version https://git-lfs"):
            raise self.fail("this is a git-lfs pointer, not the model", "run 'git lfs pull' in that repository")
        if first[:4] != b"GGUF":
            raise self.fail("not a GGUF file", "give Sluice a model in GGUF format")
        self.skip(4, "the header")
        version = self.u32("the header")
        if version not in (2, 3):
            older = "a big-endian file" if version and version & 0xFFFF == 0 else f"GGUF version {version}"
            raise self.fail(f"{older} is not supported", "convert the model again with a current converter")
        n_tensors, n_keys = self.u64("the header"), self.u64("the header")
        if n_tensors > _MAX_TENSORS or n_keys > _MAX_KEYS:
            raise self.fail(f"claims {n_tensors} tensors and {n_keys} keys")
        header = Header(b"")
        alignment = 32
        for _ in range(n_keys):
            start = self.at
            key = self.name("a metadata key", _MAX_KEY_BYTES, header.entries)
            kind = self.u32("a metadata value")
            value_at = self.at
            value = self.value(kind, f"the value of {key[:64]}")
            header.entries[key] = slice(start, self.at)
            if value is not None:
                header.strings[key] = value
            if key == "general.alignment":
                alignment = _U32(self.data, value_at)[0] if kind == UINT32 else 0
                if alignment == 0 or alignment & (alignment - 1):
                    raise self.fail("general.alignment is not a power of two")
        offsets = [self.tensor(header) for _ in range(n_tensors)]
        if offsets:
            self.check_places(offsets, alignment)
        header.data = self.data
        return header

    def tensor(self, header: Header) -> tuple[str, int, int]:
        """Go past one tensor's description: its name, offset and size in bytes."""
        name = self.name("a tensor's name", _MAX_NAME_BYTES, header.dims)
        what = f"the description of tensor {name}"
        n_dims = self.u32(what)
        if n_dims > 4:
            raise self.fail(f"tensor {name} has {n_dims} dimensions")
        dims = header.dims[name] = tuple(self.u64(what) for _ in range(n_dims))
        number = self.u32(what)
        if number not in GgmlType.__members__.values():
            raise self.fail(f"tensor {name} has the unknown type {number}", "update Sluice, or convert the model again")
        type = GgmlType(number)
        block = self.library.ggml_blck_size(type)
        if 0 in dims or math.prod(dims[:1]) % block:
            raise self.fail(f"tensor {name} of type {type.name} has the impossible shape {list(dims)}")
        return name, self.u64(what), math.prod(dims) // block * self.library.ggml_type_size(type)

    def check_places(self, offsets: list[tuple[str, int, int]], alignment: int) -> None:
        """Refuse tensors that overlap, leave gaps (ggml accepts neither) or end past the end of the file."""
        start = -(-self.at // alignment) * alignment
        expected = 0
        for name, offset, n_bytes in offsets:
            if offset != expected:
                raise self.fail(f"tensor {name} lies at {offset}, not at {expected} where the one before it ends")
            end = offset + n_bytes
            if start + end > self.size:
                raise self.fail(f"tensor {name} ends at byte {start + end}, the file at {self.size}", _AGAIN)
            expected = -(-end // alignment) * alignment
