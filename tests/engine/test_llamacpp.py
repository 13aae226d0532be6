"""Logits against llama.cpp on the same file, with float32 keys and values on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Prompt, opened, run
from oracles import llamacpp_logits, top_logprobs
from tiny import T, write_tiny

N = 96  # positions compared
PREFIX = 24  # of them prefilled in the decode path, the rest are decoded one by one
TOP = 20

# Activations are rounded to 8 bits before quantised products, so a difference in the last bit of attention (ours may be
# flash attention, llama.cpp's is not) moves one to the next step, and grows from layer to layer.
MEDIAN = 0.02

MODELS: dict[str, dict[str, Any]] = {
    **{
        f"{arch} {t.name}": {"arch": arch, "expert_type": t}
        for arch in ("qwen3moe", "llama")
        for t in (T.Q4_K, T.Q6_K, T.Q8_0, T.F16)
    },
    "qwen3moe yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_context_length": 32}},
    "llama yarn": {"arch": "llama", "rope_scaling": {"type": "yarn", "factor": 8.0, "original_context_length": 64}},
    "qwen3moe linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama linear freqs": {"arch": "llama", "rope_freqs": True, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen3moe tied": {"tied": True, "n_head": 6, "n_head_kv": 3, "head_dim": 32, "n_expert": 17, "top_k": 5},
    "llama odd heads": {"arch": "llama", "n_head": 5, "n_head_kv": 1, "head_dim": 32, "n_expert": 5, "top_k": 3},
    "qwen3moe mixed": {
        "expert_type": [T.Q4_K, T.Q5_0, T.IQ4_NL], "down_type": [T.Q6_K, T.Q8_0, T.Q5_K], "dense_type": [T.Q6_K, T.F16]
    },
}  # fmt: skip


def differences(found: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of `expected`'s likeliest tokens: ids, log-probabilities, distance to `found`'s; [rows, TOP] each."""
    ids, theirs = top_logprobs(expected, TOP)
    wide = found.astype(np.float64)
    ours = np.take_along_axis(wide - np.logaddexp.reduce(wide, axis=1, keepdims=True), ids, axis=1)
    return ids, theirs, np.abs(ours - theirs)


def assert_parity(found: np.ndarray, expected: np.ndarray, median: float = MEDIAN) -> None:
    """Log-probabilities of llama.cpp's `TOP` likeliest tokens, and the likeliest token, agree at every position.

    The likeliest token may differ only at a tie: where llama.cpp's own first and second lie closer together than
    twice the usual difference (the 95th percentile), by which each of the two could have moved.
    """
    assert len(found) == len(expected) >= 64
    ids, theirs, apart = differences(found, expected)
    assert np.median(apart) <= median
    noise = np.quantile(apart, 0.95)
    differ = found.argmax(axis=1) != ids[:, 0]
    gaps = (theirs[:, 0] - theirs[:, 1])[differ]
    assert (gaps <= 2 * noise).all(), f"other tokens at {np.flatnonzero(differ)}: gaps {gaps}, noise {noise}"


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decoding_agree_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = write_tiny(tmp_path / "m.gguf", **MODELS[name])
    ids = np.random.default_rng(11).integers(0, 397, N).tolist()
    expected = llamacpp_logits(model.path, ids, chunk=1)
    with opened(model.path, kv="f32", expert_slots=model.config.top_k + 3) as engine:
        assert_parity(engine.logits(ids), expected)
        decoded = run(engine, Prompt(ids[:PREFIX], ids[PREFIX:]))
    assert_parity(decoded, expected[PREFIX - 1 :])


TEXT = """The old lighthouse keeper climbed the stairs every evening to light the lamp. One night a storm came in from
the west, and the waves were higher than he had ever seen. He thought of the ships out there in the dark, and of the
people on board who were looking for his light. def fibonacci(n): return n if n < 2 else fibonacci(n - 1) +
fibonacci(n - 2)."""


def test_the_demo_model_agrees_with_llamacpp(demo_model: Path) -> None:
    with opened(demo_model, kv="f32", ctx=512, expert_slots=40, poison=True) as engine:
        ids = engine.tokenizer.encode(TEXT)[: N + 16]
        assert len(ids) >= 64
        # One token at a time: taking them at once, llama.cpp is 0.064 from itself after thirty layers of 4-bit weights.
        expected = llamacpp_logits(demo_model, ids, chunk=1)
        assert_parity(engine.logits(ids), expected)
        decoded = run(engine, Prompt(ids[:PREFIX], ids[PREFIX:]))
    assert_parity(decoded, expected[PREFIX - 1 :])
