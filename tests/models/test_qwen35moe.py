"""Qwen3.5/3.6 MoE: gated delta nets beside gated full attention, a gated shared expert, a block to be skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from engine.harness import assert_same_bits, opened
from family_file import FamilyFile
from family_tests import LongContextTests, Options, RefusalTests, SkippedBlockTests
from parity import assert_transformers
from tiny import T

from sluice.errors import InputError

EPS = 1e-6
ROPE_BASE = 10000.0


def qwen35moe(
    *,
    n_layers: int = 4,
    interval: int = 4,
    recurrent: list[bool] | None = None,
    n_embd: int = 64,
    n_head: int = 3,
    n_head_kv: int = 1,
    head_dim: int = 32,
    n_rot: int = 16,
    sections: tuple[int, int, int, int] = (3, 3, 2, 0),
    n_k_heads: int = 2,
    n_v_heads: int = 6,
    state_size: int = 32,
    conv_kernel: int = 4,
    n_expert: int = 7,
    top_k: int = 3,
    n_ff: int = 32,
    n_ff_shared: int = 96,
    expert_type: T = T.F32,
    down_type: T | None = None,
    dense_type: T = T.F32,
    router_type: T = T.F32,
    fused: bool = False,
    tied: bool = False,
    mtp: bool = False,
    seed: int = 0,
) -> FamilyFile:
    """A file's tensors and metadata. Which layers are recurrent: `recurrent`, or all but each `interval`th.

    With `mtp`, one more block, which predicts the token after the next, and is counted by block_count.
    """
    file = FamilyFile("qwen35moe", pre="qwen35", seed=seed)
    file.metadata(
        {
            "block_count": n_layers + mtp,
            "embedding_length": n_embd,
            "attention.head_count": n_head,
            "attention.head_count_kv": n_head_kv,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": EPS,
            "rope.dimension_count": n_rot,
            "rope.dimension_sections": list(sections),
            "rope.freq_base": ROPE_BASE,
            "expert_count": n_expert,
            "expert_used_count": top_k,
            "expert_feed_forward_length": n_ff,
            "expert_shared_feed_forward_length": n_ff_shared,
            "ssm.conv_kernel": conv_kernel,
            "ssm.state_size": state_size,
            "ssm.group_count": n_k_heads,
            "ssm.time_step_rank": n_v_heads,
            "ssm.inner_size": state_size * n_v_heads,
        }
    )
    if recurrent is None:
        file.metadata({"full_attention_interval": interval})
        recurrent = [(i + 1) % interval != 0 for i in range(n_layers)]
    else:
        file.metadata({"attention.recurrent_layers": [*recurrent, *[False] * mtp]})
    if mtp:
        file.metadata({"nextn_predict_layers": 1})
    file.embeddings(dense_type, n_embd, tied=tied)
    n_channels = state_size * (2 * n_k_heads + n_v_heads)
    for layer in range(n_layers + mtp):
        block = f"blk.{layer}."
        file.norm(f"{block}attn_norm", n_embd)
        file.norm(f"{block}post_attention_norm", n_embd)
        if layer < n_layers and recurrent[layer]:
            file.matrix(f"{block}attn_qkv", dense_type, n_channels, n_embd)
            file.matrix(f"{block}attn_gate", dense_type, state_size * n_v_heads, n_embd)
            # [channels, taps]: each tap counts, the newest no more than the others
            file.vector(f"{block}ssm_conv1d.weight", 0.7 * file.rng.standard_normal((n_channels, conv_kernel)))
            # a step's decay is exp(ssm_a softplus(alpha + dt)): memories of one token, and of a hundred
            file.vector(f"{block}ssm_a", -np.exp(file.rng.uniform(np.log(0.01), np.log(2.0), n_v_heads)))
            file.bias(f"{block}ssm_dt", n_v_heads, scale=1.0)
            file.matrix(f"{block}ssm_beta", dense_type, n_v_heads, n_embd)
            file.matrix(f"{block}ssm_alpha", dense_type, n_v_heads, n_embd)
            file.norm(f"{block}ssm_norm", state_size)
            file.matrix(f"{block}ssm_out", dense_type, n_embd, state_size * n_v_heads, gain=2.0)
        else:
            file.matrix(f"{block}attn_q", dense_type, 2 * n_head * head_dim, n_embd, gain=1.5)  # of each head: q, gate
            file.matrix(f"{block}attn_k", dense_type, n_head_kv * head_dim, n_embd, gain=1.5)
            file.matrix(f"{block}attn_v", dense_type, n_head_kv * head_dim, n_embd)
            file.matrix(f"{block}attn_output", dense_type, n_embd, n_head * head_dim, gain=2.0)
            file.norm(f"{block}attn_q_norm", head_dim)
            file.norm(f"{block}attn_k_norm", head_dim)
        file.matrix(f"{block}ffn_gate_inp", router_type, n_expert, n_embd, gain=2.0)
        file.experts(block, expert_type, n_expert, n_ff, n_embd, down=down_type, fused=fused)
        file.vector(f"{block}ffn_gate_inp_shexp.weight", file.rng.standard_normal(n_embd) * 2 * n_embd**-0.5)
        file.matrix(f"{block}ffn_gate_shexp", dense_type, n_ff_shared, n_embd)
        file.matrix(f"{block}ffn_up_shexp", dense_type, n_ff_shared, n_embd)
        file.matrix(f"{block}ffn_down_shexp", dense_type, n_embd, n_ff_shared, gain=2.0)
    if mtp:
        block = f"blk.{n_layers}.nextn."
        file.matrix(f"{block}eh_proj", dense_type, n_embd, 2 * n_embd)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            file.norm(block + name, n_embd)
    return file


BLOCKS_OF_256: dict[str, Any] = {"n_embd": 256, "n_ff": 256, "n_ff_shared": 256}
FLOAT32: dict[str, dict[str, Any]] = {
    "skipped block": {"mtp": True},
    "tied, fused": {"tied": True, "fused": True, "n_layers": 5, "interval": 2},
    "recurrent layers by list": {"n_layers": 3, "recurrent": [False, True, True], "mtp": True, "n_head_kv": 3},
    "as many keys as values": {
        "n_k_heads": 3, "n_v_heads": 3, "state_size": 64, "head_dim": 64, "n_rot": 64, "sections": (11, 11, 10, 0)
    },
    "kernel of 3": {"conv_kernel": 3, "n_k_heads": 1, "n_v_heads": 5, "n_layers": 2, "interval": 2, "state_size": 128},
}  # fmt: skip
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0, "state_size": 64},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16, "fused": True, "mtp": True},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "tied": True, "recurrent": [True, False, True, True, False],
              "n_layers": 5},
}  # fmt: skip


class TestQwen35Moe(LongContextTests, SkippedBlockTests, RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    GREEDY = FLOAT32["skipped block"]
    LONG: ClassVar[Options] = {"n_layers": 2, "interval": 2}
    OPTIONAL = frozenset(
        {
            "vocab_size", "rope.freq_base", "attention.value_length", "expert_feed_forward_length",
            "rope.dimension_sections",
        }
    )  # fmt: skip

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return qwen35moe(**options)

    def small(self) -> FamilyFile:
        """Layers of each kind, and the block that is skipped."""
        return qwen35moe(n_layers=2, interval=2, mtp=True, n_expert=4, top_k=2)

    def small_for_keys(self) -> FamilyFile:
        return qwen35moe(n_layers=3, interval=2, mtp=True, n_expert=4, top_k=2)

    def weighed(self) -> FamilyFile:
        return qwen35moe(n_layers=2, interval=2, mtp=True)


# --- transformers


def transformers_state(file: FamilyFile, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights by transformers' names.

    There a norm's weight has one taken off, and value heads are grouped by their key head; a file's value head i
    belongs to key head i % n_k_heads, so that ggml's broadcast pairs them.
    """
    keys = file.keys
    n_k, n_v, size = keys["ssm.group_count"], keys["ssm.time_step_rank"], keys["ssm.state_size"]

    def grouped(w: np.ndarray, width: int) -> np.ndarray:
        """Rows in groups of `width`, one a value head, in transformers' order."""
        heads = w.reshape(n_v // n_k, n_k, width, *w.shape[1:])
        return heads.swapaxes(0, 1).reshape(w.shape)

    def channels(w: np.ndarray) -> np.ndarray:
        """Rows of queries, keys and values, the last in transformers' order."""
        n = 2 * n_k * size
        return np.concatenate([w[:n], grouped(w[n:], size)])

    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"] - 1,
        "lm_head.weight": weights["output.weight"],
    }
    for layer in range(keys["block_count"]):
        w = {name.removeprefix(f"blk.{layer}."): values for name, values in weights.items()}
        there = {
            "input_layernorm.weight": w["attn_norm.weight"] - 1,
            "post_attention_layernorm.weight": w["post_attention_norm.weight"] - 1,
            "mlp.gate.weight": w["ffn_gate_inp.weight"],
            "mlp.experts.gate_up_proj": np.concatenate([w["ffn_gate_exps.weight"], w["ffn_up_exps.weight"]], axis=1),
            "mlp.experts.down_proj": w["ffn_down_exps.weight"],
            "mlp.shared_expert_gate.weight": w["ffn_gate_inp_shexp.weight"][None],
            **{
                f"mlp.shared_expert.{part}_proj.weight": w[f"ffn_{part}_shexp.weight"]
                for part in ("gate", "up", "down")
            },
        }
        if "ssm_a" in w:
            there |= {
                "linear_attn.in_proj_qkv.weight": channels(w["attn_qkv.weight"]),
                "linear_attn.in_proj_z.weight": grouped(w["attn_gate.weight"], size),
                "linear_attn.in_proj_a.weight": grouped(w["ssm_alpha.weight"], 1),
                "linear_attn.in_proj_b.weight": grouped(w["ssm_beta.weight"], 1),
                "linear_attn.conv1d.weight": channels(w["ssm_conv1d.weight"])[:, None],
                "linear_attn.A_log": grouped(np.log(-w["ssm_a"]), 1),
                "linear_attn.dt_bias": grouped(w["ssm_dt.bias"], 1),
                "linear_attn.norm.weight": w["ssm_norm.weight"],
                "linear_attn.out_proj.weight": grouped(w["ssm_out.weight"].T, size).T,
            }
        else:
            there |= {f"self_attn.{part}_norm.weight": w[f"attn_{part}_norm.weight"] - 1 for part in ("q", "k")}
            there |= {f"self_attn.{part}_proj.weight": w[f"attn_{part}.weight"] for part in ("q", "k", "v")}
            there["self_attn.o_proj.weight"] = w["attn_output.weight"]
        state |= {f"model.layers.{layer}.{name}": values for name, values in there.items()}
    return state


def transformers_config(file: FamilyFile) -> dict[str, Any]:
    """The file's metadata by transformers' names."""
    keys = file.keys
    return {
        "vocab_size": keys["vocab_size"],
        "hidden_size": keys["embedding_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "head_dim": keys["attention.key_length"],
        "rms_norm_eps": EPS,
        "max_position_embeddings": keys["context_length"],
        "linear_conv_kernel_dim": keys["ssm.conv_kernel"],
        "linear_key_head_dim": keys["ssm.state_size"],
        "linear_value_head_dim": keys["ssm.state_size"],
        "linear_num_key_heads": keys["ssm.group_count"],
        "linear_num_value_heads": keys["ssm.time_step_rank"],
        "moe_intermediate_size": keys["expert_feed_forward_length"],
        "shared_expert_intermediate_size": keys["expert_shared_feed_forward_length"],
        "num_experts_per_tok": keys["expert_used_count"],
        "num_experts": keys["expert_count"],
        "full_attention_interval": keys["full_attention_interval"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_BASE,
            "partial_rotary_factor": keys["rope.dimension_count"] / keys["attention.key_length"],
            "mrope_section": keys["rope.dimension_sections"][:3],
            "mrope_interleaved": True,
        },
    }


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file = qwen35moe()
    model = file.write(tmp_path / "m.gguf")
    config, state = transformers_config(file), transformers_state(file, model.weights)
    assert_transformers(model, "Qwen3_5MoeForCausalLM", config, state, llamacpp=True)


def test_a_session_taken_over_goes_on_with_its_states(tmp_path: Path) -> None:
    model = qwen35moe(seed=3).write(tmp_path / "m.gguf")
    ids = np.random.default_rng(3).integers(0, 200, 20).tolist()
    with opened(model.path, expert_slots=9, streams=2) as engine, engine.session() as one, engine.session() as other:
        one.feed(ids[:12])
        engine.decode([one], [ids[12]])
        with pytest.raises(InputError, match="0 are reusable"):
            other.copy(one, 512)
        other.copy(one)
        assert other.tokens == ids[:13]
        for id in ids[13:]:
            expected = engine.decode([one], [id]).copy()
            assert_same_bits(engine.decode([other], [id]), expected, "in the session that took it over")
