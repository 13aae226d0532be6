"""MiniMax-M2: norms over all heads of queries together, and of keys; a bias that moves the choice of experts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_decoder as plain
from family_file import FamilyFile
from family_tests import RefusalTests
from parity import assert_transformers
from plain_decoder import BLOCKS_OF_256, Sizes
from tiny import T


def minimax_m2(**options: Any) -> tuple[FamilyFile, Sizes]:
    s = Sizes(**{"n_embd": 64, "n_rot": 16, **options})
    file = plain.begun("minimax-m2", s, pre="minimax-m2")
    file.metadata(
        {
            "feed_forward_length": s.n_ff,
            "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim,
            "rope.dimension_count": s.n_rot,
            "expert_feed_forward_length": s.n_ff,
            "expert_gating_func": 2,
        }
    )
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s, norms="width")
        plain.add_ffn(file, layer, s, selection_bias=True)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {"one head of keys": {}, "three heads of keys": {"n_head_kv": 3, "n_layers": 2}}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_rot": 32,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "n_layers": 4},
}  # fmt: skip
OPTIONAL = {
    "vocab_size", "rope.freq_base", "rope.dimension_count", "attention.value_length", "feed_forward_length",
    "expert_feed_forward_length",
}  # fmt: skip


class TestMiniMaxM2(RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    GREEDY = FLOAT32["one head of keys"]

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return minimax_m2(**options)[0]

    def small(self) -> FamilyFile:
        return self.make(n_layers=2, n_expert=4, top_k=2)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = minimax_m2()
    model = file.write(tmp_path / "m.gguf")
    config = plain.transformers_config(file, s) | {
        "intermediate_size": s.n_ff, "head_dim": s.head_dim, "num_local_experts": s.n_expert
    }  # fmt: skip
    state = plain.transformers_state(model.weights, s.n_layers, {"exp_probs_b.bias": "mlp.e_score_correction_bias"})
    assert_transformers(model, "MiniMaxM2ForCausalLM", config, state)
