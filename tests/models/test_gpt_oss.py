"""gpt-oss: biases everywhere, sinks, windows on every other layer, yarn, a clamped activation, softmax over the chosen;
experts whose size is no multiple of a disk's block."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from engine.harness import assert_same_bits, opened, ordered, resident, run, run_together
from family_file import FamilyFile
from family_tests import LongContextTests, Options
from oracles import llamacpp_logits
from parity import N, assert_parity, assert_transformers, compare, prompts_of, token_ids
from tiny import T

from sluice.errors import ModelFileError
from sluice.ggml import load_library
from sluice.pack import pack

EPS = 1e-5
ROPE_BASE = 150000.0
YARN_FACTOR = 8.0
N_CTX_ORIG = 64  # what yarn stretches: half of the positions compared lie beyond it


def gpt_oss(
    *,
    n_layers: int = 4,
    n_embd: int = 64,
    n_head: int = 3,
    n_head_kv: int = 1,
    head_dim: int = 64,
    window: int = 12,
    pattern: int | list[bool] | None = None,
    n_expert: int = 7,
    top_k: int = 3,
    n_ff: int = 96,
    expert_type: T = T.F32,
    dense_type: T = T.F32,
    router_type: T = T.F32,
    yarn: bool = True,
    seed: int = 0,
) -> FamilyFile:
    """A file's tensors and metadata. `pattern`: which layers have a window, where the file says so at all."""
    file = FamilyFile("gpt-oss", pre="gpt-4o", seed=seed)
    file.metadata(
        {
            "block_count": n_layers,
            "embedding_length": n_embd,
            "feed_forward_length": n_ff,
            "attention.head_count": n_head,
            "attention.head_count_kv": n_head_kv,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": EPS,
            "attention.sliding_window": window,
            "rope.freq_base": ROPE_BASE,
            "expert_count": n_expert,
            "expert_used_count": top_k,
            "expert_feed_forward_length": n_ff,
        }
    )
    if yarn:
        file.metadata(
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": YARN_FACTOR,
                "rope.scaling.original_context_length": N_CTX_ORIG,
            }
        )
    if pattern is not None:
        file.metadata({"attention.sliding_window_pattern": pattern})
    file.embeddings(dense_type, n_embd)
    for layer in range(n_layers):
        block = f"blk.{layer}."
        file.norm(f"{block}attn_norm", n_embd)
        # some of what the activation reads lies beyond its limit of 7
        file.vector(f"{block}post_attention_norm.weight", 3 + 0.3 * file.rng.standard_normal(n_embd))
        for part, n_heads, gain in (("q", n_head, 1.5), ("k", n_head_kv, 1.5), ("v", n_head_kv, 1.0)):
            file.matrix(f"{block}attn_{part}", dense_type, n_heads * head_dim, n_embd, gain=gain)
            file.bias(f"{block}attn_{part}", n_heads * head_dim)
        file.matrix(f"{block}attn_output", dense_type, n_embd, n_head * head_dim, gain=2.0)
        file.bias(f"{block}attn_output", n_embd)
        file.vector(f"{block}attn_sinks.weight", 2 + file.rng.standard_normal(n_head))
        file.matrix(f"{block}ffn_gate_inp", router_type, n_expert, n_embd, gain=0.7)
        file.bias(f"{block}ffn_gate_inp", n_expert)
        file.experts(block, expert_type, n_expert, n_ff, n_embd)
        for part, width in (("gate", n_ff), ("up", n_ff), ("down", n_embd)):
            file.bias(f"{block}ffn_{part}_exps", n_expert, width, scale=1.0)
    return file


FLOAT32: dict[str, dict[str, Any]] = {
    "every other layer": {},
    "as many keys as queries": {"n_head_kv": 3, "n_layers": 3, "window": 31, "yarn": False, "top_k": 7},
    "windows of three layers in four": {"pattern": 4, "head_dim": 32, "n_head": 5, "n_expert": 4, "top_k": 1},
    "windows by list": {"pattern": [False, True, True], "n_layers": 3, "window": 1, "n_ff": 40, "n_embd": 88},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.Q8_0, "n_head": 4, "n_head_kv": 2},
    "Q4_K": {"expert_type": T.Q4_K, "dense_type": T.Q6_K, "router_type": T.BF16, "n_embd": 256, "n_ff": 256,
             "n_head": 4, "n_layers": 2},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.F16, "router_type": T.F16, "window": 40, "n_embd": 96},
}  # fmt: skip


class TestGptOss(LongContextTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    AFRESH = "MXFP4"
    MATTERS = 0.01
    LONG: ClassVar[Options] = {"n_layers": 2, "window": 128}

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return gpt_oss(**options)

    def small(self) -> FamilyFile:
        return gpt_oss(n_layers=2)


# --- windows

# Lengths of prompts that end and begin on both sides of paddings (256) and chunk borders (512), and tokens decoded
# after them: past the next padding, past the place where a window leaves one behind.
BORDERS = ((553, 4), (292, 6), (1030, 2), (510, 4), (255, 3))
WINDOWS = (1, 40, 256, 300)


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_over_chunks_agree_with_llamacpp(tmp_path: Path, window: int) -> None:
    model = gpt_oss(n_layers=2, window=window).write(tmp_path / "m.gguf", split=2)
    ids = token_ids(1100)
    expected = llamacpp_logits(model.path, ids)
    with opened(model.path, kv="f32", ctx=1100, expert_slots=model.top_k + 1) as engine:
        assert_parity([compare(f"window of {window}", engine.logits(ids), expected)], float32=True)


@pytest.mark.parametrize("window", [40, 300])
def test_windows_and_sinks_give_the_same_bits_in_any_company(tmp_path: Path, window: int) -> None:
    model = gpt_oss(**QUANTISED["MXFP4"], n_layers=2, window=window).write(tmp_path / "m.gguf", split=2)
    rng = random.Random(window)
    prompts = prompts_of(BORDERS)
    options: dict[str, Any] = {"ctx": 1100, "threads": 1 + (window < 256)}
    with resident(model.path, **options) as engine:
        expected = [run(engine, it) for it in prompts]
    for slots, streams in ((0, 1), (1, 5)):
        options |= {"expert_slots": model.top_k + slots, "streams": streams}
        with opened(model.path, ordered(rng.randrange(1 << 32)), **options) as engine:
            found = run_together(engine, prompts, rng) if streams > 1 else [run(engine, it) for it in prompts]
        for i, rows in enumerate(found):
            assert_same_bits(rows, expected[i], f"{options}, prompt {i}")


def test_what_lies_before_the_window_is_not_seen(tmp_path: Path) -> None:
    model = gpt_oss(n_layers=2, window=12, pattern=[True, True]).write(tmp_path / "m.gguf", split=2)
    ids = token_ids(40)
    others = [(id + 1) % 390 for id in ids[:17]] + ids[17:]  # position 39 sees 28 and on, those see 17 and on
    with opened(model.path, expert_slots=model.top_k + 1) as engine:
        seen = [engine.logits(it) for it in (ids, others)]
    assert_same_bits(seen[0][39:], seen[1][39:], "the last position")
    assert (seen[0][38] != seen[1][38]).any()


# --- experts' sizes


def test_experts_of_odd_sizes_come_through_a_bounce_buffer(tmp_path: Path) -> None:
    model = gpt_oss(**QUANTISED["MXFP4"]).write(tmp_path / "m.gguf", split=2)
    sizes = {raw[0].nbytes for name, (raw, _) in model.stored.items() if "exps.weight" in name}
    assert sizes == {96 * 64 // 32 * 17} and 96 * 64 // 32 * 17 % 512
    pack(model.path, tmp_path / "packed.gguf", load_library())
    ids = token_ids(N)
    with resident(model.path) as engine:
        expected = engine.logits(ids)
    for path in (model.path, tmp_path / "packed.gguf"):
        with opened(path, expert_slots=model.top_k + 1) as engine:
            found, io = engine.logits(ids), engine.store.reader.stats()
            direct = engine.files.direct
        assert_same_bits(found, expected, path.name)
        assert io.reads and (io.bounced > 0) == (direct and path == model.path)


# --- refusals

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no window": ({"attention.sliding_window": None}, "attention.sliding_window is missing"),
    "a window of nothing": ({"attention.sliding_window": 0}, "attention.sliding_window is '0'"),
    "too few layers": ({"attention.sliding_window_pattern": [True]}, "attention.sliding_window_pattern"),
    "a fraction": ({"attention.sliding_window_pattern": 2.5}, "attention.sliding_window_pattern is '2.5'"),
    "two bases": ({"rope.freq_base_swa": 10000.0}, "rope.freq_base_swa"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_windows_are_refused_by_name(tmp_path: Path, name: str) -> None:
    keys, message = REFUSED[name]
    file = gpt_oss()
    file.metadata(keys)
    file.keys = {key: value for key, value in file.keys.items() if value is not None}
    with pytest.raises(ModelFileError, match=re.escape(f"gpt-oss.{message}")):
        opened(file.write(tmp_path / "m.gguf").path)


@pytest.mark.parametrize("name", ["attn_sinks.weight", "attn_output.bias", "ffn_gate_inp.bias", "ffn_up_exps.bias"])
def test_a_missing_vector_is_refused_by_name(tmp_path: Path, name: str) -> None:
    file = gpt_oss()
    del file.stored[f"blk.1.{name}"]
    with pytest.raises(ModelFileError, match=f"blk.1.{name} is missing"):
        opened(file.write(tmp_path / "m.gguf").path)


# --- transformers


def transformers_state(file: FamilyFile, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights by transformers' names; there experts' matrices are [in, out], gate and up in alternating columns."""

    def alternating(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.stack([a, b], axis=-1).reshape(*a.shape[:-1], -1)

    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    for layer in range(file.keys["block_count"]):
        w = {name.removeprefix(f"blk.{layer}."): values for name, values in weights.items()}
        there = {
            "input_layernorm.weight": w["attn_norm.weight"],
            "post_attention_layernorm.weight": w["post_attention_norm.weight"],
            "self_attn.sinks": w["attn_sinks.weight"],
            "mlp.router.weight": w["ffn_gate_inp.weight"],
            "mlp.router.bias": w["ffn_gate_inp.bias"],
            "mlp.experts.gate_up_proj": alternating(
                w["ffn_gate_exps.weight"].swapaxes(1, 2), w["ffn_up_exps.weight"].swapaxes(1, 2)
            ),
            "mlp.experts.gate_up_proj_bias": alternating(w["ffn_gate_exps.bias"], w["ffn_up_exps.bias"]),
            "mlp.experts.down_proj": w["ffn_down_exps.weight"].swapaxes(1, 2),
            "mlp.experts.down_proj_bias": w["ffn_down_exps.bias"],
        }
        for kind in ("weight", "bias"):
            for mine, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
                there[f"self_attn.{theirs}_proj.{kind}"] = w[f"attn_{mine}.{kind}"]
        state |= {f"model.layers.{layer}.{name}": values for name, values in there.items()}
    return state


def transformers_config(file: FamilyFile) -> dict[str, Any]:
    """The file's metadata by transformers' names."""
    keys = file.keys
    return {
        "vocab_size": keys["vocab_size"],
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["expert_feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "head_dim": keys["attention.key_length"],
        "sliding_window": keys["attention.sliding_window"],
        "rms_norm_eps": EPS,
        "max_position_embeddings": keys["context_length"],
        "num_experts_per_tok": keys["expert_used_count"],
        "num_local_experts": keys["expert_count"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": ROPE_BASE,
            "factor": YARN_FACTOR,
            "original_max_position_embeddings": N_CTX_ORIG,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
        },
    }


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file = gpt_oss()
    model = file.write(tmp_path / "m.gguf")
    config, state = transformers_config(file), transformers_state(file, model.weights)
    assert_transformers(model, "GptOssForCausalLM", config, state, llamacpp=True)
