"""The fixtures and oracles that other tests lean on, held against each other: neither knows Sluice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from oracles import (
    llamacpp_detokenize,
    llamacpp_greedy,
    llamacpp_logits,
    llamacpp_logprobs,
    llamacpp_tokenize,
    top_logprobs,
    transformers_logits,
)
from tiny import EOS, T, TinyModel, quantize, vocabulary, write_tiny

IDS = np.random.default_rng(1).integers(0, 397, 96)
FLOAT32: dict[str, Any] = {"expert_type": T.F32, "dense_type": T.F32}


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def routes(model: TinyModel, layer: int) -> np.ndarray:
    """The experts that a router picks on plain normalised embeddings: [n_vocab, top_k]. Exact for layer 0's scale."""
    weights = model.weights
    x = weights["token_embd.weight"]
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True)) * weights[f"blk.{layer}.ffn_norm.weight"]
    logits = x @ weights[f"blk.{layer}.ffn_gate_inp.weight"].T
    return np.argsort(-logits, axis=1)[:, : model.config.top_k]


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "qwen3moe", "rope_scaling": {"type": "yarn", "factor": 4.0, "original_context_length": 512}},
        {"arch": "llama", "tied": True, "rope_freqs": True, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ],
    ids=["qwen3moe-yarn", "llama-tied-linear-freqs"],
)
def test_llamacpp_and_transformers_agree_in_float32(tmp_path: Path, options: dict[str, Any]) -> None:
    # Measured: 1e-6 to 4e-6, the rounding of sums in another order. 1e-4 leaves room for other compilers and still
    # catches one wrong norm, rope or routing weight, which costs 1e-2 and more.
    model = write_tiny(tmp_path / "m.gguf", **FLOAT32, **options)
    assert relative_l2(llamacpp_logits(model.path, IDS), transformers_logits(model.config, model.weights, IDS)) < 1e-4


def test_fused_and_separate_experts_are_the_same_model(tmp_path: Path) -> None:
    # llama.cpp reads neither the fused layout nor dense layers in these architectures, so transformers is the oracle.
    options: dict[str, Any] = {"arch": "llama", "n_layers": 2, "dense_layers": (0,)}
    separate = write_tiny(tmp_path / "separate.gguf", **options)
    fused = write_tiny(tmp_path / "fused.gguf", **options, fused=True)
    assert fused.weights["blk.1.ffn_gate_up_exps.weight"].shape == (8, 512, 256)
    assert "blk.1.ffn_up_exps.weight" not in fused.weights and "blk.0.ffn_up.weight" in fused.weights
    found, expected = (transformers_logits(m.config, m.weights, IDS[:8]) for m in (fused, separate))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("arch", ["qwen3moe", "llama"])
def test_routes_are_diverse_and_logits_are_not_flat(tmp_path: Path, arch: str) -> None:
    model = write_tiny(tmp_path / "m.gguf", arch=arch)
    for layer in range(model.config.n_layers):
        share = np.bincount(routes(model, layer).ravel(), minlength=8) / (2 * model.config.n_vocab)
        assert share.min() > 0.02 and share.max() < 0.5
    logits = llamacpp_logits(model.path, IDS)
    assert np.isfinite(logits).all()
    assert 1.0 < logits.std(axis=1).mean() < 6.0
    assert len(set(logits.argmax(axis=1).tolist())) > 48


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole.gguf", expert_type=[T.Q4_K, T.Q5_0], down_type=T.Q6_K)
    split = write_tiny(
        tmp_path / "split.gguf", expert_type=[T.Q4_K, T.Q5_0], down_type=T.Q6_K, split=3, empty_first_shard=True
    )
    names = [f"split-{i}-of-00003.gguf" for i in ("00001", "00002", "00003")]
    assert [p.name for p in split.paths] == names
    first = gguf.GGUFReader(split.path)
    assert len(first.tensors) == 0
    assert first.fields["split.count"].contents() == 3
    np.testing.assert_array_equal(llamacpp_logits(split.path, IDS[:8]), llamacpp_logits(whole.path, IDS[:8]))


def test_alignment_and_order_of_tensors(tmp_path: Path) -> None:
    plain = write_tiny(tmp_path / "plain.gguf", n_layers=1)
    other = write_tiny(tmp_path / "other.gguf", n_layers=1, alignment=4096, shuffled=True)
    reader = gguf.GGUFReader(other.path)
    assert all(tensor.data_offset % 4096 == 0 for tensor in reader.tensors)
    assert [tensor.name for tensor in reader.tensors] != list(plain.stored)
    assert {tensor.name for tensor in reader.tensors} == set(plain.stored)
    for tensor in reader.tensors:
        assert tensor.data.tobytes() == plain.stored[tensor.name][0].tobytes()


@pytest.mark.parametrize("t", [T.Q4_K, T.Q6_K, T.Q8_0, T.F16, T.Q5_0, T.IQ4_NL, T.BF16])
def test_quantised_weights_are_near_the_originals(t: T) -> None:
    w = np.random.default_rng(0).standard_normal((2, 3, 256), dtype=np.float32)
    restored = gguf.quants.dequantize(quantize(w, t), t)
    assert restored.shape == w.shape
    assert 0 < relative_l2(restored, w) < (0.1 if t in (T.Q4_K, T.IQ4_NL, T.Q5_0) else 0.03)


def test_tokenizer_is_one_that_llamacpp_reads(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", n_layers=1)
    tokens, _, merges = vocabulary()
    assert model.config.n_vocab == len(tokens) == 400 and len(merges) == 141
    text = "<|im_start|>user\nthe river, 37 \u00e9\u4e2d\U0001f600<|im_end|>"
    (ids,) = llamacpp_tokenize(model.path, [text])
    assert ids[0] == tokens.index("<|im_start|>") and ids[-1] == tokens.index(EOS)
    assert tokens.index("\u0120river") in ids
    assert llamacpp_detokenize(model.path, ids) == text


def test_greedy_takes_the_likeliest_token_of_the_logits(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", **FLOAT32, n_layers=2)
    greedy = llamacpp_greedy(model.path, IDS[:16], 6)
    teacher = llamacpp_logits(model.path, [*IDS[:16], *greedy])
    assert greedy == teacher[15:-1].argmax(axis=1).tolist()
    ids, logprobs = llamacpp_logprobs(model.path, [*IDS[:16], *greedy])
    assert ids.shape == logprobs.shape == (22, 20)
    assert greedy == ids[15:-1, 0].tolist()


def test_top_logprobs_are_those_of_the_softmax() -> None:
    ids, logprobs = top_logprobs(np.array([[1.0, 3.0, 2.0]], np.float32), 2)
    assert ids.tolist() == [[1, 2]]
    total = np.exp([1.0, 3.0, 2.0]).sum()
    np.testing.assert_allclose(np.exp(logprobs[0]), np.exp([3.0, 2.0]) / total, rtol=1e-6)
