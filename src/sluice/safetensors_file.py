"""Reads and writes safetensors files, each tensor when it is asked for; knows nothing of what tensors are for.

A file is a length (8 bytes, little-endian), as much JSON, and the tensors' bytes; `{name: {"dtype", "shape",
"data_offsets": [begin, end]}}`, row-major shapes, offsets from the end of the JSON, and `__metadata__`, texts by name.
Format: https://github.com/huggingface/safetensors#format

A file is somebody else's until it has been checked: the header's size and the values in it are bounded before any is
made, and tensors must fill the rest of the file one after the other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import numpy as np

from sluice import new_file
from sluice.errors import InputError

MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1 << 17  # an adapter on each expert of the largest models has 72,000
MAX_TEXT_BYTES = 1 << 20  # of the metadata together
MAX_DIMS, MAX_DIM = 8, 1 << 40

# By the format's names; BF16 has no type in numpy and is widened to float32, which holds each of its values.
STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
WRITTEN = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
_METADATA = "__metadata__"


class Readable(Protocol):
    """What can be written: an array's shape and type, and the array when it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `kind` is its type there, `shape` row-major, `offset` in bytes from the file's start."""

    path: Path
    name: str
    kind: str  # of STORED
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> np.dtype:
        """Of what `read` returns: float32, or float16 where that is stored."""
        return np.dtype(np.float16 if self.kind == "F16" else np.float32)

    @property
    def n_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * STORED[self.kind].itemsize

    def read(self, first: int = 0, n: int | None = None) -> np.ndarray:
        """Its numbers, fresh from the file; or `n` rows (of its first dimension) from `first`.

        Check `shape` against what is expected first: it decides how much memory this takes. Raises InputError where the
        file can't be read, or is no longer what it was.
        """
        shape = self.shape if n is None else (n, *self.shape[1:])
        assert n is None or 0 <= first <= first + n <= self.shape[0]
        stored = np.empty(math.prod(shape), STORED[self.kind])
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset + first * math.prod(self.shape[1:]) * stored.itemsize)
                got = file.readinto(stored.data.cast("B"))
        except OSError as error:
            raise InputError(f"{self.path}: can't be read ({error.strerror}): check the file") from error
        if got != stored.nbytes:
            raise InputError(f"{self.path}: became shorter while it was read: leave it alone, then start again")
        if self.kind == "BF16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(self.dtype, copy=False).reshape(shape)


@dataclass(frozen=True)
class MadeTensor:
    """A tensor to write that `make` makes when its turn comes, so that a file need not fit in memory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        return self.make()


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """A file's metadata, and its tensors by name in the order of their bytes, their numbers still unread.

    Raises InputError, naming what is wrong with it; also for types that Sluice has no use for (whole numbers, float64).
    """
    path = Path(os.path.expanduser(path))  # noqa: PTH111  (Path's raises for an unknown user)
    try:
        if path.exists() and not path.is_file():  # opening a named pipe would wait for ever
            raise InputError(f"{path}: can't be read (not a regular file): name a safetensors file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = _header(file, size)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file: check the path") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}): check the path and its permissions") from None
    except ValueError as error:
        raise InputError(f"{path}: no safetensors file ({error}): name one, or get it again") from None
    try:
        return _checked(path, _parsed(raw), 8 + len(raw), size)
    except ValueError as error:
        raise InputError(f"{path}: the safetensors file is damaged ({error}): get it again") from None


def _header(file: BinaryIO, size: int) -> bytes:
    """The JSON's bytes."""
    start = file.read(8)
    n = int.from_bytes(start, "little")
    if len(start) < 8:
        raise ValueError(f"only {len(start)} bytes")
    if not 2 <= n <= size - 8:
        raise ValueError(f"its first 8 bytes say that a header of {n} bytes follows, and {size - 8} bytes do")
    if n > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {n} bytes, more than {MAX_HEADER_BYTES >> 20} MiB")
    raw = file.read(n)
    if len(raw) < n or raw[:1] != b"{":
        raise ValueError("what follows its first 8 bytes is no JSON object")
    return raw


def _parsed(raw: bytes) -> dict[str, Any]:
    """The header as an object of bounded size: no more values than MAX_TENSORS tensors can need."""
    if raw.count(b"{") > MAX_TENSORS + 2 or raw.count(b"[") > 2 * MAX_TENSORS + 2 or raw.count(b",") > 8 * MAX_TENSORS:
        raise ValueError(f"more than {MAX_TENSORS} tensors, or a header that is no list of tensors")
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise ValueError("its header is no text") from None
    except RecursionError:
        raise ValueError("its header is no list of tensors") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is no JSON at byte {error.pos}") from None
    assert isinstance(value, dict)  # it begins with a brace
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} in its header")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{quoted(twice)} is in its header twice")
    return fields


def _checked(
    path: Path, header: dict[str, Any], start: int, size: int
) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"{_METADATA} holds not only texts")
    if sum(len(name) + len(text) for name, text in metadata.items()) > MAX_TEXT_BYTES:
        raise ValueError(f"{_METADATA} is longer than {MAX_TEXT_BYTES >> 10} KiB")
    found = [(*_place(name, described), name, described) for name, described in header.items()]
    found.sort(key=lambda entry: entry[:2])
    tensors: dict[str, StoredTensor] = {}
    at = 0
    for begin, end, name, described in found:
        tensor = StoredTensor(path, name, described["dtype"], tuple(described["shape"]), start + begin)
        if begin != at:
            raise ValueError(f"{quoted(name)} begins at byte {begin} and not {at}, where the one before it ends")
        if end - begin != tensor.n_bytes:
            raise ValueError(
                f"{quoted(name)}, {tensor.kind} {list(tensor.shape)}, has {end - begin} bytes, not {tensor.n_bytes}"
            )
        tensors[name], at = tensor, end
    if start + at != size:
        raise ValueError(f"{size - start} bytes of tensors, and its header describes {at}")
    return metadata, tensors


def _place(name: str, described: object) -> tuple[int, int]:
    """Where a tensor's bytes begin and end, once its description has been found to be one."""
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{quoted(name)} is no tensor with a type, a shape and offsets")
    kind, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(kind, str) or kind not in STORED:
        raise ValueError(f"{quoted(name)} is of type {quoted(kind)}, and Sluice reads {', '.join(STORED)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_whole(n, 1, MAX_DIM) for n in shape):
        raise ValueError(f"{quoted(name)} has the impossible shape {quoted(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n, 0, 1 << 62) for n in offsets):
        raise ValueError(f"{quoted(name)} has the impossible offsets {quoted(offsets)}")
    return offsets[0], offsets[1]


def _whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def quoted(value: object) -> str:
    """An untrusted value as a few characters of one line."""
    try:
        return ascii(value[:80] if isinstance(value, str | list) else value)[:80]
    except RecursionError:  # a few calls deeper than where it could still be parsed
        return "nested too deep"


def check_out(path: str | os.PathLike[str], *, force: bool, keep: Sequence[Path] = ()) -> Path:
    """The path to write to, or InputError where `write_safetensors` would not write, to be told before the work.

    `keep` are files that are never overwritten.
    """
    path = Path(os.path.expanduser(path))  # noqa: PTH111  (Path's raises for an unknown user)
    new_file.check_out(path, force=force, keep=keep)
    return path


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray | Readable], metadata: Mapping[str, str], *,
    force: bool = False, keep: Sequence[Path] = (),
) -> int:  # fmt: skip
    """Write float32 and float16 tensors in their order; returns the file's bytes. It appears whole or not at all.

    Raises InputError for a path that can't be written, exists (unless `force`) or is one of `keep`.
    """
    path = check_out(path, force=force, keep=keep)
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        kind = WRITTEN[tensor.dtype]
        end = at + math.prod(tensor.shape) * STORED[kind].itemsize
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # so that the tensors begin at a multiple of 8
    with new_file.appearing(path, "tensors", force=force, keep=keep) as temporary, temporary.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            values = tensor if isinstance(tensor, np.ndarray) else tensor.read()
            assert (values.shape, values.dtype) == (tensor.shape, tensor.dtype)
            file.write(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(-1).data.cast("B"))
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + at
