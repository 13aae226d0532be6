"""Writes random LoRA adapters in llama.cpp's GGUF format for a model's file; knows nothing of Sluice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny import StoredModel, T, quantize


def linear_names(model: StoredModel) -> list[str]:
    """The matrices of a file that llama.cpp multiplies by, embeddings left out."""
    return [
        name
        for name, values in model.weights.items()
        if values.ndim > 1 and "conv" not in name and "token_embd" not in name
    ]


def random_factors(
    model: StoredModel, names: Iterable[str], rank: int, *, std: float = 0.05, seed: int = 0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A [.., rank, n_in] and B [.., n_out, rank] of deviation `std`, by the matrices' names; A keeps lengths."""
    rng, found = np.random.default_rng(seed), {}
    for name in names:
        *stack, n_out, n_in = model.weights[name].shape
        a = rng.standard_normal((*stack, rank, n_in), dtype=np.float32) * np.float32(n_in**-0.5)
        found[name] = (a, rng.standard_normal((*stack, n_out, rank), dtype=np.float32) * np.float32(std))
    return found


def write_adapter(
    path: Path, architecture: str, factors: Mapping[str, tuple[np.ndarray, np.ndarray]], *, alpha: float | None = 16.0,
    t: T = T.F32, keys: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
) -> Path:  # fmt: skip
    """An adapter file. `keys` are added or, where None, left out; `change` may spoil the tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    said: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora", **(keys or {})}
    for key, value in said.items():
        if value is not None and key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    tensors = {
        f"{name}.lora_{part}": values for name, pair in factors.items() for part, values in zip("ab", pair, strict=True)
    }
    change(tensors)
    for name, values in tensors.items():
        fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[t][0] == 0
        kind = t if fits else T.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(
    model: StoredModel, factors: Mapping[str, tuple[np.ndarray, np.ndarray]], scale: float
) -> dict[str, np.ndarray]:
    """The model's weights in float32 with the updates added."""
    weights = dict(model.weights)
    for name, (a, b) in factors.items():
        weights[name] = weights[name] + np.float32(scale) * (b @ a)
    return weights
