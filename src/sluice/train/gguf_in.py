"""Reads the weights of a GGUF file, as they are computed with, into a Hugging Face model. It writes and runs nothing.

Numbers are what the stored types stand for, in float32, so a torch model with them is the quantised model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sluice.errors import InputError
from sluice.ggml import Library
from sluice.ggml.tensor import row_bytes
from sluice.ggml.types import WEIGHT_TYPES, GgmlType
from sluice.gguf import PACKED_TENSOR, ExpertPart, GgufFile, open_gguf
from sluice.models.spec import expert_count
from sluice.routing.stored import Converter
from sluice.train.hf_config import HfConfig, read_config
from sluice.train.names import HEAD, Experts, Weight, canonical, weights

if TYPE_CHECKING:
    import torch

PIECE_NUMBERS = 1 << 22  # that are widened at once


class GgufWeights:
    """The tensors of the model in a GGUF file (stock, sharded or packed), checked against a configuration.

    `config` is what transformers calls a configuration, as a mapping.
    Raises InputError, naming what differs, where the file holds another model.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], library: Library) -> None:
        self.file = open_gguf(path, library)
        self.library = library
        self.config = read_config(config, "the model's configuration")
        self._weights = weights(self.config)
        _check(self.file, self.config, self._weights)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Names of transformers' state dict, and float32 values, one tensor in memory at a time. A tied head is left
        out."""
        with Converter(self.library) as converter:
            fused: dict[str, np.ndarray] = {}  # gate above up, until both are there
            for it in self._weights:
                if isinstance(it, Weight):
                    info = self.file.tensors[it.name]
                    stored = self._matrix(
                        converter, info.type, info.file, info.offset, math.prod(it.shape[:-1]), it.shape[-1]
                    )
                    yield it.source, it.to_hf(stored.reshape(it.shape))
                    continue
                whole = fused.setdefault(it.source, np.empty(it.hf_shape, np.float32))
                self._fill(whole, it, converter)
                if it.first + it.shape[1] == it.hf_shape[1]:
                    yield it.source, fused.pop(it.source)

    def state_dict(self) -> dict[str, np.ndarray]:
        """All of `tensors`, and a tied head, which is the embeddings' array."""
        state = dict(self.tensors())
        if self.config.tied:
            state[HEAD] = state["model.embed_tokens.weight"]
        return state

    def load_into(self, model: torch.nn.Module) -> None:
        """Copy every tensor into `model`, a causal language model of transformers, with its parameters' own types."""
        import torch

        places = {canonical(name): value.data for name, value in model.named_parameters()}
        for name, values in self.tensors():
            if name not in places or tuple(places[name].shape) != values.shape:
                raise InputError(f"{self.file.paths[0]}: the model has no {name} {list(values.shape)}: build it anew")
            places[name].copy_(torch.from_numpy(values))

    def _fill(self, whole: np.ndarray, it: Experts, converter: Converter) -> None:
        part = _part(self.file, it)
        assert part is not None  # `_check` has seen it
        for expert in range(it.shape[0]):
            at = part.offset + expert * part.stride
            matrix = self._matrix(converter, part.type, part.file, at, part.n_out, part.n_in)
            whole[expert, it.first : it.first + it.shape[1]] = matrix

    def _matrix(
        self, converter: Converter, type: GgmlType, file: int, offset: int, n_rows: int, n_in: int
    ) -> np.ndarray:
        """float32 [n_rows, n_in] of the bytes at `offset`."""
        row, found = row_bytes(self.library, type, n_in), np.empty((n_rows, n_in), np.float32)
        path, step = self.file.paths[file], max(1, PIECE_NUMBERS // n_in)
        try:
            with path.open("rb") as source:
                source.seek(offset)
                for first in range(0, n_rows, step):
                    n = min(step, n_rows - first)
                    raw = source.read(n * row)
                    if len(raw) < n * row:
                        raise InputError(f"{path}: became shorter while it was read: leave it alone, then start again")
                    found[first : first + n] = values = converter.widened(type, n_in, raw)
                    if not np.isfinite(values).all():
                        raise InputError(f"{path}: holds numbers at byte {offset + first * row} and on that are not "
                                         "finite: it is damaged, export the model again")  # fmt: skip
        except OSError as error:
            raise InputError(f"{path}: can't be read ({error.strerror}): check the file") from error
        return found


def _check(file: GgufFile, c: HfConfig, expected: list[Weight | Experts]) -> None:
    """Raise InputError unless `file` holds `expected` and nothing else."""
    path, found = file.paths[0], file.metadata.get("general.architecture")
    another = f"it is another model than this {c.model_type}"
    if found != c.architecture:
        raise InputError(f"{path}: is {ascii(found)[:60]}, not {c.architecture}: {another}")
    for key, value in (("expert_used_count", c.top_k), ("block_count", c.n_layers), ("attention.head_count", c.n_head)):
        if (said := file.metadata.get(f"{c.architecture}.{key}")) != value:
            raise InputError(f"{path}: {key} is {ascii(said)[:60]}, not {value}: {another}")
    for key, number in (("rope.freq_base", c.rope["rope_theta"]), ("attention.layer_norm_rms_epsilon", c.eps)):
        said = file.metadata.get(f"{c.architecture}.{key}")
        if not isinstance(said, float) or not math.isclose(said, number, rel_tol=1e-6):
            raise InputError(f"{path}: {key} is {ascii(said)[:60]}, not {number}: {another}")
    for it in expected:
        shape = _expert_shape(file, it) if isinstance(it, Experts) else _shape(file, it)
        if shape is None:
            raise InputError(f"{path}: has no {it.name}: {another}")
        if shape != it.shape:
            raise InputError(f"{path}: {it.name} is {list(shape)}, not {list(it.shape)}: {another}")
    known = {it.name for it in expected} | {f"blk.{i}.ffn_gate_up_exps.weight" for i in range(c.n_layers)}
    known |= {PACKED_TENSOR.format(i) for i in range(c.n_layers)}
    for name, info in file.tensors.items():
        if name not in known:
            raise InputError(f"{path}: holds {name}, which the model lacks: {another}")
        if info.type not in WEIGHT_TYPES and not name.endswith(".packed"):
            raise InputError(f"{path}: {name} is {info.type.name}, no type of weights: export the model again")


def _shape(file: GgufFile, it: Weight) -> tuple[int, ...] | None:
    """A tensor's shape, row-major, with as many dimensions as it should have where ones make the difference."""
    info = file.tensors.get(it.name)
    if info is None:
        return None
    whole, n = info.shape[::-1], len(it.shape)
    return whole[-n:] if all(size == 1 for size in whole[:-n]) else whole


def _part(file: GgufFile, it: Experts) -> ExpertPart | None:
    return next((part for part in file.expert_parts(it.layer) or () if part.role == it.role), None)


def _expert_shape(file: GgufFile, it: Experts) -> tuple[int, ...] | None:
    part = _part(file, it)
    if part is None or part.type not in WEIGHT_TYPES:
        return None
    return expert_count(file, (part,)), part.n_out, part.n_in
