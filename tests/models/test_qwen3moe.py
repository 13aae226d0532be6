"""Qwen3 MoE: norms of each head of queries and keys, weights normalised over the chosen.

More of it (yarn, tied embeddings, dense layers, mixed types, budgets) is in tests/engine, whose model it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_decoder as plain
import pytest
from engine.harness import opened
from family_file import FamilyFile, FamilyModel
from oracles import transformers_causal
from parity import N, assert_parity, batch_parity, compare, greedy_pair, logits_parity, token_ids, weight_of_tensors
from plain_decoder import BLOCKS_OF_256, Sizes
from refusals import assert_spoilt_metadata_is_refused, assert_spoilt_tensors_are_refused
from tiny import T


def qwen3moe(**options: Any) -> tuple[FamilyFile, Sizes]:
    s = Sizes(**options)
    file = plain.begun("qwen3moe", s, pre="qwen2")
    file.metadata({"attention.key_length": s.head_dim, "attention.value_length": s.head_dim})
    file.metadata({"expert_feed_forward_length": s.n_ff})
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s, norms="head")
        plain.add_ffn(file, layer, s)
    return file, s


QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.Q8_0, "router_type": T.BF16},
}


def written(folder: Path, options: dict[str, Any]) -> FamilyModel:
    """The file of `options`, in two shards."""
    return qwen3moe(**options)[0].write(folder / "m.gguf", split=2)


def small() -> FamilyFile:
    return qwen3moe(n_layers=2, n_expert=4, top_k=2)[0]


def test_float32_agrees_with_llamacpp(tmp_path: Path) -> None:
    model = written(tmp_path, {})
    assert_parity([*logits_parity(model, float32=True), batch_parity(model, float32=True)], float32=True)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, QUANTISED[name])
    assert_parity([*logits_parity(model, float32=False), batch_parity(model, float32=False)], float32=False)


def test_greedy_tokens_are_those_of_llamacpp(tmp_path: Path) -> None:
    ours, theirs = greedy_pair(written(tmp_path, {}))
    assert ours == theirs and len(set(ours)) > 8


def test_every_tensor_matters(tmp_path: Path) -> None:
    changes = weight_of_tensors(small(), tmp_path)
    assert all(change > 0.02 for change in changes.values()), changes


def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(tmp_path: Path) -> None:
    assert_spoilt_tensors_are_refused(small, tmp_path, may_lack=lambda it: it == "output.weight")


def test_metadata_that_is_missing_or_disagrees_with_the_tensors_is_refused(tmp_path: Path) -> None:
    optional = {"vocab_size", "rope.freq_base", "feed_forward_length", "expert_feed_forward_length"}
    optional |= {"attention.key_length", "attention.value_length"}
    assert_spoilt_metadata_is_refused(small, tmp_path, optional=optional)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = qwen3moe()
    model, ids = file.write(tmp_path / "m.gguf"), token_ids(N)
    config = plain.transformers_config(file, s) | {
        "head_dim": s.head_dim, "num_experts": s.n_expert, "moe_intermediate_size": s.n_ff, "norm_topk_prob": True
    }  # fmt: skip
    state = plain.transformers_state(model.weights, s.n_layers)
    expected = transformers_causal("Qwen3MoeForCausalLM", config, state, ids)
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1) as engine:
        assert compare("Sluice", engine.logits(ids), expected).relative_l2 <= 1e-4
