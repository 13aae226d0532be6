"""Opens a Hugging Face model directory: its configuration, and its tensors by one name each, unread. Knows no GGUF.

Weights are `model.safetensors`, or shards that `model.safetensors.index.json` lists. Experts may be fused, as
transformers has them in memory, or one by one, as it saves them. A directory is somebody else's until checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.safetensors_file import StoredTensor, quoted, read_safetensors
from sluice.train.hf_config import HfConfig, read_config
from sluice.train.names import HEAD, Experts, Weight, canonical, left_out, weights

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_JSON_BYTES = 64 << 20
MAX_SHARDS = 4096


@dataclass(frozen=True)
class HfDirectory:
    """A checked model directory. `skipped` are the tensors that are no part of the decoder, by the file's names."""

    folder: Path
    config: HfConfig
    tensors: Mapping[str, StoredTensor]  # by canonical names
    skipped: Sequence[str]

    def read(self, weight: Weight) -> np.ndarray:
        """A tensor's numbers, float32, as GGUF has them."""
        return weight.to_gguf(self.tensors[weight.source].read().astype(np.float32, copy=False))

    def read_expert(self, stack: Experts, expert: int) -> np.ndarray:
        """One expert's matrix of a stack, float32 [n_out, n_in]."""
        if stack.source in self.tensors:
            both = self.tensors[stack.source].read(expert, 1)[0]
            matrix = both[stack.first : stack.first + stack.shape[1]]
        else:
            matrix = self.tensors[stack.apart(expert)].read()
        return matrix.astype(np.float32, copy=False)

    @property
    def files(self) -> list[Path]:
        """What it was read from."""
        return sorted({tensor.path for tensor in self.tensors.values()} | {self.folder / CONFIG})


def open_directory(folder: Path) -> HfDirectory:
    """The model in `folder`, every tensor's name and shape checked.

    Raises InputError naming what is wrong: no directory, no configuration, a family that isn't known (the choices are
    listed), a shard or a tensor that is missing, one too many, one of another shape.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no directory: name one that holds {CONFIG} and {WHOLE}")
    config = read_config(read_json(folder / CONFIG, "a model directory has one"), str(folder / CONFIG))
    tensors: dict[str, StoredTensor] = {}
    skipped: list[str] = []
    for file, names in _files(folder).items():
        found = read_safetensors(file)[1]
        _check_shard(file, found, names)
        for name, tensor in found.items():
            own = canonical(name)
            if left_out(own) or (own == HEAD and config.tied):
                skipped.append(name)
            elif own in tensors:
                raise InputError(f"{folder}: holds {quoted(own)} twice: the directory is damaged")
            else:
                tensors[own] = tensor
    _check(folder, config, tensors)
    return HfDirectory(folder, config, tensors, sorted(skipped))


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError, with `remedy` where there is no such file."""
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if path.is_file() and size <= MAX_JSON_BYTES else b""
    except FileNotFoundError:
        raise InputError(f"{path}: no such file: {remedy}") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}): check the directory") from None
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise InputError(f"{path}: no JSON object of at most {MAX_JSON_BYTES >> 20} MiB: get the file again")
    return said


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files with weights; of shards, the names that the index says are in each."""
    if (folder / WHOLE).exists() or not (folder / INDEX).exists():
        if not (folder / WHOLE).exists() and list(folder.glob("*.bin")):
            raise InputError(f"{folder}: holds PyTorch's pickles, which may run anything: save it as safetensors")
        return {folder / WHOLE: None}
    said = read_json(folder / INDEX, "").get("weight_map")
    if not isinstance(said, dict) or not said or not all(isinstance(name, str) for name in said.values()):
        raise InputError(f"{folder / INDEX}: has no weight_map of files: get it again")
    shards: dict[Path, set[str] | None] = {}
    for name in sorted(set(said.values())):
        if Path(name).name != name or "\\" in name or len(shards) == MAX_SHARDS:
            raise InputError(f"{folder / INDEX}: names the shard {quoted(name)}, no file beside it: get it again")
        if not (folder / name).exists():
            raise InputError(f"{folder / name}: this shard is missing: download it too")
        shards[folder / name] = {tensor for tensor, file in said.items() if file == name}
    return shards


def _check_shard(file: Path, found: Mapping[str, object], listed: set[str] | None) -> None:
    if listed is None or listed == set(found):
        return
    name = min(listed ^ set(found))
    holds, lists = ("lacks", "lists it") if name in listed else ("holds", "lists it elsewhere or not at all")
    raise InputError(f"{file}: {holds} {quoted(name)}, and {INDEX} {lists}: the files are not of one model")


def _check(folder: Path, config: HfConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise InputError unless `tensors` are what the configuration says, no more and no less."""
    known: set[str] = set()
    for name, shape in _expected(config, tensors):
        if name not in tensors:
            raise InputError(f"{folder}: tensor {name} is missing: the model is incomplete")
        if tensors[name].shape != shape:
            raise InputError(
                f"{folder}: tensor {name} is {list(tensors[name].shape)}, {CONFIG} says {list(shape)}: "
                "they are not of one model"
            )
        known.add(name)
    unknown = sorted(set(tensors) - known)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise InputError(
            f"{folder}: unknown tensor {quoted(unknown[0])}{more}: no part of a {config.model_type} of this shape"
        )


def _expected(config: HfConfig, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes. Experts are fused where `tensors` have them so."""
    for weight in weights(config):
        if isinstance(weight, Weight) or weight.source in tensors:
            yield weight.source, weight.hf_shape
        else:
            for expert in range(config.n_expert):
                yield weight.apart(expert), weight.shape[1:]
