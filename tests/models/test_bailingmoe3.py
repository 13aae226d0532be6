"""Ling 3.0: Kimi's delta rule beside gated latent attention, and Ling 2.0's routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from family_file import FamilyFile
from family_tests import ContradictionTests, LongContextTests, Options, RefusalTests, SkippedBlockTests
from parity import assert_transformers
from tiny import T

EPS = 1e-6
ROPE_BASE = 600000.0


def bailingmoe3(
    *,
    n_layers: int = 3,
    attending: tuple[int, ...] = (1,),
    n_dense: int = 1,
    n_embd: int = 64,
    n_head: int = 3,
    rank: int = 32,
    n_nope: int = 32,
    n_rope: int = 16,
    n_v: int = 32,
    delta_dim: int = 32,
    conv_kernel: int = 4,
    lowest: float = -5.0,
    n_expert: int = 12,
    top_k: int = 3,
    n_groups: int = 4,
    n_groups_used: int = 2,
    n_ff: int = 32,
    n_ff_dense: int = 96,
    n_ff_shared: int = 64,
    scale: float = 2.5,
    expert_type: T = T.F32,
    down_type: T | None = None,
    dense_type: T = T.F32,
    router_type: T = T.F32,
    tied: bool = False,
    mtp: bool = False,
    seed: int = 0,
) -> FamilyFile:
    """A file's tensors and metadata. Layers of `attending` have latent attention, the others the delta rule.

    With `mtp`, one more block, which predicts the token after the next, and is counted by block_count.
    """
    file = FamilyFile("bailingmoe3", pre="bailingmoe2", seed=seed)
    file.metadata(
        {
            "block_count": n_layers + mtp,
            "leading_dense_block_count": n_dense,
            "embedding_length": n_embd,
            "feed_forward_length": n_ff_dense,
            "attention.head_count": n_head,
            "attention.head_count_kv": [int(i in attending) for i in range(n_layers)] + [1] * mtp,
            "attention.key_length": rank + n_rope,
            "attention.value_length": delta_dim,
            "attention.key_length_mla": n_nope + n_rope,
            "attention.value_length_mla": n_v,
            "attention.kv_lora_rank": rank,
            "attention.layer_norm_rms_epsilon": EPS,
            "rope.dimension_count": n_rope,
            "rope.freq_base": ROPE_BASE,
            "ssm.conv_kernel": conv_kernel,
            "kda.head_dim": delta_dim,
            "kda.safe_gate": True,
            "kda.gate_lower_bound": lowest,
            "expert_count": n_expert,
            "expert_used_count": top_k,
            "expert_feed_forward_length": n_ff,
            "expert_shared_feed_forward_length": n_ff_shared,
            "expert_shared_count": 1,
            "expert_weights_scale": scale,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": n_groups,
            "expert_group_used_count": n_groups_used,
        }
    )
    if mtp:
        file.metadata({"nextn_predict_layers": 1})
    file.embeddings(dense_type, n_embd, tied=tied)
    inner = n_head * delta_dim
    for layer in range(n_layers + mtp):
        block = f"blk.{layer}."
        file.norm(f"{block}attn_norm", n_embd)
        file.norm(f"{block}ffn_norm", n_embd)
        if layer in attending or layer == n_layers:
            file.matrix(f"{block}attn_q", dense_type, n_head * (n_nope + n_rope), n_embd, gain=2.0)
            file.matrix(f"{block}attn_kv_a_mqa", dense_type, rank + n_rope, n_embd)
            file.norm(f"{block}attn_kv_a_norm", rank)
            # applied to queries, so the other way round: [heads, rank, n_nope]
            file.matrix(f"{block}attn_k_b", dense_type, n_head, rank, n_nope)
            file.matrix(f"{block}attn_v_b", dense_type, n_head, n_v, rank)
            file.matrix(f"{block}attn_gate", dense_type, n_head, n_embd)
            file.matrix(f"{block}attn_output", dense_type, n_embd, n_head * n_v, gain=2.0)
        else:
            for part in "qkv":
                file.matrix(f"{block}attn_{part}", dense_type, inner, n_embd)
                # [channels, taps]: each tap counts, the newest no more than the others
                kernel = 0.7 * file.rng.standard_normal((1, inner, 1, conv_kernel))
                file.vector(f"{block}ssm_conv1d_{part}.weight", kernel)
            file.matrix(f"{block}ssm_f_a", dense_type, inner, n_embd)
            # a step's decay is exp(lowest sigmoid(ssm_a (f + dt))): memories of one token, and of a hundred
            file.vector(f"{block}ssm_dt.bias", file.rng.uniform(-4.0, 0.0, inner))
            file.vector(f"{block}ssm_a", file.rng.uniform(0.5, 2.0, (n_head, 1)))
            file.matrix(f"{block}ssm_beta", dense_type, n_head, n_embd)
            file.matrix(f"{block}ssm_g_a", dense_type, inner, n_embd)
            file.norm(f"{block}ssm_norm", delta_dim)
            file.matrix(f"{block}attn_output", dense_type, n_embd, inner, gain=2.0)
        if layer < n_dense:
            file.matrix(f"{block}ffn_gate", dense_type, n_ff_dense, n_embd)
            file.matrix(f"{block}ffn_up", dense_type, n_ff_dense, n_embd)
            file.matrix(f"{block}ffn_down", dense_type, n_embd, n_ff_dense, gain=2.0)
            continue
        file.matrix(f"{block}ffn_gate_inp", router_type, n_expert, n_embd, gain=2.0)
        file.bias(f"{block}exp_probs_b", n_expert)
        file.experts(block, expert_type, n_expert, n_ff, n_embd, down=down_type)
        file.matrix(f"{block}ffn_gate_shexp", dense_type, n_ff_shared, n_embd)
        file.matrix(f"{block}ffn_up_shexp", dense_type, n_ff_shared, n_embd)
        file.matrix(f"{block}ffn_down_shexp", dense_type, n_embd, n_ff_shared, gain=2.0)
    if mtp:
        block = f"blk.{n_layers}."
        file.matrix(f"{block}nextn.eh_proj", dense_type, n_embd, 2 * n_embd)
        for name in ("nextn.enorm", "nextn.hnorm", "layer_output_norm"):
            file.norm(block + name, n_embd)
    return file


BLOCKS_OF_256: dict[str, Any] = {"n_embd": 256, "n_ff": 256, "n_ff_dense": 512, "n_ff_shared": 256, "n_nope": 64}
FLOAT32: dict[str, dict[str, Any]] = {
    "skipped block": {"mtp": True},
    "tied, no dense layer": {"tied": True, "n_dense": 0, "attending": (2,), "lowest": -3.0},
    "no groups": {"n_groups": 1, "n_groups_used": 1, "n_dense": 2, "attending": (0, 2), "n_head": 4, "rank": 64},
    "kernel of 3": {"conv_kernel": 3, "delta_dim": 128, "n_layers": 2, "attending": (1,), "n_v": 64, "n_head": 2},
    "half of many groups": {
        "n_layers": 2,
        "n_expert": 32,
        "n_groups": 8,
        "n_groups_used": 4,
        "top_k": 8,
        "delta_dim": 64,
    },
}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0, "n_head": 4},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.Q8_0, "router_type": T.BF16, "mtp": True},
    "F16": {"expert_type": T.F16, "dense_type": T.F16, "tied": True, "attending": (2,), "n_head": 4},
}


# Keys that a file can do without: their defaults are this file's values, or any would do
OPTIONAL = {
    "vocab_size", "leading_dense_block_count", "attention.value_length", "rope.freq_base", "expert_feed_forward_length",
    "expert_weights_scale", "expert_weights_norm", "expert_group_count",
}  # fmt: skip


CONTRADICTIONS: list[tuple[Options, str]] = [
    ({"kda.safe_gate": False}, "kda.safe_gate is not true"),
    ({"kda.gate_lower_bound": 0.5}, "kda.gate_lower_bound is 0.5, not negative"),
    ({"kda.head_dim": 16}, "blk.0.attn_q.weight has the shape"),
    ({"attention.key_length_mla": 16}, "attention.key_length_mla is 16"),
    ({"attention.kv_lora_rank": 64}, "attention.key_length is 48"),
    ({"attention.head_count_kv": [0, 0, 0]}, "attention.head_count_kv is 0"),
    ({"attention.head_count_kv": [1, 1, 0]}, "blk.0.attn_kv_a_mqa.weight is missing"),
]


class TestBailingMoe3(LongContextTests, SkippedBlockTests, RefusalTests, ContradictionTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    CONTRADICTIONS = CONTRADICTIONS
    STREAMED = ("Q4_K", "MXFP4")
    GREEDY = FLOAT32["skipped block"]
    AFRESH = "MXFP4"
    LONG: ClassVar[Options] = {"n_layers": 2, "attending": (1,)}

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return bailingmoe3(**options)

    def small(self) -> FamilyFile:
        return bailingmoe3(n_layers=2, mtp=True)

    def weighed(self) -> FamilyFile:
        return bailingmoe3(n_layers=2, attending=(1,), mtp=True)


# --- transformers


def transformers_state(file: FamilyFile, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights by transformers' names, which has the matrices of keys and values in one, and kernels too."""
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    for layer in range(file.keys["block_count"]):
        w = {name.removeprefix(f"blk.{layer}."): values for name, values in weights.items()}
        there = {
            "input_layernorm.weight": w["attn_norm.weight"],
            "post_attention_layernorm.weight": w["ffn_norm.weight"],
            "self_attn.q_proj.weight": w["attn_q.weight"],
            "self_attn.o_proj.weight": w["attn_output.weight"],
        }
        if "ssm_a" in w:
            kernels = [w[f"ssm_conv1d_{part}.weight"].squeeze(0) for part in "qkv"]  # [channels, 1, taps]
            there |= {
                "self_attn.k_proj.weight": w["attn_k.weight"],
                "self_attn.v_proj.weight": w["attn_v.weight"],
                "self_attn.conv1d.weight": np.concatenate(kernels),
                "self_attn.forget_gate.A_log": np.log(w["ssm_a"][:, 0]),
                "self_attn.forget_gate.dt_bias": w["ssm_dt.bias"],
                "self_attn.forget_gate.f_proj.weight": w["ssm_f_a.weight"],
                "self_attn.b_proj.weight": w["ssm_beta.weight"],
                "self_attn.o_norm.weight": w["ssm_norm.weight"],
                "self_attn.g_proj.weight": w["ssm_g_a.weight"],
            }
        else:
            of_heads = [w["attn_k_b.weight"].swapaxes(1, 2), w["attn_v_b.weight"]]  # [heads, n_nope or n_v, rank]
            both = np.concatenate(of_heads, axis=1)
            there |= {
                "self_attn.kv_a_proj_with_mqa.weight": w["attn_kv_a_mqa.weight"],
                "self_attn.kv_a_layernorm.weight": w["attn_kv_a_norm.weight"],
                "self_attn.kv_b_proj.weight": both.reshape(-1, both.shape[-1]),
                "self_attn.g_proj.weight": w["attn_gate.weight"],
            }
        parts = ("gate", "up", "down")
        if "ffn_gate_inp.weight" in w:
            both = np.concatenate([w["ffn_gate_exps.weight"], w["ffn_up_exps.weight"]], axis=1)
            there |= {
                "mlp.gate.weight": w["ffn_gate_inp.weight"],
                "mlp.gate.e_score_correction_bias": w["exp_probs_b.bias"],
                "mlp.experts.gate_up_proj": both,
                "mlp.experts.down_proj": w["ffn_down_exps.weight"],
                **{f"mlp.shared_experts.{part}_proj.weight": w[f"ffn_{part}_shexp.weight"] for part in parts},
            }
        else:
            there |= {f"mlp.{part}_proj.weight": w[f"ffn_{part}.weight"] for part in parts}
        state |= {f"model.layers.{layer}.{name}": values for name, values in there.items()}
    return state


def transformers_config(file: FamilyFile) -> dict[str, Any]:
    """The file's metadata by transformers' names."""
    keys = file.keys
    n_rope = keys["rope.dimension_count"]
    return {
        "vocab_size": keys["vocab_size"],
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count"],
        "layer_types": ["full_attention" if n else "linear_attention" for n in keys["attention.head_count_kv"]],
        "kv_lora_rank": keys["attention.kv_lora_rank"],
        "qk_rope_head_dim": n_rope,
        "qk_nope_head_dim": keys["attention.key_length_mla"] - n_rope,
        "v_head_dim": keys["attention.value_length_mla"],
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "rms_norm_eps": EPS,
        "max_position_embeddings": keys["context_length"],
        "head_dim": keys["kda.head_dim"],
        "short_conv_kernel_size": keys["ssm.conv_kernel"],
        "kda_safe_gate": True,
        "kda_lower_bound": keys["kda.gate_lower_bound"],
        "moe_intermediate_size": keys["expert_feed_forward_length"],
        "n_shared_experts": keys["expert_shared_feed_forward_length"] // keys["expert_feed_forward_length"],
        "num_local_experts": keys["expert_count"],
        "num_experts_per_tok": keys["expert_used_count"],
        "n_group": keys["expert_group_count"],
        "topk_group": keys["expert_group_used_count"],
        "first_k_dense_replace": keys["leading_dense_block_count"],
        "routed_scaling_factor": keys["expert_weights_scale"],
        "norm_topk_prob": True,
        "num_mtp_layers": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file = bailingmoe3(n_head=4)
    model = file.write(tmp_path / "m.gguf")
    config, state = transformers_config(file), transformers_state(file, model.weights)
    assert_transformers(model, "BailingHybridForCausalLM", config, state, llamacpp=True)
