"""The simulator against the engine it stands for: the same hits, misses and evictions on what a run recorded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import opened, ordered, prompt, run_together
from tiny import T, write_tiny

from sluice.engine import Engine
from sluice.experts.policies import POLICIES
from sluice.lab.replay import Demands, executions
from sluice.lab.simulate import Result, simulate
from sluice.lab.stack_distance import LruStack
from sluice.trace import TraceReader

SMALL: dict[str, Any] = {"n_layers": 4, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 32}
N_EXPERT, TOP_K = 12, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulated") / "m.gguf"
    return write_tiny(path, expert_type=T.Q8_0, n_expert=N_EXPERT, top_k=TOP_K, **SMALL).path


def mixed(engine: Engine, seed: int) -> None:
    """Prompts of all lengths, alone and together, and decode steps of changing company."""
    rng = np.random.default_rng(seed)
    for _ in range(2):
        prompts = [prompt(rng, int(n), int(rng.integers(3, 9))) for n in rng.choice([1, 2, 5, 40, 90], 3)]
        run_together(engine, prompts, random.Random(seed))
    with engine.session() as session:  # one stream, long enough to settle
        session.feed([5])
        for token in rng.integers(0, 400, 40).tolist():
            engine.decode([session], [token])


def decoded(engine: Engine, seed: int) -> None:
    """Steps of a token each, from the first."""
    with engine.session() as session:
        for token in np.random.default_rng(seed).integers(0, 400, 60).tolist():
            session.feed([token])
            engine.decode([session], [token])


def counted(ledger: dict[str, Any]) -> tuple[int, ...]:
    return tuple(ledger[name] for name in ("demands", "hits", "late_hits", "misses", "evictions"))


def simulated(found: Result) -> tuple[int, ...]:
    return (found.demands, found.hits, 0, found.misses, found.evictions)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("n_slots", [TOP_K, 7, 17, 30, 48])
def test_same_counters_as_the_engine(model: Path, tmp_path: Path, name: str, n_slots: int) -> None:
    """Reads end in any order, prompts go in waves where a layer's demand doesn't fit, streams share steps."""
    trace = tmp_path / "trace"
    options: dict[str, Any] = {"expert_slots": n_slots, "policy": name, "prefetch": False, "streams": 3, "trace": trace}
    with opened(model, ordered(n_slots), **options) as engine:
        mixed(engine, seed=n_slots)
        live = engine.stats()
    with TraceReader(trace) as reader:
        demands = Demands.of(reader)
        assert list(executions(reader)) == list(demands)
    assert demands.scan.any() and not demands.scan.all()
    # the engine was given no set, so neither is the simulator
    found = {phase: simulate(demands, name, n_slots, phase=phase, pinned=()) for phase in ("prefill", "decode", "all")}
    for phase in ("prefill", "decode"):
        assert simulated(found[phase]) == counted(live[phase]), phase
        assert int(demands.token_demands[demands.of_phase(phase)].sum()) == live[phase]["token_demands"]
        assert demands.tokens(phase) == live[phase]["tokens"]
    assert found["all"].misses == live["prefill"]["misses"] + live["decode"]["misses"]


def test_one_pass_gives_lru_at_every_budget(model: Path, tmp_path: Path) -> None:
    stack = demands = None
    for n_slots in (TOP_K, 5, 9, 20, 33):
        trace = tmp_path / f"{n_slots}"
        with opened(model, expert_slots=n_slots, policy="lru", prefetch=False, trace=trace) as engine:
            decoded(engine, seed=1)
            live = engine.stats()
        if stack is None:  # what is routed doesn't depend on the budget
            with TraceReader(trace) as reader:
                demands = Demands.of(reader)
            stack = LruStack(demands)
            assert stack.exact
        assert demands is not None and LruStack.covers(demands, n_slots)
        assert stack.misses(n_slots).sum() == live["prefill"]["misses"] + live["decode"]["misses"]
        assert stack.hits[n_slots] == live["prefill"]["hits"] + live["decode"]["hits"]
