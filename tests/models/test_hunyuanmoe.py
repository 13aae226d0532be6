"""Hunyuan MoE: norms of queries and keys after their rotation, a shared expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_decoder as plain
from family_file import FamilyFile
from family_tests import RefusalTests
from parity import assert_transformers
from plain_decoder import BLOCKS_OF_256, Sizes
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


class TestHunyuanMoe(RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    GREEDY = FLOAT32["one head of keys"]

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return hunyuanmoe(**options)[0]

    def small(self) -> FamilyFile:
        return self.make(n_layers=2, n_expert=4, top_k=2)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = hunyuanmoe(n_ff_shared=32)  # there as wide as an expert
    model = file.write(tmp_path / "m.gguf")
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
    assert_transformers(model, "HunYuanMoEV1ForCausalLM", config, state)
