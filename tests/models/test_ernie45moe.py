"""ERNIE 4.5: dense layers first and between, a bias that moves the choice of experts alone, shared experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

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


def ernie45moe(*, step: int = 1, bias: bool = True, **options: Any) -> tuple[FamilyFile, Sizes]:
    """A file whose layers have experts from the `n_dense`th on, each `step`th of them."""
    s = Sizes(**{"n_dense": 1, "n_ff_shared": 64, "eps": 1e-5, **options})
    file = plain.begun("ernie4_5-moe", s, pre="default")
    file.metadata(
        {
            "expert_feed_forward_length": s.n_ff,
            "expert_shared_feed_forward_length": s.n_ff_shared,
            "interleave_moe_layer_step": step,
            "leading_dense_block_count": s.n_dense,
        }
    )
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s)
        between = (layer + 1) % step != 0
        plain.add_ffn(file, layer, replace(s, n_dense=layer + 1) if between else s, selection_bias=bias)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {
    "one dense layer": {},
    "no bias, tied, nothing shared": {"bias": False, "tied": True, "n_ff_shared": 0, "n_head_kv": 3},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_ff_shared": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "n_layers": 4},
}  # fmt: skip
OPTIONAL = {"vocab_size", "rope.freq_base", "expert_feed_forward_length"}


def written(folder: Path, options: dict[str, Any]) -> FamilyModel:
    """The file of `options`, in two shards."""
    return ernie45moe(**options)[0].write(folder / "m.gguf", split=2)


def small() -> FamilyFile:
    return ernie45moe(n_layers=2, n_expert=4, top_k=2)[0]


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, FLOAT32[name])
    assert_parity([*logits_parity(model, float32=True), batch_parity(model, float32=True)], float32=True)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, QUANTISED[name])
    assert_parity([*logits_parity(model, float32=False), batch_parity(model, float32=False)], float32=False)


def test_greedy_tokens_are_those_of_llamacpp(tmp_path: Path) -> None:
    ours, theirs = greedy_pair(written(tmp_path, FLOAT32["one dense layer"]))
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
    assert_spoilt_tensors_are_refused(small, tmp_path, may_lack=lambda it: it == "output.weight" or "exp_probs_b" in it)


def test_metadata_that_is_missing_or_disagrees_with_the_tensors_is_refused(tmp_path: Path) -> None:
    assert_spoilt_metadata_is_refused(small, tmp_path, optional=OPTIONAL)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = ernie45moe(n_layers=4, step=2)  # llama.cpp loads no dense layer between those with experts
    model, ids = file.write(tmp_path / "m.gguf"), token_ids(N)
    names = {f"ffn_{part}_shexp.weight": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}
    names["exp_probs_b.bias"] = "mlp.gate.moe_statics.e_score_correction_bias"
    weights = {name: w[None] if name.endswith("exp_probs_b.bias") else w for name, w in model.weights.items()}
    config = plain.transformers_config(file, s) | {
        "moe_num_experts": s.n_expert,
        "moe_k": s.top_k,
        "moe_intermediate_size": s.n_ff,
        "moe_num_shared_experts": s.n_ff_shared // s.n_ff,
        "moe_layer_start_index": s.n_dense,
        "moe_layer_interval": 2,
    }
    state = plain.transformers_state(weights, s.n_layers, names)
    expected = transformers_causal("Ernie4_5_MoeForCausalLM", config, state, ids)
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1) as engine:
        assert compare("Sluice", engine.logits(ids), expected).relative_l2 <= 1e-4
