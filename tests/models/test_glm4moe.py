"""GLM-4.5: dense layers first, a bias that moves the choice of experts alone, shared experts, a block to be skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_decoder as plain
from family_file import FamilyFile
from family_tests import RefusalTests, SkippedBlockTests
from parity import assert_transformers
from plain_decoder import BLOCKS_OF_256, Sizes
from tiny import T


def glm4moe(
    *,
    norms: bool = True,
    biases: bool = True,
    mtp: bool = False,
    n_shared: int = 2,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[FamilyFile, Sizes]:
    """A file; `more` are keys to add or to replace. With `mtp`, one more block, for the token after the next."""
    s = Sizes(**{"n_embd": 64, "n_rot": 16, "n_dense": 1, "n_more": int(mtp), "eps": 1e-5, **options})
    s = replace(s, n_ff_shared=n_shared * s.n_ff)
    file = plain.begun("glm4moe", s, pre="glm4")
    file.metadata(
        {
            "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim,
            "rope.dimension_count": s.n_rot,
            "expert_feed_forward_length": s.n_ff,
            "expert_shared_count": n_shared,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "leading_dense_block_count": s.n_dense,
            **({"nextn_predict_layers": 1} if mtp else {}),
            **(more or {}),
        }
    )
    for layer in range(s.n_blocks):
        block = f"blk.{layer}."
        plain.add_attention(file, block, s, norms="head" if norms else None, biases=biases)
        plain.add_ffn(file, layer, s, norm="post_attention_norm", selection_bias=True)
        if layer >= s.n_layers:
            plain.add_next_token_parts(file, block, s)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {
    "skipped block": {"mtp": True},
    "no norms, tied": {"norms": False, "tied": True, "n_head_kv": 3, "n_shared": 1},
    "no biases, two dense, sections of a picture's positions": {
        "biases": False, "n_dense": 2, "n_layers": 4, "more": {"rope.dimension_sections": [3, 3, 2, 0]}
    },
    "scores as they are": {"more": {"expert_weights_norm": False, "expert_weights_scale": 1.0}, "n_shared": 1},
}  # fmt: skip
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_rot": 32,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16, "mtp": True},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "n_layers": 4},
}  # fmt: skip
OPTIONAL = {
    "vocab_size", "rope.freq_base", "rope.dimension_count", "attention.value_length", "expert_feed_forward_length",
    "expert_gating_func", "expert_weights_norm", "expert_weights_scale", "expert_group_count",
    "expert_group_used_count", "leading_dense_block_count",
}  # fmt: skip


class TestGlm4Moe(SkippedBlockTests, RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    GREEDY = FLOAT32["skipped block"]

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return glm4moe(**options)[0]

    def small(self) -> FamilyFile:
        return self.make(n_layers=2, n_expert=4, top_k=2, mtp=True, seed=1)

    def may_lack(self, name: str) -> bool:
        return name == "output.weight" or (
            "attn_" in name and name.endswith((".bias", "q_norm.weight", "k_norm.weight"))
        )


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = glm4moe(n_layers=3, n_dense=1)
    model = file.write(tmp_path / "m.gguf")
    names = {f"ffn_{part}_shexp.weight": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}
    names["exp_probs_b.bias"] = "mlp.gate.e_score_correction_bias"
    config = plain.transformers_config(file, s) | {
        "head_dim": s.head_dim,
        "n_routed_experts": s.n_expert,
        "n_shared_experts": 2,
        "moe_intermediate_size": s.n_ff,
        "routed_scaling_factor": file.keys["expert_weights_scale"],
        "first_k_dense_replace": s.n_dense,
        "attention_bias": True,
        "use_qk_norm": True,
    }
    state = plain.transformers_state(model.weights, s.n_layers, names)
    assert_transformers(model, "Glm4MoeForCausalLM", config, state)
