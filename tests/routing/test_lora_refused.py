"""Adapters that are damaged, of another kind or for another model are refused by name, in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import linear_names, random_factors, write_adapter
from tiny import T, TinyModel, write_tiny

from sluice.errors import InputError
from sluice.ggml import Library, load_library
from sluice.gguf import open_gguf
from sluice.models import family_of
from sluice.routing.lora import LoraWeights
from sluice.routing.lora_file import Adapter, open_adapter
from sluice.safetensors_file import write_safetensors

Q = "blk.1.attn_q.weight"
EXPERTS = "blk.1.ffn_up_exps.weight"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny(tmp_path_factory.mktemp("model") / "m.gguf", expert_type=T.F32, dense_type=T.F32)


def read(path: Path, model: TinyModel, library: Library) -> Adapter:
    """Opens an adapter and reads its numbers."""
    file = open_gguf(model.path, library)
    adapter = open_adapter(path, file, family_of(file).read_spec(file), library)
    with LoraWeights(library, [(adapter, 1.0)]) as weights:
        weights.load()
    return adapter


def refusal(path: Path, model: TinyModel, library: Library) -> str:
    with pytest.raises(InputError) as caught:
        read(path, model, library)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    return text


# --- GGUF


def _drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def _replaced(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = np.ascontiguousarray(make(tensors[name]))

    return change


def _renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for part in "ab":
            tensors[f"{new}.lora_{part}"] = tensors.pop(f"{old}.lora_{part}")

    return change


def _with(name: str, *shape: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = np.ones(shape, np.float32)

    return change


def _nan(values: np.ndarray) -> np.ndarray:
    spoilt = values.copy()
    spoilt.reshape(-1)[-1] = np.nan
    return spoilt


SPOILT: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "half is missing": (_drop(f"{Q}.lora_b"), f"lora_a of {Q} without its other half"),
    "longer input": (_replaced(f"{Q}.lora_a", lambda a: a.repeat(2, axis=-1)), f"lora_a of {Q} is \\[512, 4\\]"),
    "shorter output": (_replaced(f"{Q}.lora_b", lambda b: b[:-1]), f"lora_b of {Q} is \\[4, 255\\]"),
    "other rank": (_replaced(f"{Q}.lora_b", lambda b: b[:, :-1]), f"lora_b of {Q} is \\[3, 256\\]"),
    "fewer experts": (_replaced(f"{EXPERTS}.lora_b", lambda b: b[:-1]), f"lora_b of {EXPERTS}"),
    "no experts": (_replaced(f"{EXPERTS}.lora_a", lambda a: a[:3]), f"lora_a of {EXPERTS}"),
    "NaN": (_replaced(f"{Q}.lora_a", _nan), f"A of {Q} holds numbers that are not finite"),
    "NaN of an expert": (_replaced(f"{EXPERTS}.lora_b", _nan), f"B of {EXPERTS} holds numbers that are not finite"),
    "layer that isn't there": (_renamed(Q, "blk.7.attn_q.weight"), "adapts blk.7.attn_q.weight, no linear map"),
    "embeddings": (_renamed(Q, "token_embd.weight"), "adapts token_embd.weight, embeddings"),
    "norm": (_renamed(Q, "blk.1.attn_norm.weight"), "adapts blk.1.attn_norm.weight, a norm"),
    "whole norm": (_with("blk.1.attn_norm.weight", 256), "holds blk.1.attn_norm.weight, which is no part of a LoRA"),
    "experts twice": (
        _renamed("blk.2.ffn_up_exps.weight", "blk.1.ffn_gate_up_exps.weight"),
        "blk.1.ffn_(gate|up)_exps.weight",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_gguf(tmp_path: Path, model: TinyModel, library: Library, name: str) -> None:
    change, complaint = SPOILT[name]
    factors = random_factors(model, linear_names(model), 4)
    path = write_adapter(tmp_path / "a.gguf", "qwen3moe", factors, change=change)
    assert re.search(complaint, refusal(path, model, library))


@pytest.mark.parametrize(
    ("architecture", "keys", "complaint"),
    [
        ("llama", {}, "general.architecture is 'llama': for another model than this qwen3moe"),
        ("qwen3moe", {"general.type": "model"}, "general.type is 'model': no adapter"),
        ("qwen3moe", {"general.type": None}, "general.type is None: no adapter"),
        ("qwen3moe", {"adapter.type": "ia3"}, "adapter.type is 'ia3': no LoRA adapter"),
        ("qwen3moe", {"adapter.lora.alpha": "a lot"}, "adapter.lora.alpha is 'a lot', not a number"),
        ("qwen3moe", {"adapter.alora.invocation_tokens": [1, 2]}, "is applied after certain tokens only"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_gguf_of_another_kind(
    tmp_path: Path, model: TinyModel, library: Library, architecture: str, keys: dict[str, Any], complaint: str
) -> None:
    alpha = None if "adapter.lora.alpha" in keys else 16.0
    factors = random_factors(model, [Q], 4)
    path = write_adapter(tmp_path / "a.gguf", architecture, factors, keys=keys, alpha=alpha)
    assert complaint in refusal(path, model, library)


def test_a_model_is_no_adapter(tmp_path: Path, model: TinyModel, library: Library) -> None:
    assert "general.type is None: no adapter" in refusal(model.path, model, library)
    assert "no such adapter" in refusal(tmp_path / "absent.gguf", model, library)


def test_an_adapter_for_a_wider_model(tmp_path: Path, model: TinyModel, library: Library) -> None:
    wider = write_tiny(tmp_path / "wide.gguf", n_embd=512, expert_type=T.F32, dense_type=T.F32)
    path = write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(wider, linear_names(wider), 4))
    assert "the adapter is for another model" in refusal(path, model, library)


def test_a_truncated_gguf(tmp_path: Path, model: TinyModel, library: Library) -> None:
    path = write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(model, [Q], 4))
    whole = path.read_bytes()
    for n in (0, 3, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        refusal(path, model, library)


# --- PEFT

BASE = "base_model.model.model.layers.1."
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": True, "bias": "none"}


def peft_tensors() -> Tensors:
    rng = np.random.default_rng(0)

    def pair(name: str, rank: int, n_in: int, n_out: int) -> Tensors:
        return {
            f"{BASE}{name}.lora_A.weight": rng.standard_normal((rank, n_in), dtype=np.float32),
            f"{BASE}{name}.lora_B.weight": rng.standard_normal((n_out, rank), dtype=np.float32),
        }

    return pair("self_attn.q_proj", 4, 256, 256) | pair("mlp.experts.3.up_proj", 4, 256, 256)


def write_peft(folder: Path, config: dict[str, Any] | bytes, tensors: Tensors) -> Path:
    folder.mkdir()
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "adapter_config.json").write_bytes(raw)
    write_safetensors(folder / "adapter_model.safetensors", tensors, {})
    return folder


def test_what_the_refusals_spoil_is_sound(tmp_path: Path, model: TinyModel, library: Library) -> None:
    folder = write_peft(tmp_path / "a", CONFIG, peft_tensors())
    for path in (folder, folder / "adapter_model.safetensors"):
        adapter = read(path, model, library)
        assert set(adapter.updates) == {Q, EXPERTS} and adapter.ranks == (4, 4)
    a, b = adapter.updates[EXPERTS].factors()
    assert a.shape == (8, 4, 256) and b.shape == (8, 256, 4)
    assert not a[[0, 1, 2, 4, 5, 6, 7]].any() and np.allclose(
        b[3], 2 * peft_tensors()[f"{BASE}mlp.experts.3.up_proj.lora_B.weight"]
    )


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"r": 9, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {r"layers\.\d+\.self_attn.q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"v_proj": 100, "^model.layers.1.self_attn.q_proj": 12, "q_proj": 1}}, 3.0),
        ({"rank_pattern": {r".*\.q_proj": 4}, "r": 5}, 2.0),
    ],
    ids=str,
)
def test_scales(tmp_path: Path, model: TinyModel, library: Library, more: dict[str, Any], scale: float) -> None:
    tensors = {name: values for name, values in peft_tensors().items() if "q_proj" in name}
    adapter = read(write_peft(tmp_path / "a", CONFIG | more, tensors), model, library)
    assert np.allclose(adapter.updates[Q].factors()[1], scale * tensors[f"{BASE}self_attn.q_proj.lora_B.weight"])


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (b"[]", "no JSON object"),
        (b"{", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (CONFIG | {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (CONFIG | {"use_dora": True}, "use_dora is set"),
        (CONFIG | {"lora_bias": True}, "lora_bias is set"),
        (CONFIG | {"bias": "all"}, "bias is 'all'"),
        (CONFIG | {"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        (CONFIG | {"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        (CONFIG | {"layer_replication": [[0, 1]]}, "layer_replication is set"),
        (CONFIG | {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        (CONFIG | {"init_lora_weights": ["olora"]}, "init_lora_weights is ['olora']"),
        (CONFIG | {"r": 0}, "has the rank 0"),
        (CONFIG | {"r": "four"}, "r is 'four'"),
        (CONFIG | {"r": True}, "r is True"),
        (CONFIG | {"lora_alpha": None}, "lora_alpha is None"),
        (CONFIG | {"lora_alpha": float("nan")}, "lora_alpha is nan"),
        (CONFIG | {"use_rslora": "yes"}, "use_rslora is 'yes'"),
        (CONFIG | {"rank_pattern": [4]}, "rank_pattern is [4]"),
        (CONFIG | {"rank_pattern": {"q_proj": "4"}}, "rank_pattern is '4'"),
        (CONFIG | {"rank_pattern": {"(a+)+b": 4}}, "the pattern '(a+)+b' is more than the end of a name"),
        (CONFIG | {"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern is 'x'"),
        (CONFIG | {"r": 8}, "which the rank of 8 that its configuration says contradicts"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_peft_of_another_kind(
    tmp_path: Path, model: TinyModel, library: Library, config: dict[str, Any] | bytes, complaint: str
) -> None:
    assert complaint in refusal(write_peft(tmp_path / "a", config, peft_tensors()), model, library)


A, B = f"{BASE}self_attn.q_proj.lora_A.weight", f"{BASE}self_attn.q_proj.lora_B.weight"


def _peft_renamed(module: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for part in "AB":
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = tensors.pop(
                f"{BASE}self_attn.q_proj.lora_{part}.weight"
            )

    return change


SPOILT_PEFT: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "half is missing": (_drop(B), "holds only lora_A of 'model.layers.1.self_attn.q_proj'"),
    "longer input": (
        _replaced(A, lambda a: a.repeat(2, axis=-1)),
        "lora_A of 'model.layers.1.self_attn.q_proj' is [4, 512]",
    ),
    "shorter output": (_replaced(B, lambda b: b[:-1]), "lora_B of 'model.layers.1.self_attn.q_proj' is [255, 4]"),
    "other rank": (_replaced(B, lambda b: b[:, :3]), "contradicts"),
    "no matrix": (_replaced(A, lambda a: a[0]), "no matrix's"),
    "NaN": (_replaced(B, _nan), f"B of {Q} holds numbers that are not finite"),
    "magnitudes": (_with(f"{BASE}self_attn.q_proj.lora_magnitude_vector", 256), "no A or B of a LoRA"),
    "a bias": (_with(f"{BASE}self_attn.q_proj.lora_B.bias", 256), "no A or B of a LoRA"),
    "a layer that isn't there": (_peft_renamed("model.layers.9.self_attn.q_proj"), "no linear map of this model"),
    "embeddings": (_peft_renamed("model.embed_tokens"), "adapts 'model.embed_tokens', embeddings"),
    "a norm": (_peft_renamed("model.layers.1.input_layernorm"), "no linear map that Sluice knows in qwen3moe"),
    "a vision tower": (_peft_renamed("model.visual.layers.1.self_attn.q_proj"), "no linear map that Sluice knows"),
    "another family's": (_peft_renamed("model.layers.1.linear_attn.in_proj_z"), "no linear map of this model"),
    "an expert that isn't there": (_peft_renamed("model.layers.1.mlp.experts.8.up_proj"), "the model has 8 experts"),
    "experts in one, too few": (_peft_renamed("model.layers.1.mlp.experts"), "for each of 8 experts"),
    "experts of a layer that isn't there": (_peft_renamed("model.layers.9.mlp.experts"), "layer 9 has no experts"),
}


@pytest.mark.parametrize("name", SPOILT_PEFT)
def test_spoilt_peft(tmp_path: Path, model: TinyModel, library: Library, name: str) -> None:
    change, complaint = SPOILT_PEFT[name]
    tensors = peft_tensors()
    change(tensors)
    assert complaint in refusal(write_peft(tmp_path / "a", CONFIG, tensors), model, library)


def test_a_folder_without_weights(tmp_path: Path, model: TinyModel, library: Library) -> None:
    (tmp_path / "a").mkdir()
    assert "name a directory that PEFT saved" in refusal(tmp_path / "a", model, library)
    (tmp_path / "a/adapter_model.bin").touch()
    assert "PyTorch's pickle, which may run anything" in refusal(tmp_path / "a", model, library)
    (tmp_path / "a/adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    assert "adapter_config.json: can't be read" in refusal(tmp_path / "a", model, library)
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(CONFIG))
    assert "no safetensors file" in refusal(tmp_path / "a", model, library)
