"""Logits against transformers on the same float32 weights, with float32 keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Prompt, opened, run
from oracles import transformers_logits
from tiny import T, write_tiny

IDS = np.random.default_rng(4).integers(0, 397, 96).tolist()
PREFIX = 64

MODELS: dict[str, dict[str, Any]] = {
    "qwen3moe": {},
    "qwen3moe dense layers": {"n_layers": 4, "dense_layers": (0, 2), "n_expert": 12, "top_k": 3},
    "qwen3moe fused yarn": {
        "fused": True, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_context_length": 512}
    },
    "mixtral": {"arch": "llama"},
    "mixtral dense last, fused": {"arch": "llama", "dense_layers": (2,), "fused": True, "n_head": 6, "n_head_kv": 3},
    "mixtral tied, llama 3's rope": {
        "arch": "llama", "tied": True, "rope_freqs": True, "rope_scaling": {"type": "linear", "factor": 4.0}
    },
}  # fmt: skip


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_transformers(tmp_path: Path, name: str) -> None:
    # Measured: 1e-6 to 5e-6, sums in another order. A wrong norm, rope or routing weight costs 1e-2 and more.
    model = write_tiny(tmp_path / "m.gguf", expert_type=T.F32, dense_type=T.F32, **MODELS[name])
    expected = transformers_logits(model.config, model.weights, IDS)
    with opened(model.path, kv="f32", expert_slots=model.config.top_k + 1) as engine:
        found = engine.logits(IDS)
        decoded = run(engine, Prompt(IDS[:PREFIX], IDS[PREFIX:]))
    assert relative_l2(found, expected) <= 1e-4
    assert relative_l2(decoded, expected[PREFIX - 1 :]) <= 1e-4
