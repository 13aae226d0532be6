"""A GGUF file's weights in a torch model: gguf-py's numbers, transformers' names, bit for bit after an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hf_models import FAMILY_NAMES, logits_of, random_model, save_model
from oracles import llamacpp_logits

from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.pack import pack
from sluice.train.gguf_in import GgufWeights
from sluice.train.gguf_out import export_gguf

torch.set_num_threads(1)


def exported(model: Any, folder: Path, type: str = "f32", name: str = "m.gguf") -> Path:
    save_model(model, folder / "model")
    export_gguf(folder / "model", folder / name, load_library(), type=type, force=True)
    return folder / name


def read(path: Path, model: Any) -> GgufWeights:
    return GgufWeights(path, model.config.to_dict(), load_library())


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_exported_and_read_every_bit_is_the_same(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    path = exported(model, tmp_path)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    found = read(path, model).state_dict()
    assert list(found) != [] and set(found) == set(state)
    inexact = set()
    for name, values in state.items():
        assert found[name].dtype == np.float32
        if not np.array_equal(found[name], values):
            inexact.add(name)
            np.testing.assert_allclose(found[name], values, atol=1.2e-7, rtol=1e-6)
    # To 1 + w and to -exp w, which is what these files hold, no float32 is the only one that leads.
    allowed = {name for name in state if "norm" in name or "A_log" in name} if family == "qwen3_5_moe" else set()
    assert inexact <= allowed
    other = random_model(family, seed=1)
    read(path, other).load_into(other)
    again = exported(other, tmp_path, name="again.gguf")
    assert again.read_bytes() == path.read_bytes()


def test_norms_that_one_more_is_exact_of_come_back_to_the_bit(tmp_path: Path) -> None:
    model = random_model("qwen3_5_moe")
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "norm" in name:
                values.copy_((values * 4096).round() / 4096)
    found = read(exported(model, tmp_path), model).state_dict()
    for name, values in model.state_dict().items():
        assert np.array_equal(found[name], values.numpy()) or "A_log" in name, name


def test_a_tied_head_is_the_embeddings(tmp_path: Path) -> None:
    model = random_model("qwen3_moe", tie_word_embeddings=True)
    weights = read(exported(model, tmp_path), model)
    assert "lm_head.weight" not in dict(weights.tensors())
    state = weights.state_dict()
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()}, strict=True)
    other = random_model("qwen3_moe", seed=1, tie_word_embeddings=True)
    weights.load_into(other)
    np.testing.assert_array_equal(logits_of(other, [1, 2, 3]), logits_of(model, [1, 2, 3]))


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0", "q4_k", "q3_k", "q2_k", "iq4_xs", "mxfp4"])
def test_numbers_are_the_gguf_packages(type: str, tmp_path: Path) -> None:
    model = random_model("mixtral", hidden_size=256, intermediate_size=256)
    path = exported(model, tmp_path, type)
    stored = {
        t.name: gguf.quants.dequantize(np.asarray(t.data), t.tensor_type).reshape(t.shape[::-1])
        for t in gguf.GGUFReader(path).tensors
    }
    found = read(path, model).state_dict()

    def same(mine: np.ndarray, name: str) -> None:
        # ggml and gguf-py multiply a block's scale and its number in another order here and there
        np.testing.assert_allclose(mine, stored[name], rtol=1e-6, atol=1e-7, err_msg=name)

    assert np.linalg.norm(found["lm_head.weight"] - model.lm_head.weight.detach().numpy()) > 0
    same(found["lm_head.weight"], "output.weight")
    for i in range(2):
        there = f"model.layers.{i}."
        both = found[there + "mlp.experts.gate_up_proj"]
        same(both[:, :256], f"blk.{i}.ffn_gate_exps.weight")
        same(both[:, 256:], f"blk.{i}.ffn_up_exps.weight")
        same(found[there + "mlp.experts.down_proj"], f"blk.{i}.ffn_down_exps.weight")
        same(found[there + "self_attn.v_proj.weight"], f"blk.{i}.attn_v.weight")
        same(found[there + "post_attention_layernorm.weight"], f"blk.{i}.ffn_norm.weight")
        q = found[there + "self_attn.q_proj.weight"].reshape(4, 2, 32, 256).swapaxes(1, 2).reshape(256, 256)
        same(q, f"blk.{i}.attn_q.weight")


def test_a_student_computes_what_the_file_does(tmp_path: Path) -> None:
    """Engines also round activations to 8 bits before a product; that, and not the weights, is what is left."""
    model, ids = random_model("qwen3_moe", num_experts=6), list(range(40, 104))
    path = exported(model, tmp_path, "q4_0")
    student = random_model("qwen3_moe", seed=1, num_experts=6)
    read(path, student).load_into(student)
    plain, quantised = logits_of(model, ids), logits_of(student, ids)
    theirs = llamacpp_logits(path, ids, chunk=1)
    moved = np.linalg.norm(plain - quantised)
    assert np.linalg.norm(theirs - quantised) < 0.5 * moved < 0.5 * np.linalg.norm(plain)
    # with weights that are stored without rounding nothing is left
    again = exported(student, tmp_path, name="f32.gguf")
    expected = llamacpp_logits(again, ids)
    assert np.linalg.norm(quantised - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_a_packed_file_has_the_same_weights(type: str, tmp_path: Path) -> None:
    model = random_model("qwen3_moe")
    path = exported(model, tmp_path, type)
    pack(path, tmp_path / "packed.gguf", load_library())
    packed = read(tmp_path / "packed.gguf", model).state_dict()
    for name, values in read(path, model).state_dict().items():
        np.testing.assert_array_equal(packed[name], values)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_experts_per_tok": 3}, "expert_used_count is 2, not 3: it is another model than this qwen3_moe"),
        ({"num_hidden_layers": 3}, "block_count is 2, not 3"),
        ({"num_attention_heads": 8, "head_dim": 16}, "attention.head_count is 4, not 8"),
        ({"num_experts": 4}, "blk.0.ffn_gate_inp.weight is [8, 64], not [4, 64]"),
        ({"moe_intermediate_size": 64}, "blk.0.ffn_gate_exps.weight is [8, 32, 64], not [8, 64, 64]"),
        ({"rms_norm_eps": 1e-5}, "attention.layer_norm_rms_epsilon is 9.99"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, "rope.freq_base is 10000.0, not 50000.0"),
        ({"vocab_size": 321}, "token_embd.weight is [320, 64], not [321, 64]"),
        ({"tie_word_embeddings": True}, "holds output.weight, which the model lacks"),
    ],
)
def test_another_model_is_refused_by_name(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = exported(random_model("qwen3_moe"), tmp_path)
    with pytest.raises(InputError) as caught:
        read(path, random_model("qwen3_moe", **changed))
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    path = exported(random_model("olmoe"), tmp_path)
    with pytest.raises(InputError, match="is 'olmoe', not qwen3moe: it is another model than this qwen3_moe"):
        read(path, random_model("qwen3_moe"))
    untied = exported(random_model("qwen3_moe", tie_word_embeddings=True), tmp_path)
    with pytest.raises(InputError, match=r"has no output\.weight"):
        read(untied, random_model("qwen3_moe"))
    with pytest.raises(InputError, match=r"the model has no model\.layers\.0\.self_attn"):
        model = random_model("qwen3_moe", tie_word_embeddings=True)
        read(untied, model).load_into(random_model("mixtral"))


def test_a_file_that_shrinks_is_said(tmp_path: Path) -> None:
    model = random_model("qwen3_moe")
    path = exported(model, tmp_path)
    weights = read(path, model)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match="became shorter while it was read"):
        weights.state_dict()


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.ffn_down_exps.weight"])
def test_numbers_that_are_not_finite_are_refused(name: str, tmp_path: Path) -> None:
    model = random_model("qwen3_moe")
    path = exported(model, tmp_path, "q8_0")
    weights = read(path, model)
    info = weights.file.tensors[name]
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(np.float16("nan").tobytes())  # the first block's scale
    with pytest.raises(InputError, match="not finite: it is damaged"):
        weights.load_into(model)
