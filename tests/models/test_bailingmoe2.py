"""Ling 2.0: sigmoid scores, a bias for the choice alone, groups of experts, shared experts, dense layers first."""

from __future__ import annotations

from typing import Any

from family_file import FamilyFile
from family_tests import ContradictionTests, Options, RefusalTests, SkippedBlockTests
from tiny import T


def bailingmoe2(
    *,
    n_layers: int = 3,
    n_dense: int = 1,
    n_embd: int = 128,  # llama.cpp wants n_head × head_dim
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_rot: int = 16,
    n_expert: int = 12,
    top_k: int = 3,
    n_groups: int = 4,
    n_groups_used: int = 2,
    n_ff: int = 32,
    n_ff_dense: int = 96,
    n_shared: int = 1,
    n_ff_shared: int | None = None,
    normalised: bool = True,
    scale: float = 2.5,
    gating: int = 2,
    biased: bool = True,
    expert_type: T = T.F32,
    down_type: T | None = None,
    dense_type: T = T.F32,
    router_type: T = T.F32,
    mtp: bool = False,
    seed: int = 0,
) -> FamilyFile:
    """A file's tensors and metadata. `n_ff_shared` is the width of one shared expert, that of a routed one if left out.

    With `mtp`, one more block, which predicts the token after the next, and is counted by block_count.
    """
    file = FamilyFile("bailingmoe2", pre="bailingmoe2", seed=seed)
    file.metadata(
        {
            "block_count": n_layers + mtp,
            "leading_dense_block_count": n_dense,
            "embedding_length": n_embd,
            "feed_forward_length": n_ff_dense,
            "attention.head_count": n_head,
            "attention.head_count_kv": n_head_kv,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": n_rot,
            "rope.freq_base": 600000.0,
            "expert_count": n_expert,
            "expert_used_count": top_k,
            "expert_feed_forward_length": n_ff,
            "expert_shared_count": n_shared,
            "expert_weights_scale": scale,
            "expert_weights_norm": normalised,
            "expert_gating_func": gating,
            "expert_group_count": n_groups,
            "expert_group_used_count": n_groups_used,
            "nextn_predict_layers": int(mtp),
        }
    )
    if n_ff_shared is not None:
        file.metadata({"expert_shared_feed_forward_length": n_ff_shared})
    file.embeddings(dense_type, n_embd)
    for layer in range(n_layers + mtp):
        block = f"blk.{layer}."
        file.norm(f"{block}attn_norm", n_embd)
        file.norm(f"{block}ffn_norm", n_embd)
        file.matrix(f"{block}attn_qkv", dense_type, (n_head + 2 * n_head_kv) * head_dim, n_embd, gain=1.5)
        file.matrix(f"{block}attn_output", dense_type, n_embd, n_head * head_dim, gain=2.0)
        file.norm(f"{block}attn_q_norm", head_dim)
        file.norm(f"{block}attn_k_norm", head_dim)
        if layer < n_dense:
            file.matrix(f"{block}ffn_gate", dense_type, n_ff_dense, n_embd)
            file.matrix(f"{block}ffn_up", dense_type, n_ff_dense, n_embd)
            file.matrix(f"{block}ffn_down", dense_type, n_embd, n_ff_dense, gain=2.0)
            continue
        file.matrix(f"{block}ffn_gate_inp", router_type, n_expert, n_embd, gain=2.0)
        if biased:
            file.bias(f"{block}exp_probs_b", n_expert, scale=0.3)
        file.experts(block, expert_type, n_expert, n_ff, n_embd, down=down_type)
        width = n_shared * (n_ff_shared or n_ff)
        file.matrix(f"{block}ffn_gate_shexp", dense_type, width, n_embd)
        file.matrix(f"{block}ffn_up_shexp", dense_type, width, n_embd)
        file.matrix(f"{block}ffn_down_shexp", dense_type, n_embd, width, gain=2.0)
    if mtp:
        block = f"blk.{n_layers}."
        file.matrix(f"{block}nextn.eh_proj", dense_type, n_embd, 2 * n_embd)
        file.norm(f"{block}nextn.enorm", n_embd)
        file.norm(f"{block}nextn.hnorm", n_embd)
        file.norm(f"{block}layer_output_norm", n_embd)
    return file


BLOCKS_OF_256: dict[str, Any] = {"n_embd": 256, "n_ff": 256, "n_ff_dense": 512, "head_dim": 64, "n_rot": 32}
FLOAT32: dict[str, dict[str, Any]] = {
    "skipped block": {"mtp": True},
    "half of many groups": {"n_expert": 32, "n_groups": 8, "n_groups_used": 4, "top_k": 8, "n_shared": 2, "n_dense": 2},
    "no groups, no bias": {"n_groups": 1, "n_groups_used": 1, "biased": False, "n_dense": 0, "n_layers": 2},
    "one group": {"n_groups_used": 1, "normalised": False, "scale": 1.0, "n_ff_shared": 96, "n_rot": 32},
    "softmax": {"gating": 1, "n_groups": 2, "n_groups_used": 1, "n_head_kv": 1, "n_layers": 2},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.Q8_0, "router_type": T.BF16, "mtp": True},
    "F16": {"expert_type": T.F16, "dense_type": T.F16, "n_expert": 32, "n_groups": 8, "n_groups_used": 4},
}


# Keys that a file can do without: their defaults are this file's values, or any would do
OPTIONAL = {
    "vocab_size", "leading_dense_block_count", "attention.value_length", "rope.freq_base", "expert_feed_forward_length",
    "expert_weights_scale", "expert_weights_norm", "expert_group_count",
    "attention.key_length", "rope.dimension_count", "expert_shared_feed_forward_length",
}  # fmt: skip


CONTRADICTIONS: list[tuple[Options, str]] = [
    ({"expert_group_count": 5}, "expert_group_count is 5"),
    ({"expert_group_count": 12}, "expert_group_count is 12"),  # groups of one have no best two
    ({"expert_group_used_count": 5}, "expert_group_used_count is '5'"),
    ({"expert_group_used_count": 1, "expert_used_count": 4}, "fewer than 4 experts"),
    ({"expert_gating_func": 4}, "expert_gating_func is '4'"),
    ({"expert_weights_norm": 1}, "expert_weights_norm is '1'"),
    ({"leading_dense_block_count": 2}, "leading_dense_block_count is 2, but layer 1 has experts"),
    ({"expert_shared_count": 2}, "blk.1.ffn_gate_shexp.weight has the shape"),
    ({"attention.head_count_kv": [2, 2, 1]}, "attention.head_count_kv is 1 in some layers and 2 in others"),
    ({"attention.head_count_kv": [2, 2]}, "something of 2 layers, not of 3"),
    ({"attention.head_count_kv": [2, 2, 0]}, "holds '0', not only whole numbers from 1 to 4"),
]


class TestBailingMoe2(SkippedBlockTests, RefusalTests, ContradictionTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    CONTRADICTIONS = CONTRADICTIONS
    STREAMED = ("Q4_K", "MXFP4")
    GREEDY = FLOAT32["half of many groups"]
    AFRESH = "MXFP4"

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return bailingmoe2(**options)

    def small(self) -> FamilyFile:
        return bailingmoe2(n_layers=2, mtp=True, n_ff_shared=32)

    def weighed(self) -> FamilyFile:
        return bailingmoe2(n_layers=2, mtp=True)

    def may_lack(self, name: str) -> bool:
        return name == "blk.1.exp_probs_b.bias"
