"""Adapters beside the weights: llama.cpp's logits, merged weights' logits, and equal bits however experts arrive."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from adapters import linear_names, merged, random_factors, write_adapter
from engine.harness import Prompt, assert_same_bits, opened, ordered, resident, run, run_together
from oracles import llamacpp_adapted, llamacpp_logits
from tiny import T, TinyModel, quantize, write_tiny

from sluice.config import EngineConfig, parse_lora
from sluice.engine import Engine
from sluice.engine.budget import budget_for
from sluice.errors import BudgetError, InputError
from sluice.ggml import load_library
from sluice.gguf import open_gguf
from sluice.models import family_of
from sluice.routing.lora import LoraWeights
from sluice.routing.lora_file import open_adapter
from sluice.routing.prerouter_init import init_prerouter

IDS = np.random.default_rng(4).integers(0, 397, 96).tolist()
PREFIX = 24


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.fixture
def model(tmp_path: Path) -> TinyModel:
    return write_tiny(tmp_path / "m.gguf", expert_type=T.F32, dense_type=T.F32)


def test_agrees_with_llamacpp_on_every_linear_map(tmp_path: Path, model: TinyModel) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(model, linear_names(model), 5))
    expected = llamacpp_adapted(model.path, IDS, [(adapter, 0.5)])
    with opened(model.path, kv="f32", expert_slots=3, lora=[(adapter, 0.5)]) as engine:
        found, decoded = engine.logits(IDS), run(engine, Prompt(IDS[:PREFIX], IDS[PREFIX:]))
        assert engine.mode["lora"] == [{"file": str(adapter), "scale": 0.5, "matrices": 25, "ranks": [5, 5]}]
    assert relative_l2(expected, llamacpp_logits(model.path, IDS)) > 0.1
    assert relative_l2(found, expected) <= 1e-4  # Measured: 5e-7.
    assert relative_l2(decoded, expected[PREFIX - 1 :]) <= 1e-4


@pytest.mark.parametrize("name", ["attn_q", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_down_exps", "output"])
def test_agrees_with_llamacpp_on_one_kind(tmp_path: Path, model: TinyModel, name: str) -> None:
    names = [it for it in linear_names(model) if it.rpartition(".")[0].rpartition(".")[2] == name]
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(model, names, 4))
    expected = llamacpp_adapted(model.path, IDS, [(adapter, 1.0)])
    with opened(model.path, kv="f32", expert_slots=3, lora=[str(adapter)]) as engine:
        assert relative_l2(engine.logits(IDS), expected) <= 1e-4
    assert relative_l2(expected, llamacpp_logits(model.path, IDS)) > 0.01


def test_several_adapters_with_scales_and_ranks_of_their_own(tmp_path: Path, model: TinyModel) -> None:
    names = linear_names(model)
    given = [
        (write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(model, names, 3), alpha=7.0), 0.5),
        (write_adapter(tmp_path / "b.gguf", "qwen3moe", random_factors(model, names[3:9], 16, seed=1)), -0.25),
        (write_adapter(tmp_path / "c.gguf", "qwen3moe", random_factors(model, names[8:], 1, seed=2), alpha=None), 0.3),
    ]
    expected = llamacpp_adapted(model.path, IDS, given)
    with opened(model.path, kv="f32", expert_slots=3, lora=given) as engine:
        assert relative_l2(engine.logits(IDS), expected) <= 1e-4
    with opened(model.path, kv="f32", expert_slots=3, lora=given[:2]) as engine:
        assert relative_l2(engine.logits(IDS), expected) > 0.01


@pytest.mark.parametrize("t", [T.F16, T.BF16, T.Q8_0])
def test_adapters_in_other_types(tmp_path: Path, model: TinyModel, t: T) -> None:
    factors = random_factors(model, linear_names(model), 32)
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", factors, t=t)
    with opened(model.path, kv="f32", expert_slots=3, lora=[adapter]) as engine:
        found = engine.logits(IDS)
    stored = {name: (rounded(a, t), rounded(b, t)) for name, (a, b) in factors.items()}
    again = write_adapter(tmp_path / "b.gguf", "qwen3moe", stored)
    # llama.cpp multiplies by these in the type they have, which rounds what they are multiplied by
    assert relative_l2(found, llamacpp_adapted(model.path, IDS, [(again, 1.0)])) <= 1e-4


def rounded(values: np.ndarray, t: T) -> np.ndarray:
    return gguf.quants.dequantize(quantize(values, t), t).astype(np.float32)


@pytest.mark.parametrize("options", [{"fused": True}, {"tied": True}, {"arch": "llama"}], ids=str)
def test_is_the_model_with_merged_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    model = write_tiny(tmp_path / "m.gguf", expert_type=T.F32, dense_type=T.F32, **options)
    factors = random_factors(model, linear_names(model), 6)
    adapter = write_adapter(tmp_path / "a.gguf", model.config.arch, factors, alpha=3.0)
    other = written(model, tmp_path / "merged.gguf", merged(model, factors, 0.5 * 3.0 / 6))
    with opened(other, kv="f32", expert_slots=3) as engine:
        expected = engine.logits(IDS)
    with opened(model.path, kv="f32", expert_slots=3, lora=[(adapter, 0.5)]) as engine:
        assert relative_l2(engine.logits(IDS), expected) <= 1e-5


def written(model: TinyModel, path: Path, weights: dict[str, np.ndarray]) -> Path:
    """The model's file with other float32 weights: gguf's bytes are replaced where they lie."""
    data = bytearray(model.path.read_bytes())
    for name, info in open_gguf(model.path, load_library()).tensors.items():
        data[info.offset : info.offset + info.n_bytes] = np.ascontiguousarray(weights[name], np.float32).tobytes()
    path.write_bytes(data)
    return path


def test_streamed_is_resident_bit_for_bit(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf")
    adapters = [
        write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(model, linear_names(model), 16)),
        write_adapter(tmp_path / "b.gguf", "qwen3moe", random_factors(model, linear_names(model)[2:7], 3, seed=1)),
    ]
    rng = np.random.default_rng(5)
    prompts = [
        Prompt(rng.integers(0, 397, n).tolist(), rng.integers(0, 397, m).tolist())
        for n, m in ((33, 5), (1, 9), (70, 2), (7, 6), (514, 2))
    ]
    with resident(model.path, ctx=600, lora=adapters) as engine:
        expected = [run(engine, it) for it in prompts]
    for slots, policy, streams, seed in ((2, "lru", 1, 1), (3, "lfu", 5, 2), (5, "cyclic", 5, 3)):
        options = {"expert_slots": slots, "policy": policy, "streams": streams, "ctx": 600, "lora": adapters}
        with opened(model.path, ordered(seed), **options) as engine:
            found = (
                run_together(engine, prompts, random.Random(seed))
                if streams > 1
                else [run(engine, it) for it in prompts]
            )
            assert engine.store.cache.counters.evictions > 0
        for i, rows in enumerate(found):
            assert_same_bits(rows, expected[i], f"{options}, prompt {i}")


def test_adapters_count_in_the_budget(tmp_path: Path, model: TinyModel) -> None:
    factors = random_factors(model, linear_names(model), 64)
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", factors)
    expected = sum(4 * (a.size + b.size) for a, b in factors.values())
    library = load_library()
    file = open_gguf(model.path, library)
    with LoraWeights(
        library, [(open_adapter(adapter, file, family_of(file).read_spec(file), library), 1.0)]
    ) as weights:
        assert expected <= weights.n_bytes <= expected + 128 * len(factors)
    with opened(model.path, expert_slots=2) as engine:
        plain = engine.plan
    with opened(model.path, expert_slots=2, lora=[adapter]) as engine:
        needs = engine.plan.needs
        assert needs.adapters == weights.n_bytes and needs.scratch > plain.needs.scratch
    too_little = budget_for(plain.needs, plain.slot_bytes, 2) + weights.n_bytes // 2
    with pytest.raises(BudgetError, match="the smallest budget that works"):
        Engine(model.path, EngineConfig(ram=too_little, ctx=256, threads=1, lora=((adapter, 1.0),)))


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.gguf", "a.gguf", 1.0),
        ("a.gguf:0.5", "a.gguf", 0.5),
        ("C:\\a:-2", "C:\\a", -2.0),
        ("C:\\a.gguf", "C:\\a.gguf", 1.0),
    ],
)
def test_a_scale_stands_behind_the_last_colon(text: str, path: str, scale: float) -> None:
    assert parse_lora(text) == (Path(path), scale)


@pytest.mark.parametrize("text", ["", ":1", "a.gguf:nan", "a.gguf:inf", "a.gguf:1e300"])
def test_no_file_or_no_scale(text: str) -> None:
    with pytest.raises(InputError, match="is no file and scale"):
        parse_lora(text)


def test_a_file_whose_name_ends_like_a_scale(tmp_path: Path) -> None:
    (tmp_path / "a:2").touch()
    assert parse_lora(f"{tmp_path}/a:2") == (tmp_path / "a:2", 1.0)
    assert parse_lora(f"{tmp_path}/a:2:3") == (tmp_path / "a:2", 3.0)


@pytest.mark.parametrize("slots", [3, 9, 24])
def test_adapters_and_routes_known_ahead(tmp_path: Path, slots: int) -> None:
    model = write_tiny(tmp_path / "m.gguf", expert_type=T.Q8_0)
    adapter = write_adapter(tmp_path / "a.gguf", "qwen3moe", random_factors(model, linear_names(model), 4))
    prompt, trace, heads = Prompt(IDS[:PREFIX], IDS[PREFIX:60]), tmp_path / "t.parquet", tmp_path / "h.safetensors"
    with resident(model.path, lora=[str(adapter)], trace=trace) as engine:
        expected = run(engine, prompt)
    with opened(
        model.path, ordered(2), lora=[str(adapter)], routing="prerouted", routes=trace, expert_slots=slots
    ) as engine:
        assert_same_bits(run(engine, prompt), expected, "by the routes of the adapted model")
        assert engine.stats()["decode"]["prerouter_agreement"] == 1.0
    init_prerouter(model.path, heads, load_library(), hidden=8)
    ahead = {"lora": [str(adapter)], "routing": "prerouted", "prerouter": heads}
    with opened(model.path, expert_slots=24, prefetch=False, overlap=False, **ahead) as engine:
        by_heads = run(engine, prompt)
        assert len(engine.mode["lora"]) == 1 and engine.mode["prerouter"]
    with opened(model.path, ordered(3), expert_slots=slots, **ahead) as engine:
        assert_same_bits(run(engine, prompt), by_heads, "by heads, streamed")
