"""Granite MoE: constants that scale embeddings, attention scores, what each layer adds, and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plain_decoder as plain
import pytest
from engine.harness import opened
from family_file import FamilyFile, FamilyModel
from oracles import transformers_causal
from parity import (
    N,
    assert_parity,
    assert_sessions_start_afresh,
    assert_streamed_is_resident,
    batch_parity,
    compare,
    greedy_pair,
    logits_parity,
    token_ids,
    weight_of_tensors,
)
from plain_decoder import BLOCKS_OF_256, Sizes
from refusals import assert_spoilt_metadata_is_refused, assert_spoilt_tensors_are_refused
from tiny import T


def granitemoe(*, scales: tuple[float, ...] = (0.9, 0.6, 0.15, 0.7), **options: Any) -> tuple[FamilyFile, Sizes]:
    """A file; `scales` of the embeddings, of what a layer adds, of attention's scores (0: none), and the divisor of
    the logits."""
    s = Sizes(**{"n_ff_shared": 64, **options})
    file = plain.begun("granitemoe", s, pre="refact")
    file.metadata({"feed_forward_length": s.n_ff, "expert_shared_feed_forward_length": s.n_ff_shared})
    names = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    file.metadata({name: scale for name, scale in zip(names, scales, strict=True) if scale})
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s)
        plain.add_ffn(file, layer, s)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {
    "all scales": {},
    "one scale, tied, nothing shared": {"scales": (0.0, 0.0, 0.0, 1.5), "tied": True, "n_ff_shared": 0, "n_head_kv": 3},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_ff_shared": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "n_layers": 4},
}  # fmt: skip
OPTIONAL = {"vocab_size", "rope.freq_base", "embedding_scale", "residual_scale", "attention.scale"}


def written(folder: Path, options: dict[str, Any]) -> FamilyModel:
    """The file of `options`, in two shards."""
    return granitemoe(**options)[0].write(folder / "m.gguf", split=2)


def small() -> FamilyFile:
    return granitemoe(n_layers=2, n_expert=4, top_k=2)[0]


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, FLOAT32[name])
    assert_parity([*logits_parity(model, float32=True), batch_parity(model, float32=True)], float32=True)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, QUANTISED[name])
    assert_parity([*logits_parity(model, float32=False), batch_parity(model, float32=False)], float32=False)


def test_greedy_tokens_are_those_of_llamacpp(tmp_path: Path) -> None:
    ours, theirs = greedy_pair(written(tmp_path, FLOAT32["all scales"]))
    assert ours == theirs and len(set(ours)) > 8


@pytest.mark.parametrize("name", QUANTISED)
def test_streamed_bits_are_the_resident_ones(tmp_path: Path, name: str) -> None:
    assert_streamed_is_resident(written(tmp_path, QUANTISED[name]))


def test_nothing_of_a_request_is_left_for_the_next(tmp_path: Path) -> None:
    assert_sessions_start_afresh(written(tmp_path, QUANTISED["Q8_0"]))


def test_every_tensor_matters(tmp_path: Path) -> None:
    changes = weight_of_tensors(small(), tmp_path)
    assert all(change > 0.02 for change in changes.values()), changes


def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(tmp_path: Path) -> None:
    assert_spoilt_tensors_are_refused(small, tmp_path, may_lack=lambda it: it == "output.weight")


def test_metadata_that_is_missing_or_disagrees_with_the_tensors_is_refused(tmp_path: Path) -> None:
    assert_spoilt_metadata_is_refused(small, tmp_path, optional=OPTIONAL)


def halves(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of queries or keys as transformers has them: the halves of a head rotate against each other, not pairs."""
    return w.reshape(-1, head_dim // 2, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = granitemoe()
    model, ids = file.write(tmp_path / "m.gguf"), token_ids(N)
    weights = dict(model.weights)
    names = {
        "ffn_gate_inp.weight": "block_sparse_moe.router.weight",
        "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
        "shared_in": "shared_mlp.input_linear.weight",
        "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
    }
    for layer in range(s.n_layers):
        block = f"blk.{layer}."
        for part in "qk":
            weights[f"{block}attn_{part}.weight"] = halves(weights[f"{block}attn_{part}.weight"], s.head_dim)
        parts = [weights.pop(f"{block}ffn_{part}_shexp.weight") for part in ("gate", "up")]
        weights[f"{block}shared_in"] = np.concatenate(parts)
    state = plain.transformers_state(weights, s.n_layers, names)
    state = {name.replace("mlp.experts", "block_sparse_moe.experts"): w for name, w in state.items()}
    config = plain.transformers_config(file, s) | {
        "intermediate_size": s.n_ff,
        "shared_intermediate_size": s.n_ff_shared,
        "num_local_experts": s.n_expert,
        "embedding_multiplier": file.keys["embedding_scale"],
        "residual_multiplier": file.keys["residual_scale"],
        "attention_multiplier": file.keys["attention.scale"],
        "logits_scaling": file.keys["logit_scale"],
    }
    expected = transformers_causal("GraniteMoeSharedForCausalLM", config, state, ids)
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1) as engine:
        assert compare("Sluice", engine.logits(ids), expected).relative_l2 <= 1e-4
