"""Builds GGUF files byte by byte, sound ones and others; knows neither Sluice nor the gguf package."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A string, or one that lies about its `length`."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(kind: int, content: Any) -> bytes:
    return string(content) if kind == STRING else struct.pack("<" + FORMATS[kind], content)


def entry(key: str | bytes, kind: int, content: Any) -> bytes:
    """A metadata entry of one number or string."""
    return string(key) + struct.pack("<I", kind) + value(kind, content)


def array(key: str | bytes, kind: int, contents: Sequence[Any], n: int | None = None) -> bytes:
    """A metadata entry that is an array, or one that lies about its length `n`."""
    head = struct.pack("<IIQ", ARRAY, kind, len(contents) if n is None else n)
    return string(key) + head + b"".join(value(kind, content) for content in contents)


def tensor(name: str | bytes, dims: Sequence[int], type: int, offset: int, n_dims: int | None = None) -> bytes:
    """A tensor's description."""
    n = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", n, *dims, type, offset)


def file_bytes(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    alignment: int = 32,
    version: int = 3,
    n_entries: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A whole file. `alignment` is that of the data; `general.alignment` is an entry like any other."""
    counts = struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(entries) if n_entries is None else n_entries,
    )
    header = b"".join((b"GGUF", counts, *entries, *tensors))
    return header.ljust(-(-len(header) // alignment) * alignment, b"\0") + data


F32_EXPERTS = {"gate": (8, 4, 2), "up": (8, 4, 2), "down": (4, 8, 2)}


def moe_bytes(shapes: dict[str, tuple[int, ...]] = F32_EXPERTS, entries: Sequence[bytes] = (), layer: int = 0) -> bytes:
    """A file of one layer whose expert tensors, in F32, have these shapes (ggml's order)."""
    described, offset = [], 0
    for role, dims in shapes.items():
        described.append(tensor(f"blk.{layer}.ffn_{role}_exps.weight", dims, 0, offset))
        size = 4
        for n in dims:
            size *= n
        offset += -(-size // 32) * 32
    return file_bytes([entry("general.architecture", STRING, "qwen3moe"), *entries], described, bytes(offset))
