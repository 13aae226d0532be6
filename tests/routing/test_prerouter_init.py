"""Untrained heads are the next layer's router, for routers of any type, with or without bias, and can learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_heads import defined_logits
from models.family_file import FamilyFile
from run_heads import LIBRARY, computed, distance, logits, states
from tiny import StoredModel, T, write_tiny

from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.gguf import open_gguf
from sluice.models import family_of
from sluice.models.fingerprint import fingerprint
from sluice.pack import pack
from sluice.routing import Heads, PrerouterFile, init_prerouter, open_prerouter

SMALL: dict[str, Any] = {"n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 96,
                         "expert_type": T.Q8_0}  # fmt: skip


def made(model: StoredModel, out: Path, **options: Any) -> PrerouterFile:
    init_prerouter(model.path, out, load_library(), **options)
    return open_prerouter(out)


def with_router_bias(path: Path) -> StoredModel:
    """A gpt-oss model, whose routers have biases."""
    n_embd, n_head, n_expert, n_ff = 64, 2, 5, 96
    file = FamilyFile("gpt-oss", pre="gpt-4o")
    file.metadata({
        "block_count": 3, "embedding_length": n_embd, "feed_forward_length": n_ff, "attention.head_count": n_head,
        "attention.head_count_kv": 1, "attention.key_length": 32, "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 12, "rope.freq_base": 1e4,
        "expert_count": n_expert, "expert_used_count": 2, "expert_feed_forward_length": n_ff,
    })  # fmt: skip
    file.embeddings(T.F32, n_embd)
    for layer in range(3):
        block = f"blk.{layer}."
        file.norm(f"{block}attn_norm", n_embd)
        file.norm(f"{block}post_attention_norm", n_embd)
        for part, width in (("q", n_head * 32), ("k", 32), ("v", 32)):
            file.matrix(f"{block}attn_{part}", T.F32, width, n_embd)
            file.bias(f"{block}attn_{part}", width)
        file.matrix(f"{block}attn_output", T.F32, n_embd, n_head * 32)
        file.bias(f"{block}attn_output", n_embd)
        file.vector(f"{block}attn_sinks.weight", np.ones(n_head))
        file.matrix(f"{block}ffn_gate_inp", T.F32, n_expert, n_embd)
        file.bias(f"{block}ffn_gate_inp", n_expert)
        file.experts(block, T.F32, n_expert, n_ff, n_embd)
        for part, width in (("gate", n_ff), ("up", n_ff), ("down", n_embd)):
            file.bias(f"{block}ffn_{part}_exps", n_expert, width)
    return file.write(path)


def test_heads_are_the_next_router_bit_for_bit(tmp_path: Path) -> None:
    """As the engine would compute that router itself: it is float32 in the file."""
    model = write_tiny(tmp_path / "m.gguf", **SMALL)
    file = made(model, tmp_path / "h.safetensors", hidden=24)
    h, here, before = states(file.info, 7, 2)
    with Heads(LIBRARY, file) as heads:
        heads.load()
        assert heads.predicts == {0: 1, 1: 2}
        for owner, ids in ((0, None), (1, before)):
            router = model.weights[f"blk.{owner + 1}.ffn_gate_inp.weight"]
            expected = computed(lambda c, w, h: c.mul_mat(w, h), router, h)
            assert np.array_equal(logits(heads, owner, h, here, ids), expected)


def test_a_routers_bias_is_part_of_the_skip_path(tmp_path: Path) -> None:
    model = with_router_bias(tmp_path / "m.gguf")
    file = made(model, tmp_path / "h.safetensors")
    h, here, before = states(file.info, 3, 2)
    with Heads(LIBRARY, file) as heads:
        heads.load()
        router, bias = (model.weights[f"blk.2.ffn_gate_inp.{part}"] for part in ("weight", "bias"))
        expected = computed(lambda c, w, b, h: c.add(c.mul_mat(w, h), b), router, bias, h)
        assert np.array_equal(logits(heads, 1, h, here, before), expected)
        assert distance(expected, h @ router.T) > 0.05


@pytest.mark.parametrize("router_type", [T.F16, T.BF16, T.Q8_0, T.Q4_K, T.MXFP4])
def test_routers_of_other_types_are_widened(tmp_path: Path, router_type: T) -> None:
    model = write_tiny(tmp_path / "m.gguf", n_layers=2, router_type=router_type, expert_type=T.Q8_0)
    file = made(model, tmp_path / "h.safetensors")
    skip = file.tensors["blk.0.skip.weight"].read()
    assert skip.dtype == np.float32
    assert np.array_equal(skip, model.weights["blk.1.ffn_gate_inp.weight"])


def test_float16_is_half_as_large(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL)
    wide, half = made(model, tmp_path / "w.safetensors"), made(model, tmp_path / "h.safetensors", type="f16")
    assert {tensor.kind for tensor in half.tensors.values()} == {"F16"}
    assert half.path.stat().st_size < 0.53 * wide.path.stat().st_size
    for name, tensor in wide.tensors.items():
        assert np.array_equal(half.tensors[name].read(), tensor.read().astype(np.float16))


def test_layers_without_experts_are_passed_over(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", n_layers=6, dense_layers=(0, 2), **SMALL)
    file = made(model, tmp_path / "h.safetensors")
    assert file.info.predicts == {1: 3, 3: 4, 4: 5}
    assert file.info.first_predicted == 3
    assert [file.info.reads_before(owner) for owner in file.info.owners] == [False, False, True]
    assert np.array_equal(file.tensors["blk.1.skip.weight"].read(), model.weights["blk.3.ffn_gate_inp.weight"])


def test_the_file_is_the_models_own(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL)
    file = made(model, tmp_path / "h.safetensors")
    packed = pack(model.path, tmp_path / "p.gguf", LIBRARY).path
    for path in (model.path, packed):
        opened = open_gguf(path, LIBRARY)
        spec = family_of(opened).read_spec(opened)
        file.check_model(spec, fingerprint=fingerprint(opened, spec))
    other = open_gguf(write_tiny(tmp_path / "o.gguf", seed=1, **SMALL).path, LIBRARY)
    spec = family_of(other).read_spec(other)
    with pytest.raises(InputError, match="other router weights"):
        file.check_model(spec, fingerprint=fingerprint(other, spec))


def test_a_seed_draws_the_same_and_another_another(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL)
    one, again, other = (made(model, tmp_path / f"{i}", seed=seed) for i, seed in enumerate((5, 5, 6)))
    assert one.path.read_bytes() == again.path.read_bytes()
    assert not np.array_equal(one.tensors["blk.0.fc1.weight"].read(), other.tensors["blk.0.fc1.weight"].read())
    assert not np.array_equal(one.tensors["blk.0.fc1.weight"].read(), one.tensors["blk.1.fc1.weight"].read())
    assert one.info.training == {"stage": "init", "seed": 5}


def test_an_untrained_head_can_learn(tmp_path: Path) -> None:
    """A step down the gradient of fc2 moves its logits towards any others."""
    model = write_tiny(tmp_path / "m.gguf", **SMALL)
    file = made(model, tmp_path / "h.safetensors")
    tensors = {name: tensor.read() for name, tensor in file.tensors.items()}
    h, here, before = states(file.info, 64, 2)
    wanted = np.random.default_rng(0).standard_normal((64, 8))
    old = defined_logits(tensors, 1, 8, h, here, before)
    # logits are linear in fc2, so its features are what fc2 = identity, without the skip path, gives
    n = file.hidden(1)
    probe = tensors | {"blk.1.fc2.weight": np.eye(n, dtype=np.float32), "blk.1.fc2.bias": np.zeros(n, np.float32),
                       "blk.1.skip.weight": np.zeros((n, 64), np.float32)}  # fmt: skip
    features = defined_logits(probe, 1, 8, h, here, before)
    tensors["blk.1.fc2.weight"] = (0.05 * (wanted - old).T @ features).astype(np.float32)
    new = defined_logits(tensors, 1, 8, h, here, before)
    assert np.linalg.norm(wanted - new) < 0.95 * np.linalg.norm(wanted - old)


# --- refusals


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"hidden": 0}, "--hidden 0 is out of range"),
        ({"hidden": 65537}, "--hidden 65537 is out of range"),
        ({"seed": -1}, "--seed -1 is out of range"),
        ({"type": "q8_0"}, "--type 'q8_0' is unknown: choose from f32, f16"),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL)
    with pytest.raises(InputError, match=complaint):
        made(model, tmp_path / "h", **options)
    assert not (tmp_path / "h").exists()


def test_a_model_with_one_layer_of_experts_has_nothing_to_predict(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", n_layers=2, dense_layers=(0,), **SMALL)
    with pytest.raises(InputError, match="nothing to predict from"):
        made(model, tmp_path / "h")


def test_the_model_is_never_overwritten(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL)
    before = model.path.read_bytes()
    for force in (False, True):
        with pytest.raises(InputError, match="made from"):
            made(model, model.path, force=force)
    assert model.path.read_bytes() == before


@pytest.mark.parametrize(("value", "complaint"), [(np.nan, "damaged"), (1e9, "too large for float16: use --type f32")])
def test_routers_that_make_no_heads(tmp_path: Path, value: float, complaint: str) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL)
    router = model.stored["blk.1.ffn_gate_inp.weight"][0]
    content = model.path.read_bytes()
    assert content.count(router.tobytes()) == 1
    spoilt = router.copy()
    spoilt[3, 5] = value
    model.path.write_bytes(content.replace(router.tobytes(), spoilt.tobytes()))
    with pytest.raises(InputError, match=f"blk.1.ffn_gate_inp.weight .*{complaint}"):
        made(model, tmp_path / "h", type="f16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
