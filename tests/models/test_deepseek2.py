"""DeepSeek V2 and V3, Kimi-K2, GLM-4.7-Flash: latent attention, yarn on the scores, every kind of routing they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from engine.harness import Prompt, opened, run
from family_file import FamilyFile
from family_tests import LongContextTests, Options, RefusalTests, SkippedBlockTests
from oracles import llamacpp_logits
from parity import PREFIX, N, assert_parity, assert_transformers, compare, token_ids
from refusals import problem
from tiny import T

from sluice.config import EngineConfig
from sluice.engine import Engine

EPS = 1e-6
ROPE_BASE = 10000.0


def deepseek2(
    *,
    n_layers: int = 3,
    n_dense: int = 1,
    n_embd: int = 60,
    n_head: int = 3,
    rank: int = 40,
    q_rank: int = 24,
    n_nope: int = 20,
    n_rope: int = 16,
    n_v: int = 12,
    folded: bool = True,
    yarn: dict[str, Any] | None = None,
    n_expert: int = 12,
    top_k: int = 3,
    n_groups: int = 4,
    n_groups_used: int = 2,
    n_ff: int = 32,
    n_ff_dense: int = 96,
    n_shared: int = 2,
    normalised: bool = True,
    scale: float = 2.5,
    gating: int | None = 2,
    biased: bool = True,
    expert_type: T = T.F32,
    down_type: T | None = None,
    dense_type: T = T.F32,
    router_type: T = T.F32,
    fused: bool = False,
    tied: bool = False,
    mtp: bool = False,
    seed: int = 0,
) -> FamilyFile:
    """A file's tensors and metadata. With `q_rank` 0 queries are not compressed; not `folded` is the form of old files,
    with keys and values in one matrix. `yarn` are keys of rope.scaling.

    With `mtp`, one more block, which predicts the token after the next, and is counted by block_count.
    """
    file = FamilyFile("deepseek2", pre="deepseek-v3", seed=seed)
    file.metadata(
        {
            "block_count": n_layers + mtp,
            "leading_dense_block_count": n_dense,
            "embedding_length": n_embd,
            "feed_forward_length": n_ff_dense,
            "attention.head_count": n_head,
            "attention.head_count_kv": 1 if folded else n_head,
            "attention.key_length": rank + n_rope if folded else n_nope + n_rope,
            "attention.value_length": rank if folded else n_v,
            "attention.kv_lora_rank": rank,
            "attention.q_lora_rank": q_rank,  # llama.cpp wants to be told of none, except in V2-Lite's number of layers
            "attention.layer_norm_rms_epsilon": EPS,
            "rope.dimension_count": n_rope,
            "rope.freq_base": ROPE_BASE,
            "expert_count": n_expert,
            "expert_used_count": top_k,
            "expert_feed_forward_length": n_ff,
            "expert_shared_count": n_shared,
            "expert_weights_scale": scale,
            "expert_weights_norm": normalised,
            "expert_group_count": n_groups,
            "expert_group_used_count": n_groups_used,
        }
    )
    if gating is not None:
        file.metadata({"expert_gating_func": gating})
    if folded:
        file.metadata({"attention.key_length_mla": n_nope + n_rope, "attention.value_length_mla": n_v})
    if yarn:
        file.metadata({f"rope.scaling.{key}": value for key, value in yarn.items()})
    if mtp:
        file.metadata({"nextn_predict_layers": 1})
    file.embeddings(dense_type, n_embd, tied=tied)
    for layer in range(n_layers + mtp):
        block = f"blk.{layer}."
        n_q = n_head * (n_nope + n_rope)
        file.norm(f"{block}attn_norm", n_embd)
        file.norm(f"{block}ffn_norm", n_embd)
        if q_rank:
            file.matrix(f"{block}attn_q_a", dense_type, q_rank, n_embd)
            file.norm(f"{block}attn_q_a_norm", q_rank)
            file.matrix(f"{block}attn_q_b", dense_type, n_q, q_rank, gain=1.5)
        else:
            file.matrix(f"{block}attn_q", dense_type, n_q, n_embd, gain=1.5)
        file.matrix(f"{block}attn_kv_a_mqa", dense_type, rank + n_rope, n_embd, gain=1.5)
        file.norm(f"{block}attn_kv_a_norm", rank)
        if folded:
            # its sum runs over n_nope, and so much smaller keys are made of latent vectors as their rank is larger
            file.matrix(f"{block}attn_k_b", dense_type, n_head, rank, n_nope, gain=1.5 * (n_nope / rank) ** 0.5)
            file.matrix(f"{block}attn_v_b", dense_type, n_head, n_v, rank)
        else:
            file.matrix(f"{block}attn_kv_b", dense_type, n_head * (n_nope + n_v), rank, gain=1.5)
        file.matrix(f"{block}attn_output", dense_type, n_embd, n_head * n_v, gain=2.0)
        if layer < n_dense:
            file.matrix(f"{block}ffn_gate", dense_type, n_ff_dense, n_embd)
            file.matrix(f"{block}ffn_up", dense_type, n_ff_dense, n_embd)
            file.matrix(f"{block}ffn_down", dense_type, n_embd, n_ff_dense, gain=2.0)
            continue
        file.matrix(f"{block}ffn_gate_inp", router_type, n_expert, n_embd, gain=2.0)
        if biased:
            file.bias(f"{block}exp_probs_b", n_expert)
        file.experts(block, expert_type, n_expert, n_ff, n_embd, down=down_type, fused=fused)
        file.matrix(f"{block}ffn_gate_shexp", dense_type, n_shared * n_ff, n_embd)
        file.matrix(f"{block}ffn_up_shexp", dense_type, n_shared * n_ff, n_embd)
        file.matrix(f"{block}ffn_down_shexp", dense_type, n_embd, n_shared * n_ff, gain=2.0)
    if mtp:
        block = f"blk.{n_layers}.nextn."
        file.matrix(f"{block}eh_proj", dense_type, n_embd, 2 * n_embd)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            file.norm(block + name, n_embd)
    return file


# multipliers of 1 and of another value, as V3 and V2 have them
YARN: dict[str, Any] = {"type": "yarn", "factor": 8.0, "original_context_length": 1024, "yarn_log_multiplier": 0.1}
YARN_V2: dict[str, Any] = {**YARN, "factor": 40.0, "original_context_length": 64, "yarn_log_multiplier": 0.0707}
V2_LITE: dict[str, Any] = {
    "q_rank": 0, "gating": 1, "biased": False, "normalised": False, "scale": 1.0, "n_groups": 1, "n_groups_used": 1,
}  # fmt: skip
BLOCKS_OF_32: dict[str, Any] = {"n_embd": 64, "rank": 64, "q_rank": 32, "n_nope": 32, "n_v": 32}
BLOCKS_OF_256: dict[str, Any] = {**BLOCKS_OF_32, "n_embd": 256, "n_ff": 256, "n_ff_dense": 256, "n_rope": 32}
FLOAT32: dict[str, dict[str, Any]] = {
    "V3": {"yarn": YARN, "mtp": True},
    "V2": {"yarn": YARN_V2, "gating": 1, "biased": False, "normalised": False, "scale": 16.0, "n_dense": 2},
    "V2-Lite of old": {**V2_LITE, "yarn": YARN_V2, "folded": False, "gating": None},
    "tied, fused, linear scaling": {
        "tied": True, "fused": True, "n_groups": 1, "n_groups_used": 1, "n_head": 5, "n_v": 36, "n_layers": 2,
        "yarn": {"type": "linear", "factor": 4.0, "yarn_log_multiplier": 0.1},
    },
    "no dense layers, yarn without a multiplier": {
        "n_dense": 0, "n_head": 1, "n_shared": 1, "n_layers": 2, "yarn": {**YARN, "yarn_log_multiplier": 0.0}
    },
}  # fmt: skip
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0, "yarn": YARN},
    "Q8_0": {**BLOCKS_OF_32, "expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16, "mtp": True},
    "MXFP4": {**V2_LITE, **BLOCKS_OF_32, "q_rank": 0, "expert_type": T.MXFP4, "dense_type": T.F16, "yarn": YARN_V2},
    "old": {**BLOCKS_OF_32, "expert_type": T.Q5_0, "dense_type": T.Q8_0, "folded": False, "yarn": YARN},
}


class TestDeepSeek2(LongContextTests, SkippedBlockTests, RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    STREAMED = ("Q4_K", "Q8_0", "MXFP4", "old")
    STREAMED_MORE: ClassVar[Options] = {"n_rope": 32}
    STREAMED_KV: ClassVar[dict[str, str]] = {"Q4_K": "q8_0", "old": "q8_0"}
    GREEDY = FLOAT32["V3"]
    LONG: ClassVar[Options] = {"n_layers": 2, "yarn": YARN}
    OPTIONAL = frozenset(
        {
            "rope.freq_base", "expert_weights_scale", "expert_weights_norm", "expert_gating_func", "expert_group_count",
            "expert_feed_forward_length", "vocab_size", "rope.scaling.type", "rope.scaling.factor",
            "rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier",
        }
    )  # fmt: skip

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return deepseek2(**options)

    def small(self) -> FamilyFile:
        return deepseek2(n_layers=2, n_embd=6, n_head=2, rank=4, q_rank=3, n_nope=2, n_rope=2, n_v=3, n_ff=2, mtp=True)

    def small_for_keys(self) -> FamilyFile:
        return deepseek2(n_layers=2, yarn=YARN)

    def weighed(self) -> FamilyFile:
        return deepseek2(n_layers=2, mtp=True)

    def may_lack(self, name: str) -> bool:
        return name.endswith("exp_probs_b.bias") or name == "output.weight"


def test_flash_attention_agrees_with_llamacpp(tmp_path: Path) -> None:
    heads = {"rank": 512, "n_rope": 64, "n_nope": 128, "n_v": 128, "yarn": YARN, "n_layers": 2, "n_head": 4}
    model = deepseek2(**heads).write(tmp_path / "m.gguf", split=2)
    ids = token_ids(N)
    expected = llamacpp_logits(model.path, ids, kv="f16", flash="on")
    with opened(model.path, kv="f16", expert_slots=model.top_k + 1) as engine:
        prefilled, decoded = engine.logits(ids), run(engine, Prompt(ids[:PREFIX], ids[PREFIX:]))
    figures = [compare("prefill", prefilled, expected), compare("decode", decoded, expected[PREFIX - 1 :])]
    assert_parity(figures, float32=False)


def test_only_latent_vectors_are_kept_of_a_position(tmp_path: Path) -> None:
    kept = {}
    for folded in (True, False):
        path = deepseek2(folded=folded, n_layers=2).write(tmp_path / f"{folded}.gguf").path
        kept[folded] = Engine(path, EngineConfig(threads=1, kv="f32", ctx=256), plan_only=True).plan.needs.kv
    assert kept == {True: 2 * 256 * 4 * (40 + 16), False: 2 * 256 * 4 * 3 * (20 + 16 + 12)}


# --- what files say


def test_routing_that_a_file_does_not_name_is_told_by_its_biases(tmp_path: Path) -> None:
    for biased, gating in ((True, "sigmoid"), (False, "softmax")):
        path = deepseek2(gating=None, biased=biased, n_layers=2).write(tmp_path / f"{biased}.gguf").path
        assert Engine(path, EngineConfig(threads=1), plan_only=True).spec.gating == gating


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("leading_dense_block_count", 2),
        ("leading_dense_block_count", 0),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 55),
        ("attention.value_length", 41),
        ("attention.kv_lora_rank", 39),
        ("attention.key_length_mla", 16),
        ("attention.temperature_scale", 0.1),
        ("rope.scaling.yarn_log_multiplier", -0.1),
        ("expert_gating_func", 4),
        ("expert_group_count", 5),
    ],
)
def test_keys_that_contradict_each_other_are_refused_by_name(tmp_path: Path, key: str, value: float) -> None:
    file = deepseek2()
    file.metadata({key: value})
    said = problem(file.write(tmp_path / "m.gguf").path)
    related = {"attention.kv_lora_rank": "attention.key_length"}
    assert said is not None and related.get(key, key) in said


# --- transformers


def transformers_state(file: FamilyFile, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights by transformers' names; there one matrix makes keys and values of latent vectors."""
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_output": "self_attn.o_proj", "ffn_gate_inp": "mlp.gate",
        **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    }  # fmt: skip
    for layer in range(file.keys["block_count"]):
        w = {name.removeprefix(f"blk.{layer}."): values for name, values in weights.items()}
        there = {f"{theirs}.weight": w[f"{mine}.weight"] for mine, theirs in names.items() if f"{mine}.weight" in w}
        both = np.concatenate([w["attn_k_b.weight"].swapaxes(1, 2), w["attn_v_b.weight"]], axis=1)
        there["self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
        if "ffn_gate_exps.weight" in w:
            gate_up = np.concatenate([w["ffn_gate_exps.weight"], w["ffn_up_exps.weight"]], axis=1)
            there |= {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": w["ffn_down_exps.weight"]}
        if "exp_probs_b.bias" in w:
            there["mlp.gate.e_score_correction_bias"] = w["exp_probs_b.bias"]
        state |= {f"model.layers.{layer}.{name}": values for name, values in there.items()}
    return state


def transformers_config(file: FamilyFile) -> dict[str, Any]:
    """The file's metadata by transformers' names."""
    keys = file.keys
    n_rope, yarn = keys["rope.dimension_count"], {"rope_type": "default", "rope_theta": ROPE_BASE}
    if keys.get("rope.scaling.type") == "yarn":
        multiplier = 10 * keys["rope.scaling.yarn_log_multiplier"]
        yarn |= {
            "rope_type": "yarn",
            "factor": keys["rope.scaling.factor"],
            "original_max_position_embeddings": keys["rope.scaling.original_context_length"],
            "mscale": multiplier,
            "mscale_all_dim": multiplier,
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow", 1.0),
        }
    return {
        "vocab_size": keys["vocab_size"],
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "moe_intermediate_size": keys["expert_feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count"],
        "n_shared_experts": keys["expert_shared_count"],
        "n_routed_experts": keys["expert_count"],
        "routed_scaling_factor": keys["expert_weights_scale"],
        "kv_lora_rank": keys["attention.kv_lora_rank"],
        "q_lora_rank": keys["attention.q_lora_rank"] or None,
        "qk_rope_head_dim": n_rope,
        "qk_nope_head_dim": keys["attention.key_length_mla"] - n_rope,
        "v_head_dim": keys["attention.value_length_mla"],
        "n_group": keys["expert_group_count"],
        "topk_group": keys["expert_group_used_count"],
        "num_experts_per_tok": keys["expert_used_count"],
        "first_k_dense_replace": keys["leading_dense_block_count"],
        "norm_topk_prob": keys["expert_weights_norm"],
        "max_position_embeddings": keys["context_length"],
        "rms_norm_eps": EPS,
        "rope_parameters": yarn,
    }


KIMI: dict[str, Any] = {"yarn": {**YARN_V2, "yarn_log_multiplier": 0.1, "yarn_beta_fast": 1.0, "yarn_beta_slow": 1.0}}


@pytest.mark.parametrize(
    ("there", "options"),
    [("DeepseekV3ForCausalLM", KIMI), ("DeepseekV2ForCausalLM", {**V2_LITE, "yarn": YARN_V2})],
    ids=["V3", "V2"],
)  # fmt: skip
def test_agrees_with_transformers(tmp_path: Path, there: str, options: dict[str, Any]) -> None:
    file = deepseek2(**options)
    model = file.write(tmp_path / "m.gguf")
    config, state = transformers_config(file), transformers_state(file, model.weights)
    # llama.cpp does not read yarn's bounds in this architecture
    assert_transformers(model, there, config, state, llamacpp=options is not KIMI)
