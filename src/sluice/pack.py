"""Writes a model anew with each expert's three matrices side by side; knows tensors by name, and no architecture.

A packed file is one GGUF whose tensors start at multiples of 4096 bytes. Everything but the experts is copied as it is.
The experts of layer N become one I8 tensor `blk.N.ffn_exps.packed` [stride, n_expert]: expert e is bytes
[e × stride, (e + 1) × stride), gate, up and down in it each at a multiple of 512, so that one aligned read brings all
three to places where ggml can use them. The metadata has `sluice.pack.version` and, for each such layer,
`sluice.pack.blk.N`: for gate, up and down in turn the ggml type, n_in, n_out, the offset in the expert and the bytes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sluice.errors import InputError, ReadError
from sluice.ggml.library import Library
from sluice.ggml.types import GgmlType
from sluice.gguf import (
    PACK_PART_ALIGNMENT,
    PACK_VERSION,
    PACKED_TENSOR,
    ExpertPart,
    GgufFile,
    TensorInfo,
    open_gguf,
    shard_paths,
)
from sluice.gguf_header import ARRAY, UINT32, check_header
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.new_file import check_out

ALIGNMENT = 4096  # of tensors and experts, bytes: what any disk reads without the page cache
_PIECE_BYTES = 1 << 24
_MARGIN_BYTES = 1 << 16  # a piece that starts inside a disk block is read from that block's start
_UINT64 = 10
_EXPERTS = re.compile(r"blk\.(0|[1-9][0-9]*)\.ffn_(gate|up|down|gate_up)_exps\.weight")


@dataclass(frozen=True)
class PackReport:
    """What was packed: MoE layers, experts of all layers together, and the bytes of the new file and of the old."""

    path: Path
    n_layers: int
    n_experts: int
    n_bytes: int
    source_bytes: int


@dataclass(frozen=True)
class _Layer:
    """How the experts of one layer lie in the packed file; `offsets` are the parts' within an expert."""

    number: int
    parts: tuple[ExpertPart, ...]
    n_experts: int
    offsets: tuple[int, ...]
    stride: int


def pack(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    library: Library,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Write the model of which `source` is the file, or a shard, to the packed file `out`.

    `progress` is called with the bytes written so far and those to write. `out` appears when it is complete, or not at
    all. Raises ModelFileError for a source that is no MoE model or is packed already, InputError for an `out` that
    exists (unless `force`), can't be written or does not fit the disk, and ReadError where the source can't be read.
    """
    file, out = open_gguf(source, library), Path(os.path.expanduser(out))  # noqa: PTH111  (Path's raises for an unknown user)
    layers = _layers(file)
    dense = [info for name, info in file.tensors.items() if not _EXPERTS.fullmatch(name)]
    header = _header(file, dense, layers, library)
    n_bytes = len(header) + sum(_up(t.n_bytes, ALIGNMENT) for t in dense) + sum(x.stride * x.n_experts for x in layers)
    needs = f"packing needs {n_bytes / 2**20:,.1f} MiB in {out.parent}"
    temporary = out.with_name(f".sluice-pack-{secrets.token_hex(4)}")
    try:
        _check_out(file, out, force)
        if (free := shutil.disk_usage(out.parent).free) < n_bytes:
            raise InputError(f"{out}: {needs}, {free / 2**20:,.1f} MiB are free: free the space or name another disk")
        with (
            ModelFiles(file.paths) as files,
            AlignedBuffer(_PIECE_BYTES + _MARGIN_BYTES) as buffer,
            open(temporary, "xb", buffering=0) as target,
        ):
            done = _write(target, memoryview(header))
            for number, offset, size, padding in _ranges(dense, layers):
                for at in range(0, size, _PIECE_BYTES):
                    done += _write(target, _read(files, number, offset + at, min(_PIECE_BYTES, size - at), buffer))
                    if progress is not None:
                        progress(done, n_bytes)
                done += _write(target, memoryview(bytes(padding)))
            os.fsync(target.fileno())
            if changed := files.changed():
                raise ReadError(changed)
        assert done == n_bytes, f"packed {done} bytes instead of {n_bytes}"
        _publish(temporary, out, force)
    except OSError as e:
        remedy = (
            "free the space or name another disk" if e.errno in (errno.ENOSPC, errno.EDQUOT) else "name another place"
        )
        raise InputError(f"{out}: can't be written ({e.strerror}); {needs}: {remedy}") from e
    finally:
        with suppress(OSError):  # a complete file no longer has this name
            temporary.unlink(missing_ok=True)
    if progress is not None:
        progress(n_bytes, n_bytes)
    return PackReport(out, len(layers), sum(layer.n_experts for layer in layers), n_bytes, file.n_bytes)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _layers(file: GgufFile) -> list[_Layer]:
    if file.packed or any(name.endswith(".ffn_exps.packed") for name in file.tensors):
        raise InputError(f"{file.paths[0]}: already packed: run it as it is")
    layers = []
    for number in sorted({int(match[1]) for match in map(_EXPERTS.fullmatch, file.tensors) if match}):
        parts = file.expert_parts(number)
        assert parts is not None
        offsets, end = [], 0
        for part in parts:
            offsets.append(end)
            end = _up(end + part.n_bytes, PACK_PART_ALIGNMENT)
        n_experts = file.tensors[f"blk.{number}.ffn_down_exps.weight"].shape[2]
        layers.append(_Layer(number, parts, n_experts, tuple(offsets), _up(end, ALIGNMENT)))
    if not layers:
        raise InputError(f"{file.paths[0]}: a dense model, nothing to pack: give Sluice a Mixture-of-Experts model")
    return layers


def _check_out(file: GgufFile, out: Path, force: bool) -> None:
    if len(shard_paths(out)) > 1:
        raise InputError(f"{out}: a packed model is one file, and this is the name of a shard: choose another name")
    check_out(out, force=force, keep=file.paths, made="the packed model")


def _header(file: GgufFile, dense: list[TensorInfo], layers: list[_Layer], library: Library) -> bytes:
    """The packed file up to its first tensor's data."""
    sources = [check_header(path, library) for path in file.paths]
    entries = [
        sources[0].data[place]
        for key, place in sources[0].entries.items()
        if key != "general.alignment" and not key.startswith(("split.", "sluice.pack."))
    ]
    entries.append(_string("general.alignment") + struct.pack("<II", UINT32, ALIGNMENT))
    entries.append(_string("sluice.pack.version") + struct.pack("<II", UINT32, PACK_VERSION))
    described, offset = [], 0
    for info in dense:
        described.append(_tensor(info.name, sources[info.file].dims[info.name], info.type, offset))
        offset += _up(info.n_bytes, ALIGNMENT)
    for layer in layers:
        numbers = [
            number
            for part, at in zip(layer.parts, layer.offsets, strict=True)
            for number in (part.type, part.n_in, part.n_out, at, part.n_bytes)
        ]
        key = _string(f"sluice.pack.blk.{layer.number}")
        entries.append(key + struct.pack("<IIQ15Q", ARRAY, _UINT64, len(numbers), *numbers))
        name = PACKED_TENSOR.format(layer.number)
        described.append(_tensor(name, (layer.stride, layer.n_experts), GgmlType.I8, offset))
        offset += layer.stride * layer.n_experts
    counts = struct.pack("<IQQ", 3, len(described), len(entries))  # GGUF version 3
    header = b"".join((b"GGUF", counts, *entries, *described))
    return header.ljust(_up(len(header), ALIGNMENT), b"\0")


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _tensor(name: str, dims: tuple[int, ...], type: GgmlType, offset: int) -> bytes:
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type, offset)


def _ranges(dense: list[TensorInfo], layers: list[_Layer]) -> Iterator[tuple[int, int, int, int]]:
    """What follows the header, in order: source file, offset and bytes in it, and zeros to add after those."""
    for info in dense:
        yield info.file, info.offset, info.n_bytes, -info.n_bytes % ALIGNMENT
    for layer in layers:
        ends = (*layer.offsets[1:], layer.stride)
        for expert in range(layer.n_experts):
            for part, start, end in zip(layer.parts, layer.offsets, ends, strict=True):
                yield part.file, part.offset + expert * part.stride, part.n_bytes, end - start - part.n_bytes


def _read(files: ModelFiles, number: int, offset: int, n: int, buffer: AlignedBuffer) -> memoryview:
    """`n` bytes of a source file, in `buffer` until the next call."""
    block = files[number].block
    skew = offset % block
    got = files.read_into(number, offset - skew, buffer.view[: _up(skew + n, block)])
    if got < skew + n:
        raise files.short(number, offset, n, max(got - skew, 0))
    return buffer.view[skew : skew + n]


def _write(target: BinaryIO, data: memoryview) -> int:
    """Write all of `data`; returns its length."""
    rest = data
    while rest:
        rest = rest[target.write(rest) :]
    return len(data)


def _publish(temporary: Path, out: Path, force: bool) -> None:
    """Give the complete file its name, on disk too."""
    if os.path.lexists(out) and not force:
        raise InputError(f"{out}: appeared while packing: name another file, or overwrite it with --force")
    temporary.replace(out)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
