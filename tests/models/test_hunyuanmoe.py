"""Hunyuan MoE: norms of queries and keys after their rotation, a shared expert."""

from __future__ import annotations

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


def hunyuanmoe(**options: Any) -> tuple[FamilyFile, Sizes]:
    s = Sizes(**{"n_embd": 192, "n_ff_shared": 96, "eps": 1e-5, **options})
    file = plain.begun("hunyuan-moe", s, pre="hunyuan")
    file.metadata(
        {
            "feed_forward_length": s.n_ff,
            "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim,
            "expert_feed_forward_length": s.n_ff,
            "expert_shared_feed_forward_length": s.n_ff_shared,
        }
    )
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s, norms="head")
        plain.add_ffn(file, layer, s)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {"one head of keys": {}, "tied, three heads": {"n_head_kv": 3, "tied": True}}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_ff_shared": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "n_layers": 4},
}  # fmt: skip
OPTIONAL = {
    "vocab_size", "rope.freq_base", "attention.value_length", "feed_forward_length", "expert_feed_forward_length"
}  # fmt: skip


def written(folder: Path, options: dict[str, Any]) -> FamilyModel:
    """The file of `options`, in two shards."""
    return hunyuanmoe(**options)[0].write(folder / "m.gguf", split=2)


def small() -> FamilyFile:
    return hunyuanmoe(n_layers=2, n_expert=4, top_k=2)[0]


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, FLOAT32[name])
    assert_parity([*logits_parity(model, float32=True), batch_parity(model, float32=True)], float32=True)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, QUANTISED[name])
    assert_parity([*logits_parity(model, float32=False), batch_parity(model, float32=False)], float32=False)


def test_greedy_tokens_are_those_of_llamacpp(tmp_path: Path) -> None:
    ours, theirs = greedy_pair(written(tmp_path, FLOAT32["one head of keys"]))
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


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = hunyuanmoe(n_ff_shared=32)  # there as wide as an expert
    model, ids = file.write(tmp_path / "m.gguf"), token_ids(N)
    names = {f"ffn_{part}_shexp.weight": f"mlp.shared_mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    names |= {
        "ffn_gate_inp.weight": "mlp.gate.wg.weight",
        "attn_q_norm.weight": "self_attn.query_layernorm.weight",
        "attn_k_norm.weight": "self_attn.key_layernorm.weight",
    }
    config = plain.transformers_config(file, s)
    del config["num_experts_per_tok"]
    config |= {
        "intermediate_size": s.n_ff, "head_dim": s.head_dim, "num_experts": s.n_expert, "moe_topk": s.top_k
    }  # fmt: skip
    state = plain.transformers_state(model.weights, s.n_layers, names)
    expected = transformers_causal("HunYuanMoEV1ForCausalLM", config, state, ids)
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1) as engine:
        assert compare("Sluice", engine.logits(ids), expected).relative_l2 <= 1e-4
