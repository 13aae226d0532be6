"""Reads LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors` in a directory.

A module's tensors are `base_model.model.MODULE.lora_A.weight` [rank, n_in] and `….lora_B.weight` [n_out, rank]. Experts
that are one parameter have A's of all experts stacked, [n_expert × rank, n_in], and the columns of B by rank, then
expert: [n_out, rank × n_expert].
Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.models.spec import ModelSpec
from sluice.routing.linears import Linear, expert_name
from sluice.routing.lora_file import Factors, Update, check_known, check_rank, misfit
from sluice.routing.peft_names import Fused, Piece, pieces
from sluice.safetensors_file import StoredTensor, quoted, read_safetensors

MAX_CONFIG_BYTES = 1 << 20
PREFIX = "base_model.model."
# Fields of the configuration that make something else than y = W x + s B (A x) of an adapter, where they are set.
VARIANTS = (
    "use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "trainable_token_indices", "layer_replication",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "velora_config", "monteclora_config",
    "kasa_config", "megatron_config",
)  # fmt: skip
# Others take a part of W away when training begins, so what is saved is no update of the model's own weights.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_KEY = re.compile(r"(.{1,400})\.lora_([AB])\.weight")
_PATTERN = re.compile(r"[A-Za-z0-9_-]+|\\d\+")  # between the dots of a module's name


@dataclass(frozen=True)
class _Config:
    """What the configuration says of ranks and scales."""

    path: Path
    rank: int
    alpha: float
    root: bool  # alpha is divided by the root of the rank
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]

    def of(self, *names: str) -> tuple[int, float]:
        """The rank of what has one of these names, and the scale that goes with it."""
        rank = _by_pattern(self.path, self.ranks, names, self.rank)
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise _said(self.path, "rank_pattern", rank)
        check_rank(self.path, quoted(names[0]), rank)
        alpha = _number(self.path, "alpha_pattern", _by_pattern(self.path, self.alphas, names, self.alpha))
        return rank, alpha / (math.sqrt(rank) if self.root else rank)


@dataclass(frozen=True)
class _Module:
    """A module's two tensors; `scale` is what B is multiplied by."""

    name: str
    a: StoredTensor
    b: StoredTensor
    rank: int
    scale: float


def read_peft_adapter(given: Path, spec: ModelSpec, known: Mapping[str, Linear]) -> dict[str, Update]:
    """The updates of the directory, or the safetensors file in it, to the matrices `known`. Raises InputError."""
    folder = given if given.is_dir() else given.parent
    weights = folder / "adapter_model.safetensors" if given.is_dir() else given
    if given.is_dir() and not weights.exists():
        if (folder / "adapter_model.bin").exists():
            raise InputError(f"{folder}: holds PyTorch's pickle, which may run anything: save it as safetensors")
        raise InputError(f"{weights}: no such file: name a directory that PEFT saved, or a GGUF file")
    config = _config(folder / "adapter_config.json")
    _, tensors = read_safetensors(weights)
    parts: dict[str, list[tuple[_Module, Piece]]] = defaultdict(list)
    for name, a, b in _pairs(weights, tensors):
        names, found, n = _pieces(weights, name, a, b, spec, known)
        module = _Module(name, a, b, *config.of(*names))
        _check_shapes(weights, module, found, n, known)
        for piece in found:
            parts[piece.target].append((module, piece))
    return {target: _update(weights, known[target], found) for target, found in parts.items()}


def _config(path: Path) -> _Config:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}): PEFT saves it beside the weights") from None
    try:
        if len(raw) > MAX_CONFIG_BYTES:
            raise ValueError
        said = json.loads(raw)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise InputError(f"{path}: no JSON object of at most {MAX_CONFIG_BYTES >> 20} MiB: get the adapter again")
    if said.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is {quoted(said.get('peft_type'))}, and Sluice applies LORA only")
    for field in VARIANTS:
        if said.get(field):
            raise InputError(f"{path}: {field} is set: Sluice applies plain LoRA only, without what that changes")
    if said.get("bias", "none") != "none":
        raise InputError(f"{path}: bias is {quoted(said['bias'])}: Sluice changes no biases, only linear maps")
    start = said.get("init_lora_weights")
    if not any(start is plain or start == plain for plain in PLAIN_STARTS):
        raise InputError(
            f"{path}: init_lora_weights is {quoted(start)}, which trains on other weights than the model's own: "
            "convert it to a plain LoRA with PEFT first"
        )
    rank, root = said.get("r"), said.get("use_rslora", False)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise _said(path, "r", rank)
    if not isinstance(root, bool):
        raise _said(path, "use_rslora", root)
    patterns = [said.get(field) or {} for field in ("rank_pattern", "alpha_pattern")]
    for field, pattern in zip(("rank_pattern", "alpha_pattern"), patterns, strict=True):
        if not isinstance(pattern, dict):
            raise _said(path, field, pattern)
    return _Config(
        path, check_rank(path, "r", rank), _number(path, "lora_alpha", said.get("lora_alpha")), root, *patterns
    )


def _said(path: Path, field: str, value: object) -> InputError:
    return InputError(f"{path}: {field} is {quoted(value)}, which it can't be: the adapter is damaged")


def _number(path: Path, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e9:
        raise _said(path, field, value)
    return float(value)


def _by_pattern(path: Path, patterns: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    """What the first of `patterns` says that one of `names` ends with, as PEFT has it."""
    for pattern, value in patterns.items():
        parts = pattern.removeprefix("^").removeprefix(".*").removeprefix("\\.").replace("\\.", ".").split(".")
        if not all(_PATTERN.fullmatch(part) for part in parts):  # others may take for ever, or mean anything
            raise InputError(f"{path}: the pattern {quoted(pattern)} is more than the end of a name: spell it out")
        end = re.compile(r"(?:.*\.)?" + r"\.".join(parts))
        if any(end.fullmatch(name) for name in names):
            return value
    return default


def _pairs(path: Path, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    """Modules' names with their A and B."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise InputError(f"{path}: holds {quoted(name)}, no A or B of a LoRA: Sluice applies linear updates only")
        if len(tensor.shape) != 2:
            raise InputError(f"{path}: {quoted(name)} has the shape {list(tensor.shape)}, no matrix's: it is damaged")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    for name, pair in pairs.items():
        if len(pair) < 2:
            raise InputError(f"{path}: holds only lora_{next(iter(pair))} of {quoted(name)}: the adapter is incomplete")
        yield name, pair["A"], pair["B"]


def _pieces(
    path: Path, name: str, a: StoredTensor, b: StoredTensor, spec: ModelSpec, known: Mapping[str, Linear]
) -> tuple[list[str], list[Piece], int]:
    """What patterns may call the module, what became of it, and how many experts' its tensors are."""
    found = pieces(name, spec, known)
    if found is None:
        why = f"no linear map that Sluice knows in {spec.architecture}: is the adapter for another model?"
        if "embed" in name:
            why = "embeddings, which Sluice doesn't adapt"
        raise InputError(f"{path}: adapts {quoted(name)}, {why}")
    if isinstance(found, Fused):
        parameter, found = _fused_pieces(path, name, (a.shape[1], b.shape[0]), found, known)
        return [f"{name.replace('.base_layer', '')}.{parameter}"], found, spec.n_expert
    for piece in found:
        check_known(path, piece.target, known, quoted(name))
    return [name, f"{name}.weight"], found, 1


def _fused_pieces(
    path: Path, name: str, shape: tuple[int, int], fused: Fused, known: Mapping[str, Linear]
) -> tuple[str, list[Piece]]:
    """The parameter of all experts of a layer that maps as many numbers to as many as `shape` says."""
    gate, up, down = (known.get(expert_name(fused.layer, role)) for role in ("gate", "up", "down"))
    if gate is None or up is None or down is None:
        raise InputError(f"{path}: adapts {quoted(name)}, and layer {fused.layer} has no experts in this model")
    if shape == (down.n_in, down.n_out):
        return "down_proj", [Piece(down.name)]
    if shape != (gate.n_in, 2 * gate.n_out):
        fitting = f"{[gate.n_in, 2 * gate.n_out]} or {[down.n_in, down.n_out]}"
        raise misfit(path, quoted(name), "a matrix of the experts", list(shape), fitting)
    n = gate.n_out
    rows = np.arange(2 * n).reshape(n, 2).T if fused.interleaved else np.arange(2 * n).reshape(2, n)
    return "gate_up_proj", [Piece(gate.name, rows[0]), Piece(up.name, rows[1])]


def _check_shapes(path: Path, module: _Module, found: Sequence[Piece], n: int, known: Mapping[str, Linear]) -> None:
    """Raise InputError unless the module's tensors, of `n` experts, are as large as what became of it needs."""
    name = quoted(module.name)
    if module.a.shape[0] != n * module.rank or module.b.shape[1] != n * module.rank:
        each = f" for each of {n} experts" if n > 1 else ""
        raise InputError(
            f"{path}: A and B of {name} are {list(module.a.shape)} and {list(module.b.shape)}, which the rank of "
            f"{module.rank}{each} that its configuration says contradicts: they don't belong together"
        )
    linear = known[found[0].target]
    n_in = linear.n_out if found[0].transposed else linear.n_in
    if module.a.shape[1] != n_in:
        raise misfit(path, name, "lora_A", list(module.a.shape), [module.a.shape[0], n_in])
    n_out = max(known[it.target].n_out if it.rows is None else int(it.rows.max()) + 1 for it in found)
    if module.b.shape[0] != n_out:
        raise misfit(path, name, "lora_B", list(module.b.shape), [n_out, module.b.shape[1]])
    for it in found:
        if it.index is not None and it.index >= known[it.target].n_stack:
            raise InputError(f"{path}: adapts {name}, and the model has {known[it.target].n_stack} experts in a layer")


def _update(path: Path, linear: Linear, found: Sequence[tuple[_Module, Piece]]) -> Update:
    """The update of one matrix; of a stack whose parts come from modules each, those not named stay as they are."""
    rank = max(module.rank for module, _ in found)
    seen = [piece.index for _, piece in found]
    if len(set(seen)) < len(seen) or (None in seen and len(seen) > 1):
        raise InputError(f"{path}: adapts {linear.name} twice: the adapter is damaged")
    if seen == [None]:
        return Update(linear, rank, path, lambda: _factors(*found[0], linear))

    def read() -> Factors:
        a = np.zeros((linear.n_stack, rank, linear.n_in), np.float32)
        b = np.zeros((linear.n_stack, linear.n_out, rank), np.float32)
        for module, piece in found:
            a[piece.index, : module.rank], b[piece.index, :, : module.rank] = _factors(module, piece, linear)
        return a, b

    return Update(linear, rank, path, read)


def _factors(module: _Module, piece: Piece, linear: Linear) -> Factors:
    a = module.a.read().astype(np.float32, copy=False)
    b = module.b.read().astype(np.float32, copy=False) * np.float32(module.scale)
    if linear.role and piece.index is None:  # all experts in one parameter
        a = a.reshape(linear.n_stack, module.rank, a.shape[1])
        b = b.reshape(len(b), module.rank, linear.n_stack).transpose(2, 0, 1)
        return a, b if piece.rows is None else b[:, piece.rows]
    if piece.columns is not None:
        a = a[:, piece.columns]
    if piece.rows is not None:
        b = b[piece.rows]
    if b.ndim == 3:  # a stack of heads, which share A
        a = np.broadcast_to(a, (len(b), *a.shape))
    if piece.transposed:
        a, b = np.swapaxes(b, -1, -2), np.swapaxes(a, -1, -2)
    return (a[0], b[0]) if b.ndim == 3 and not linear.n_stack else (a, b)  # there may be one head only
