"""Reads LoRA adapters in llama.cpp's GGUF format: `NAME.lora_a` [n_in, rank] and `NAME.lora_b` [rank, n_out], in ggml's
order of dimensions, for the model's tensor NAME; a third dimension where that is a stack of experts or heads.

Format: convert_lora_to_gguf.py and src/llama-adapter.cpp in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.ggml import Library
from sluice.ggml.types import WEIGHT_TYPES
from sluice.gguf import GgufFile, TensorInfo, open_gguf
from sluice.models.spec import ModelSpec
from sluice.routing.linears import Linear
from sluice.routing.lora_file import Factors, Update, check_known, check_rank, misfit
from sluice.routing.stored import Converter

FUSED = "ffn_gate_up_exps.weight"  # gate above up, which here are apart


def read_gguf_adapter(path: Path, spec: ModelSpec, known: Mapping[str, Linear], library: Library) -> dict[str, Update]:
    """The updates of the file at `path` to the matrices `known`. Raises InputError."""
    file = open_gguf(path, library)
    alpha = _alpha(path, file.metadata, spec)
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, info in file.tensors.items():
        base, dot, part = name.rpartition(".")
        if not dot or part not in ("lora_a", "lora_b"):
            raise InputError(f"{path}: holds {name}, which is no part of a LoRA: Sluice applies linear updates only")
        pairs.setdefault(base, {})[part] = info
    updates: dict[str, Update] = {}
    for name, parts in pairs.items():
        if len(parts) < 2:
            raise InputError(f"{path}: holds {next(iter(parts))} of {name} without its other half: it is incomplete")
        fused = name.endswith(FUSED)
        targets = [name.replace("gate_up", role) for role in ("gate", "up")] if fused else [name]
        for half, target in enumerate(targets):
            check_known(path, target, known, name)
            if target in updates:
                raise InputError(f"{path}: adapts {target} twice: the adapter is damaged")
            updates[target] = _update(
                path, file, library, known[target], parts["lora_a"], parts["lora_b"], alpha, half if fused else None
            )
    return updates


def _alpha(path: Path, metadata: Mapping[str, Any], spec: ModelSpec) -> float:
    """The file's alpha, 0 where it has none; checks that it is an adapter for this architecture."""
    for key, expected, what in (
        ("general.type", "adapter", "no adapter, a LoRA file is needed: give --lora one"),
        ("adapter.type", "lora", "no LoRA adapter, which is the only kind that Sluice applies"),
        ("general.architecture", spec.architecture, f"for another model than this {spec.architecture}"),
    ):
        if (found := metadata.get(key)) != expected:
            raise InputError(f"{path}: {key} is {ascii(found)[:60]}: {what}")
    if metadata.get("adapter.alora.invocation_tokens"):
        raise InputError(f"{path}: is applied after certain tokens only (aLoRA), which Sluice doesn't do")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise InputError(f"{path}: adapter.lora.alpha is {ascii(alpha)[:60]}, not a number: the adapter is damaged")
    return float(alpha)


def _update(
    path: Path, file: GgufFile, library: Library, linear: Linear, a: TensorInfo, b: TensorInfo, alpha: float,
    half: int | None,
) -> Update:  # fmt: skip
    """`half`: B's rows are those of two matrices, and this is the first (0) or the second (1)."""
    rank = check_rank(path, a.name, a.shape[1])
    n_rows = linear.n_out * (1 if half is None else 2)
    stacks = (linear.n_stack or 1, 1)  # one A or B may serve a whole stack
    if a.shape != (linear.n_in, rank, a.shape[2], 1) or a.shape[2] not in stacks:
        raise misfit(path, linear.name, "lora_a", _text(a), _text(a, linear.n_in, rank, linear.n_stack))
    if b.shape != (rank, n_rows, b.shape[2], 1) or b.shape[2] not in stacks:
        raise misfit(path, linear.name, "lora_b", _text(b), _text(b, rank, n_rows, linear.n_stack))
    for info in (a, b):
        if info.type not in WEIGHT_TYPES:
            raise InputError(f"{path}: {info.name} is {info.type.name}, no type of weights: convert the adapter again")
    scale = alpha / rank if alpha else 1.0

    def read() -> Factors:
        with Converter(library) as converter:
            down, up = (_values(file, info, converter) for info in (a, b))
        if half is not None:
            up = up[:, half * linear.n_out : (half + 1) * linear.n_out]
        up = up * np.float32(scale)
        if not linear.n_stack:
            return down[0], up[0]
        n = linear.n_stack
        return np.broadcast_to(down, (n, *down.shape[1:])), np.broadcast_to(up, (n, *up.shape[1:]))

    return Update(linear, rank, path, read)


def _text(info: TensorInfo, *shape: int) -> str:
    """A shape without the ones at its end: the tensor's own, or the one given."""
    whole = list(shape or info.shape)
    while len(whole) > 1 and whole[-1] <= 1:
        whole.pop()
    return str(whole)


def _values(file: GgufFile, info: TensorInfo, converter: Converter) -> np.ndarray:
    """A tensor's numbers as float32 [n_stack, rows, columns]."""
    path = file.paths[info.file]
    try:
        with path.open("rb") as source:
            source.seek(info.offset)
            raw = source.read(info.n_bytes)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}): check the file") from error
    if len(raw) < info.n_bytes:
        raise InputError(f"{path}: became shorter while it was read: leave it alone, then start again")
    columns, rows, n_stack, _ = info.shape
    return converter.widened(info.type, columns, raw).reshape(n_stack, rows, columns)
