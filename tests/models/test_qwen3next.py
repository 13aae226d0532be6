"""Qwen3-Next: Qwen3.5's layers with matrices grouped by key head, in the layout of new files and of old ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from family_file import FamilyFile
from family_tests import LongContextTests, Options, RefusalTests, SkippedBlockTests
from parity import assert_transformers
from test_qwen35moe import BLOCKS_OF_256, EPS, ROPE_BASE, qwen35moe
from tiny import T


def qwen3next(*, old: bool = False, **options: Any) -> FamilyFile:
    """A file; `old`: queries, keys, values and the gate in one matrix."""
    file = qwen35moe(**options)
    file.arch = "qwen3next"
    del file.keys["rope.dimension_sections"]

    def stack(block: str, parts: tuple[str, str], whole: str) -> None:
        raws, types = zip(*(file.stored.pop(f"{block}{part}.weight") for part in parts), strict=True)
        file.stored[f"{block}{whole}.weight"] = (np.concatenate(raws), types[0])

    for name in [name for name in file.stored if name.endswith("ssm_a")]:
        stack(name.removesuffix("ssm_a"), ("ssm_beta", "ssm_alpha"), "ssm_ba")
        if old:
            stack(name.removesuffix("ssm_a"), ("attn_qkv", "attn_gate"), "ssm_in")
    return file


FLOAT32: dict[str, dict[str, Any]] = {
    "skipped block": {"mtp": True},
    "old, tied, fused": {"old": True, "tied": True, "fused": True, "n_layers": 5, "interval": 2},
    "as many keys as values": {"n_k_heads": 3, "n_v_heads": 3, "state_size": 64},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0, "state_size": 64},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16, "old": True, "mtp": True},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "tied": True, "recurrent": [True, False, True, True, False],
              "n_layers": 5},
}  # fmt: skip
OPTIONAL = {
    "vocab_size", "rope.freq_base", "rope.dimension_count", "attention.value_length", "expert_feed_forward_length"
}  # fmt: skip


class TestQwen3Next(LongContextTests, SkippedBlockTests, RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    GREEDY = FLOAT32["skipped block"]
    LONG: ClassVar[Options] = {"n_layers": 2, "interval": 2}

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return qwen3next(**options)

    def small(self) -> FamilyFile:
        return qwen3next(n_layers=2, interval=2, n_expert=4, top_k=2, mtp=True)

    def test_every_tensor_matters(self, tmp_path: Path) -> None:
        for old in (False, True):
            (tmp_path / str(old)).mkdir()
            file = qwen3next(n_layers=2, interval=2, mtp=True, old=old)
            self.assert_all_but_the_skipped_matter(file, tmp_path / str(old))


def transformers_state(file: FamilyFile, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of an old file by transformers' names. There a norm's weight has one taken off."""
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"] - 1,
        "lm_head.weight": weights["output.weight"],
    }
    for layer in range(file.keys["block_count"]):
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
                "linear_attn.in_proj_qkvz.weight": w["ssm_in.weight"],
                "linear_attn.in_proj_ba.weight": w["ssm_ba.weight"],
                "linear_attn.conv1d.weight": w["ssm_conv1d.weight"][:, None],
                "linear_attn.A_log": np.log(-w["ssm_a"]),
                "linear_attn.dt_bias": w["ssm_dt.bias"],
                "linear_attn.norm.weight": w["ssm_norm.weight"],
                "linear_attn.out_proj.weight": w["ssm_out.weight"],
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
        },
    }


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file = qwen3next(old=True)
    model = file.write(tmp_path / "m.gguf")
    config, state = transformers_config(file), transformers_state(file, model.weights)
    assert_transformers(model, "Qwen3NextForCausalLM", config, state)
