"""LoRA adapters as PEFT makes and saves them, on every linear map of every family: logits are those of transformers.

Each family's own test of its logits says what it is in transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import plain_decoder as plain
import pytest
from engine.harness import opened
from family_file import FamilyModel
from oracles import transformers_adapted, transformers_causal
from parity import TRANSFORMERS_L2, N, token_ids
from test_llama import llama

from sluice.routing.linears import linears

FAMILIES: dict[str, dict[str, Any]] = {
    "bailingmoe3": {},
    "deepseek2": {"there": "DeepseekV3ForCausalLM"},
    "ernie45moe": {},
    "gemma4": {},
    "glm4moe": {},
    "gpt_oss": {},
    "granitemoe": {},
    "hunyuanmoe": {},
    "lfm2moe": {},
    "minimax_m2": {},
    "olmoe": {"n_head_kv": 1},
    "qwen2moe": {},
    "qwen35moe": {},
    "qwen3moe": {},
    "qwen3next": {},
}
RANK = 3


def asked_of_transformers(
    family: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[FamilyModel, str, dict[str, Any], Mapping[str, np.ndarray]]:
    """A family's file, and the class, configuration and weights that it is in transformers."""
    module = importlib.import_module(f"test_{family}")
    asked: list[Any] = []
    monkeypatch.setattr(module, "assert_transformers", lambda *given, **_: asked.extend(given))
    options = dict(FAMILIES[family])
    if family == "deepseek2":
        options["options"] = module.KIMI
    module.test_agrees_with_transformers(folder, **options)
    model, there, config, state = asked
    return model, there, dict(config), state


def parameters(state: Mapping[str, np.ndarray]) -> list[str]:
    """What transformers keeps as parameters of their own, not of a linear module: experts in stacks, and routers."""
    stacks = [name for name in state if name.endswith((".gate_up_proj", ".down_proj"))]
    return stacks + [name for name in state if name.endswith((".gate.weight", ".router.weight"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_adapter_on_every_linear_map(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_agrees(*asked_of_transformers(family, tmp_path, monkeypatch), tmp_path / "adapter")


def test_peft_adapter_on_mixtral(tmp_path: Path) -> None:
    """Converting interleaves the halves of each head's rows."""
    file = llama()
    s = plain.Sizes(eps=1e-5)
    model = file.write(tmp_path / "m.gguf")
    config = plain.transformers_config(file, s) | {
        "head_dim": s.head_dim, "num_local_experts": s.n_expert, "intermediate_size": s.n_ff, "sliding_window": None
    }  # fmt: skip
    weights = dict(model.weights)
    for layer in range(s.n_layers):
        for part, n_head in (("q", s.n_head), ("k", s.n_head_kv)):
            name = f"blk.{layer}.attn_{part}.weight"
            halves = weights[name].reshape(n_head, s.head_dim // 2, 2, -1).swapaxes(1, 2)
            weights[name] = halves.reshape(weights[name].shape)
    state = plain.transformers_state(weights, s.n_layers)
    assert_agrees(model, "MixtralForCausalLM", config, state, tmp_path / "adapter")


def assert_agrees(
    model: FamilyModel, there: str, config: dict[str, Any], state: Mapping[str, np.ndarray], adapter: Path
) -> None:
    """With an adapter on every linear map but the head, made by PEFT, logits are transformers'."""
    ids = token_ids(N)
    options = {"r": RANK, "lora_alpha": 2, "target_modules": "all-linear", "target_parameters": parameters(state)}
    expected = transformers_adapted(there, config, state, ids, [(adapter, 1.5, options)])
    with opened(model.path, kv="f32", expert_slots=model.top_k + 1, lora=[(adapter, 1.5)]) as engine:
        found, known = engine.logits(ids), linears(engine.file, engine.spec)
        [(read, _)] = engine.adapters
    plain = transformers_causal(there, config, state, ids)
    assert np.linalg.norm(expected - plain) > 0.1 * np.linalg.norm(plain)
    left = set(known) - set(read.updates) - {"output.weight"}
    assert not left
    assert np.linalg.norm(found - expected) <= TRANSFORMERS_L2 * np.linalg.norm(expected)
