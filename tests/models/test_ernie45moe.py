"""ERNIE 4.5: dense layers first and between, a bias that moves the choice of experts alone, shared experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_decoder as plain
from family_file import FamilyFile
from family_tests import RefusalTests
from parity import assert_transformers
from plain_decoder import BLOCKS_OF_256, Sizes
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


class TestErnie45Moe(RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    GREEDY = FLOAT32["one dense layer"]

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return ernie45moe(**options)[0]

    def small(self) -> FamilyFile:
        return self.make(n_layers=2, n_expert=4, top_k=2)

    def may_lack(self, name: str) -> bool:
        return name == "output.weight" or "exp_probs_b" in name


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = ernie45moe(n_layers=4, step=2)  # llama.cpp loads no dense layer between those with experts
    model = file.write(tmp_path / "m.gguf")
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
    assert_transformers(model, "Ernie4_5_MoeForCausalLM", config, state)
