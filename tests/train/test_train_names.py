"""Names and layouts of tensors, both ways, for every family."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import FAMILY_NAMES, random_model, save_model, spoilt

from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.gguf import open_gguf
from sluice.models import family_of
from sluice.routing.peft_names import pieces
from sluice.train.gguf_out import export_gguf
from sluice.train.hf_config import read_config
from sluice.train.names import Weight, canonical, left_out, weights

torch.set_num_threads(1)


def config_of(family: str, **changed: Any) -> dict[str, Any]:
    return random_model(family).config.to_dict() | changed


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_tensor_of_a_model_has_its_place(family: str) -> None:
    model = random_model(family)
    found = weights(read_config(model.config.to_dict(), "here"))
    state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert {it.source: it.hf_shape for it in found} == state
    assert len({it.name for it in found}) == len(found)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_there_and_back_is_the_same(family: str) -> None:
    model = random_model(family)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    for it in weights(read_config(model.config.to_dict(), "here")):
        if not isinstance(it, Weight):
            continue
        there = it.to_gguf(state[it.source])
        back = it.to_hf(there)
        assert there.shape == it.shape and there.dtype == np.float32
        if it.kind == "plain":
            np.testing.assert_array_equal(back, state[it.source])
        else:  # one added, or exp, in float32 loses bits, but those that come back give GGUF's again
            np.testing.assert_allclose(back, state[it.source], atol=1.2e-7, rtol=1e-6)
            np.testing.assert_array_equal(it.to_gguf(back), there)


def test_norms_and_decays_are_stored_as_they_are_computed_with() -> None:
    found = {it.name: it for it in weights(read_config(config_of("qwen3_5_moe"), "here"))}
    values = np.linspace(-0.5, 3, 6, dtype=np.float32)
    decay, norm = found["blk.0.ssm_a"], found["output_norm.weight"]
    assert isinstance(decay, Weight) and isinstance(norm, Weight) and decay.rows is not None
    expected = -np.exp(values.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(decay.to_gguf(values), expected[decay.rows])
    np.testing.assert_array_equal(norm.to_gguf(np.zeros(64, np.float32)), np.ones(64, np.float32))
    plain = found["blk.0.ssm_norm.weight"]
    assert isinstance(plain, Weight) and plain.kind == "plain"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_5_moe"])
def test_rows_are_those_that_adapters_have(family: str, tmp_path: Path) -> None:
    """An adapter's factors are reordered by tables of their own, which llama.cpp's results have been compared with."""
    model = random_model(family)
    save_model(model, tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", load_library())
    file = open_gguf(tmp_path / "m.gguf", load_library())
    spec = family_of(file).read_spec(file)
    seen = 0
    for it in weights(read_config(model.config.to_dict(), "here")):
        found = pieces(it.source.removesuffix(".weight"), spec, file.tensors)
        if not isinstance(it, Weight) or not isinstance(found, list) or len(it.shape) < 2:
            continue
        assert [piece.target for piece in found] == [it.name]
        for mine, theirs in ((it.rows, found[0].rows), (it.columns, found[0].columns)):
            assert (mine is None) == (theirs is None), it.name
            if mine is not None:
                np.testing.assert_array_equal(mine, theirs)
                seen += 1
    assert seen >= 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("model.language_model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.mlp.gate.weight"),
        ("model.layers.1.block_sparse_moe.experts.7.w1.weight", "model.layers.1.mlp.experts.7.gate_proj.weight"),
        ("model.layers.1.block_sparse_moe.experts.7.w2.weight", "model.layers.1.mlp.experts.7.down_proj.weight"),
        ("model.layers.1.block_sparse_moe.experts.7.w3.weight", "model.layers.1.mlp.experts.7.up_proj.weight"),
    ],
)
def test_checkpoints_spell_names_in_other_ways(given: str, expected: str) -> None:
    assert canonical(given) == expected
    assert not left_out(expected)


def test_other_parts_are_left_out() -> None:
    assert left_out("mtp.layers.0.norm.weight") and left_out("model.visual.merger.norm.weight")


@pytest.mark.parametrize(
    ("family", "changed", "says"),
    [
        ("qwen3_moe", {"model_type": "llama"}, "choices are qwen3_moe, qwen2_moe, olmoe, mixtral, qwen3_5_moe"),
        ("qwen3_moe", {"model_type": None}, "model_type is None"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is false, but GGUF's qwen3moe always divides"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is true, but GGUF's olmoe always takes"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is set"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "makes layers without experts"),
        ("qwen3_moe", {"use_sliding_window": True}, "sliding_window limits attention"),
        ("mixtral", {"sliding_window": 64}, "sliding_window limits attention"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("qwen3_moe", {"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ("mixtral", {"head_dim": 15}, "head_dim is 15, and pairs are rotated"),
        ("mixtral", {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 4 heads"),
        ("qwen3_moe", {"vocab_size": None}, "vocab_size is missing"),
        ("qwen3_moe", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("qwen3_moe", {"rope_parameters": None}, "rope_theta is None"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "choices are default, linear"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is None"),
        ("qwen3_5_moe", {"linear_value_head_dim": 64}, "linear_value_head_dim is 64"),
        ("qwen3_5_moe", {"linear_num_key_heads": 4}, "does not divide 6 value heads"),
        ("qwen3_5_moe", {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types do not repeat"),
        ("qwen3_5_moe", {"layer_types": ["linear_attention"] * 4, "full_attention_interval": 9}, "leave none of 4"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(family: str, changed: dict[str, Any], says: str) -> None:
    said = config_of(family, **changed)
    with pytest.raises(InputError) as caught:
        read_config(said, "config.json")
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_spoilt_configuration_is_refused_in_a_line_or_has_a_shape(family: str) -> None:
    rng, said, refused = random.Random(family), json.loads(json.dumps(config_of(family))), 0
    for _ in range(300):
        try:
            weights(read_config(spoilt(said, rng), "config.json"))
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert 30 < refused < 300


def test_a_model_with_other_modalities_is_its_text_part() -> None:
    inner = config_of("qwen3_5_moe")
    outer = {"model_type": "qwen3_5_moe", "vision_config": {"hidden_size": 8}, "text_config": inner}
    assert weights(read_config(outer, "here"))[0] == weights(read_config(inner, "here"))[0]


def test_older_files_spell_rope_apart() -> None:
    said = config_of("qwen3_moe")
    del said["rope_parameters"]
    said |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_config(said, "here").rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
