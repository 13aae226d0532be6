"""LFM2 MoE: short convolutions beside attention, dense layers first, a bias that moves the choice of experts alone."""

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
    long_parity,
    token_ids,
    weight_of_tensors,
)
from plain_decoder import BLOCKS_OF_256, Sizes
from refusals import assert_spoilt_metadata_is_refused, assert_spoilt_tensors_are_refused
from tiny import T


def lfm2moe(*, convolves: str = "CCAC", kernel: int = 3, **options: Any) -> tuple[FamilyFile, Sizes]:
    """A file with a layer for each letter of `convolves`: a C convolves, an A attends."""
    s = Sizes(**{"n_layers": len(convolves), "n_dense": 1, "eps": 1e-5, "tied": True, **options})
    file = plain.begun("lfm2moe", s, pre="lfm2")
    file.stored["token_embd_norm.weight"] = file.stored.pop("output_norm.weight")
    file.metadata(
        {
            "attention.head_count_kv": [s.n_head_kv * (kind == "A") for kind in convolves],
            "shortconv.l_cache": kernel,
            "expert_feed_forward_length": s.n_ff,
            "expert_gating_func": 2,
            "leading_dense_block_count": s.n_dense,
        }
    )
    for layer, kind in enumerate(convolves):
        block = f"blk.{layer}."
        if kind == "A":
            plain.add_attention(file, block, s, norms="head")
        else:
            file.norm(f"{block}attn_norm", s.n_embd)
            file.matrix(f"{block}shortconv.in_proj", s.dense_type, 3 * s.n_embd, s.n_embd)
            # [channels, taps]: each tap counts, the newest no more than the others
            file.vector(f"{block}shortconv.conv.weight", 0.7 * file.rng.standard_normal((s.n_embd, kernel)))
            file.matrix(f"{block}shortconv.out_proj", s.dense_type, s.n_embd, s.n_embd)
        plain.add_ffn(file, layer, s, selection_bias=True)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {
    "one layer attends": {},
    "experts in every layer, a head of its own": {"n_dense": 0, "tied": False, "convolves": "AC"},
    "kernel of 4, attention last": {"kernel": 4, "convolves": "CACCA", "n_dense": 2, "n_head_kv": 3},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "convolves": "CCACA"},
}  # fmt: skip
OPTIONAL = {
    "vocab_size", "rope.freq_base", "expert_feed_forward_length", "leading_dense_block_count"
}  # fmt: skip


def written(folder: Path, options: dict[str, Any]) -> FamilyModel:
    """The file of `options`, in two shards."""
    return lfm2moe(**options)[0].write(folder / "m.gguf", split=2)


def small() -> FamilyFile:
    return lfm2moe(convolves="CA", n_expert=4, top_k=2, tied=False)[0]


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, FLOAT32[name])
    assert_parity([*logits_parity(model, float32=True), batch_parity(model, float32=True)], float32=True)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_agrees_with_llamacpp(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, QUANTISED[name])
    assert_parity([*logits_parity(model, float32=False), batch_parity(model, float32=False)], float32=False)


def test_long_context_agrees_with_llamacpp(tmp_path: Path) -> None:
    assert_parity([long_parity(written(tmp_path, {"convolves": "CA"}))], float32=True)


def test_greedy_tokens_are_those_of_llamacpp(tmp_path: Path) -> None:
    ours, theirs = greedy_pair(written(tmp_path, FLOAT32["one layer attends"]))
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
    file, s = lfm2moe()
    model, ids = file.write(tmp_path / "m.gguf"), token_ids(N)
    there = {"gate": "w1", "up": "w3", "down": "w2"}
    names = {
        "attn_norm.weight": "operator_norm.weight",
        "attn_output.weight": "self_attn.out_proj.weight",
        **{f"attn_{part}_norm.weight": f"self_attn.{part}_layernorm.weight" for part in "qk"},
        **{f"shortconv.{part}.weight": f"conv.{part}.weight" for part in ("conv", "in_proj", "out_proj")},
        "ffn_norm.weight": "ffn_norm.weight",
        **{f"ffn_{part}.weight": f"feed_forward.{name}.weight" for part, name in there.items()},
        "exp_probs_b.bias": "mlp.expert_bias",
    }
    weights = {name: w[:, None] if name.endswith("conv.weight") else w for name, w in model.weights.items()}
    weights["output_norm.weight"] = weights.pop("token_embd_norm.weight")
    state = plain.transformers_state(weights, s.n_layers, names)
    state["model.embedding_norm.weight"] = state.pop("model.norm.weight")
    state = {name.replace(".mlp.", ".feed_forward."): w for name, w in state.items()}
    kinds = ["full_attention" if n else "conv" for n in file.keys["attention.head_count_kv"]]
    config = plain.transformers_config(file, s) | {
        "layer_types": kinds,
        "norm_eps": s.eps,
        "conv_L_cache": file.keys["shortconv.l_cache"],
        "num_experts": s.n_expert,
        "num_dense_layers": s.n_dense,
        "moe_intermediate_size": s.n_ff,
    }
    expected = transformers_causal("Lfm2MoeForCausalLM", config, state, ids)
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1) as engine:
        assert compare("Sluice", engine.logits(ids), expected).relative_l2 <= 1e-4
