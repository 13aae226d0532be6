"""`top_k_experts`: fewer experts a token than the model's own, as if the file said so, and said in every result."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine.harness import assert_same_bits, opened, ordered, resident, run, run_together
from parity import prompts_of, token_ids
from test_bailingmoe2 import bailingmoe2
from test_gpt_oss import gpt_oss
from tiny import T, write_tiny

from sluice.engine import Engine
from sluice.engine.report import mode_text
from sluice.errors import InputError


def _softmax(path: Path, k: int) -> Path:
    return write_tiny(path, expert_type=T.Q8_0, n_embd=64, n_ff_exp=32, head_dim=32, top_k=k).path


def _grouped(path: Path, k: int) -> Path:
    return bailingmoe2(top_k=k).write(path).path


def _softmax_of_the_chosen(path: Path, k: int) -> Path:
    return gpt_oss(top_k=k).write(path).path


# How to write the same weights with `k` experts a token in the metadata.
FILES: dict[str, Callable[[Path, int], Path]] = {
    "softmax": _softmax,
    "groups, sigmoid": _grouped,
    "softmax of the chosen": _softmax_of_the_chosen,
}
OWN = 4


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_a_file_that_says_so(tmp_path: Path, name: str) -> None:
    write = FILES[name]
    own = write(tmp_path / "own.gguf", OWN)
    ids = token_ids(40)
    with opened(own, expert_slots=OWN + 2) as engine:
        native = engine.logits(ids)
    for k in (1, 2, OWN - 1, OWN):
        with opened(write(tmp_path / f"{k}.gguf", k), expert_slots=OWN + 2) as engine:
            expected = engine.logits(ids)
        with opened(own, top_k_experts=k, expert_slots=max(k, 2)) as engine:
            found = engine.logits(ids)
            demands = engine.stats()["prefill"]["token_demands"]
        assert_same_bits(found, expected, f"{k} experts")
        assert np.array_equal(found, native) == (k == OWN)
        assert demands == k * len(ids) * len(engine.spec.moe_layers)


def test_streamed_bits_are_the_resident_ones(tmp_path: Path) -> None:
    own = _softmax(tmp_path / "m.gguf", OWN)
    prompts = prompts_of(((33, 5), (1, 9), (68, 2)))
    with resident(own, top_k_experts=3) as engine:
        expected = [run(engine, it) for it in prompts]
    with opened(own, ordered(1), top_k_experts=3, expert_slots=3, streams=3) as engine:
        found = run_together(engine, prompts, random.Random(2))
    for i, rows in enumerate(found):
        assert_same_bits(rows, expected[i], f"prompt {i}")


def test_the_mode_says_that_it_is_not_the_models_own_number(tmp_path: Path) -> None:
    own = _softmax(tmp_path / "m.gguf", OWN)
    for given, found in ((None, OWN), (OWN, OWN), (np.int64(1), 1), (3, 3)):
        with opened(own, top_k_experts=given, expert_slots=8) as engine:
            assert (engine.mode["top_k_experts"], engine.mode["top_k_experts_of_model"]) == (found, OWN)
            assert engine.plan.floor_slots == found * 3
            said = mode_text(engine.mode)
        assert ("lossy" in said) == (found != OWN)
        assert found == OWN or f"{found} expert{'s' * (found > 1)} a token instead of the model's {OWN}" in said


@pytest.mark.parametrize("name", FILES)
def test_more_than_the_models_own_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"takes {OWN} experts a token, give 1 to that"):
        Engine.open(FILES[name](tmp_path / "m.gguf", OWN), top_k_experts=OWN + 1)
