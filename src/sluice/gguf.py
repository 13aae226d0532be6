"""GGUF files as values: metadata, tensors, and where each expert's bytes lie; knows nothing of what a model computes.

Headers are read through ggml's `gguf_*` calls, once `gguf_header` has found them sound. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import ctypes as C
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.errors import ModelFileError
from sluice.ggml.library import GgufInitParams, Library
from sluice.ggml.types import GgmlType
from sluice.gguf_header import ARRAY, check_header

PACK_VERSION = 1
PACK_PART_ALIGNMENT = 512  # of the matrices in a packed expert, bytes
PACKED_TENSOR = "blk.{}.ffn_exps.packed"

_SCALARS = {
    0: C.c_uint8, 1: C.c_int8, 2: C.c_uint16, 3: C.c_int16, 4: C.c_uint32, 5: C.c_int32, 6: C.c_float, 7: C.c_bool,
    10: C.c_uint64, 11: C.c_int64, 12: C.c_double,
}  # fmt: skip
_PACK_KEY = "sluice.pack.version"
_PACKED = re.compile(r"blk\.(0|[1-9][0-9]*)\.ffn_exps\.packed")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<no>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})\.gguf", re.DOTALL)
_MAX_SHARDS = 4096


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file: `shape` in ggml's order (fastest first, four long), `offset` from the start of `file`."""

    name: str
    type: GgmlType
    shape: tuple[int, int, int, int]
    file: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One of the matrices of a layer's experts. Expert e's bytes are [offset + e × stride, … + n_bytes) of `file`."""

    role: str  # "gate", "up" or "down"
    type: GgmlType
    n_in: int
    n_out: int
    file: int
    offset: int
    stride: int
    n_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """One model: `paths` (shards in order), metadata of the first shard, tensors of all by name."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def n_bytes(self) -> int:
        return sum(p.stat().st_size for p in self.paths)

    @property
    def packed(self) -> bool:
        return _PACK_KEY in self.metadata

    def expert_parts(self, layer: int) -> tuple[ExpertPart, ...] | None:
        """The expert matrices of `layer` in slot order (gate, up, down), or None if it has none.

        Raises ModelFileError when some of them are missing or disagree about the number of experts.
        """
        return _packed_parts(self, layer) if self.packed else _stock_parts(self, layer)


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All shards of the model that `path` is a shard of (itself alone when its name isn't one).

    Numbers may be padded to any width; where the name leaves that open (10-of-12), the first shard's file tells.
    """
    match = _SHARD.fullmatch(path.name)
    if not match or not 1 <= int(match["no"]) <= int(match["count"]) <= _MAX_SHARDS:
        return (path,)
    stem, no, count = match.groups()
    widths = [len(no)] if no.startswith("0") else range(len(no), 0, -1)
    choices = [[path.with_name(f"{stem}-{i:0{w}d}-of-{count}.gguf") for i in range(1, int(count) + 1)] for w in widths]
    return tuple(next((names for names in choices if os.path.lexists(names[0])), choices[0]))


def open_gguf(path: str | os.PathLike[str], library: Library) -> GgufFile:
    """Read the headers of a model, given its file or any of its shards.

    Raises ModelFileError naming the file and what is wrong with it.
    """
    given = Path(os.path.expanduser(path))  # noqa: PTH111  (Path's raises for an unknown user)
    if not os.path.lexists(given):
        raise ModelFileError(f"{given}: no such file: check the path")
    paths = shard_paths(given)
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    for index, shard in enumerate(paths):
        if not os.path.lexists(shard):
            raise ModelFileError(f"{shard}: this shard ({index + 1} of {len(paths)}) is missing: download it too")
        own, own_tensors = _read_one(shard, index, library)
        _check_split(shard, own, index, len(paths))
        if index == 0:
            metadata = own
        for info in own_tensors:
            if info.name in tensors:
                raise ModelFileError(f"{shard}: tensor {info.name} is in two shards: the files are not of one model")
            tensors[info.name] = info
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelFileError(
            f"{paths[0]}: promises {_text(expected)} tensors, the files hold {len(tensors)}: they are not of one model"
        )
    file = GgufFile(paths, metadata, tensors)
    if file.packed:
        _check_packed(file, library)
    return file


def _read_one(path: Path, index: int, library: Library) -> tuple[dict[str, Any], list[TensorInfo]]:
    strings = check_header(path, library).strings
    context = library.gguf_init_from_file(os.fsencode(path), GgufInitParams(True, None))
    if not context:
        raise ModelFileError(f"{path}: ggml can't read its header: the file is damaged, download it again")
    try:
        metadata = {}
        for i in range(library.gguf_get_n_kv(context)):
            key = library.gguf_get_key(context, i).decode()
            metadata[key] = strings[key] if key in strings else _number(library, context, i)
        start = library.gguf_get_data_offset(context)
        tensors = []
        for i in range(library.gguf_get_n_tensors(context)):
            ne = library.gguf_get_tensor_ne(context, i)
            tensors.append(
                TensorInfo(
                    name=library.gguf_get_tensor_name(context, i).decode(),
                    type=GgmlType(library.gguf_get_tensor_type(context, i)),
                    shape=(ne[0], ne[1], ne[2], ne[3]),
                    file=index,
                    offset=start + library.gguf_get_tensor_offset(context, i),
                    n_bytes=library.gguf_get_tensor_size(context, i),
                )
            )
        return metadata, tensors
    finally:
        library.gguf_free(context)


def _number(library: Library, context: int, i: int) -> Any:
    """The value of metadata entry `i`, a number, a truth value or a list of those."""
    kind = library.gguf_get_kv_type(context, i)
    if kind != ARRAY:
        return _SCALARS[kind].from_address(library.gguf_get_val_data(context, i)).value
    n = library.gguf_get_arr_n(context, i)
    kind = library.gguf_get_arr_type(context, i)
    return list((_SCALARS[kind] * n).from_address(library.gguf_get_arr_data(context, i))) if n else []


def _check_split(shard: Path, metadata: Mapping[str, Any], index: int, count: int) -> None:
    """Raise ModelFileError where what a file says of its place among the shards is not what its name says."""
    remedy = "keep the names the shards were published under"
    said = metadata.get("split.count", count)
    if said != count and not (said == 0 and count == 1):  # gguf-split leaves 0 in a file that it merged
        raise ModelFileError(f"{shard}: says it is one of {_text(said)} shards, its name says {count}: {remedy}")
    no = metadata.get("split.no", index)
    if no != index and said:
        raise ModelFileError(f"{shard}: says it is number {_text(no)} from 0, its name says {index}: {remedy}")


def _text(value: object) -> str:
    """An untrusted value as a few characters of one line."""
    return ascii(value if not isinstance(value, list) else value[:8])[:64]


def _stock_parts(file: GgufFile, layer: int) -> tuple[ExpertPart, ...] | None:
    names = {role: f"blk.{layer}.ffn_{role}_exps.weight" for role in ("gate_up", "gate", "up", "down")}
    found = {role: file.tensors[name] for role, name in names.items() if name in file.tensors}
    if not found:
        return None
    where = f"{file.paths[0]}: layer {layer}"
    if set(found) not in ({"gate_up", "down"}, {"gate", "up", "down"}):
        raise ModelFileError(
            f"{where} has the expert tensors {', '.join(found)} instead of gate, up and down: "
            "the file is incomplete or of a kind that Sluice doesn't run"
        )
    if len({info.shape[2] for info in found.values()}) > 1 or any(info.shape[3] > 1 for info in found.values()):
        shapes = ", ".join(f"{role} {list(info.shape)}" for role, info in found.items())
        raise ModelFileError(f"{where}'s tensors disagree about the number of experts ({shapes}): the file is damaged")
    down = _part("down", found["down"])
    if "gate_up" not in found:
        return _part("gate", found["gate"]), _part("up", found["up"]), down
    fused = found["gate_up"]
    if fused.shape[1] % 2:
        raise ModelFileError(
            f"{where}'s gate and up share an odd number of rows ({fused.shape[1]}): the file is damaged"
        )
    return _part("gate", fused, halves=2), _part("up", fused, halves=2, half=1), down


def _part(role: str, info: TensorInfo, *, halves: int = 1, half: int = 0) -> ExpertPart:
    stride = info.n_bytes // info.shape[2]
    n_bytes = stride // halves
    n_out = info.shape[1] // halves
    return ExpertPart(role, info.type, info.shape[0], n_out, info.file, info.offset + half * n_bytes, stride, n_bytes)


def _packed_parts(file: GgufFile, layer: int) -> tuple[ExpertPart, ...] | None:
    info = file.tensors.get(PACKED_TENSOR.format(layer))
    if info is None:
        return None
    # per part: type, n_in, n_out, offset in the expert, bytes
    described = file.metadata.get(f"sluice.pack.blk.{layer}")
    damaged = ModelFileError(f"{file.paths[0]}: layer {layer}'s packed experts are not described: pack the model again")
    if not isinstance(described, list) or len(described) != 15 or not all(type(x) is int for x in described):
        raise damaged
    if info.type != GgmlType.I8 or info.shape[2:] != (1, 1):
        raise damaged
    stride, parts, end = info.shape[0], [], 0
    for role, at in zip(("gate", "up", "down"), range(0, 15, 5), strict=True):
        number, n_in, n_out, offset, n_bytes = described[at : at + 5]
        inside = min(n_in, n_out, n_bytes) > 0 and end <= offset <= stride - n_bytes
        if not inside or offset % PACK_PART_ALIGNMENT or number not in GgmlType.__members__.values():
            raise damaged
        end = offset + n_bytes
        parts.append(ExpertPart(role, GgmlType(number), n_in, n_out, info.file, info.offset + offset, stride, n_bytes))
    return tuple(parts)


def _check_packed(file: GgufFile, library: Library) -> None:
    """Raise ModelFileError where a packed file's description and its types' sizes disagree."""
    if (version := file.metadata[_PACK_KEY]) != PACK_VERSION:
        raise ModelFileError(
            f"{file.paths[0]}: packed in format {_text(version)}, not {PACK_VERSION}: pack the model again"
        )
    for layer in (int(m[1]) for m in map(_PACKED.fullmatch, file.tensors) if m):
        for part in file.expert_parts(layer) or ():
            n_blocks, rest = divmod(part.n_in, library.ggml_blck_size(part.type))
            if rest or n_blocks * library.ggml_type_size(part.type) * part.n_out != part.n_bytes:
                raise ModelFileError(
                    f"{file.paths[0]}: layer {layer}'s packed {part.role} experts can't be {part.n_bytes} bytes: "
                    "pack the model again"
                )
