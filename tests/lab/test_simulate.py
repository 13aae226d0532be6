from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_demands import demands_of, runs, small_runs
from small_traces import Row, info

from sluice.errors import InputError
from sluice.lab.simulate import SIMULATED, Result, hottest, policy_for, replay, result, simulate
from sluice.trace import TraceInfo
from sluice.types import ExpertKey


def test_result() -> None:
    rows = [
        *(Row(0, 0, i, layer, (i, i + 1), None, "prefill") for layer in range(2) for i in range(2)),
        *(Row(1, 0, 2, layer, (0, 3)) for layer in range(2)),
    ]
    demands = demands_of(rows, replace(info(2, 4, 2), expert_bytes=(100, 300)))
    # 0 1 2 of layer 0, of layer 1; then 0 3 of layer 0, of layer 1; with 8 slots nothing goes
    assert simulate(demands, "lru", 8) == Result("lru", 8, 1.0, 10, 2, 8, 0, 0.2, 0.2, 8 / 3)
    assert simulate(demands, "lru", 8, phase="decode") == Result("lru", 8, 1.0, 4, 2, 2, 0, 0.5, 0.5, 2.0)
    assert simulate(demands, "lru", 8, phase="prefill") == Result("lru", 8, 1.0, 6, 0, 6, 0, 0.0, 0.0, 3.0)
    # with 6 slots layer 0's expert 3 takes the place of what the sweeps brought last: layer 1's 2; layer 1's 3 of its 1
    assert simulate(demands, "lru", 6) == Result("lru", 6, 0.75, 10, 2, 8, 2, 0.2, 0.2, 8 / 3)
    misses = np.array([3, 3, 1, 0], np.int32)  # as if
    found = result(demands, "as if", 6, misses, "decode")
    assert (found.hits, found.evictions, found.byte_hit_rate) == (3, 1, 1 - 100 / 800)


def test_phases_add_up() -> None:
    rows = runs(np.random.default_rng(0), layers=3, n_expert=8, top_k=2, steps=60, streams=2, prefill=0.3)
    demands = demands_of(rows, info(3, 8, 2))
    for name in SIMULATED:
        for n_slots in (2, 7, 13):
            parts = [simulate(demands, name, n_slots, phase=phase) for phase in ("prefill", "decode", "all")]
            for field in ("demands", "hits", "misses", "evictions"):
                prefill, decode, both = (getattr(part, field) for part in parts)
                assert prefill + decode == both, (name, n_slots, field)


def test_nothing_counted_has_no_rate() -> None:
    found = simulate(demands_of([Row(0, 0, 0, 0, (1,))], info(1, 2, 1)), "lru", 1, phase="prefill")
    assert (found.demands, found.hit_rate, found.byte_hit_rate, found.reads_per_token) == (0, None, None, None)
    assert found.as_dict() == {
        "policy": "lru", "capacity_slots": 1, "capacity_share": 0.5, "demands": 0, "hits": 0, "misses": 0,
        "evictions": 0, "hit_rate": None, "byte_hit_rate": None, "reads_per_token": None, "tok_per_s": None,
    }  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(run=small_runs(prefill=True), n_slots=st.integers(1, 30))
def test_belady_bounds_every_policy(run: tuple[list[Row], TraceInfo], n_slots: int) -> None:
    """Whatever fits: prompts and streams whose demands are cut into waves too."""
    demands = demands_of(*run)
    bound = simulate(demands, "belady", n_slots).hits
    for name in SIMULATED:
        assert simulate(demands, name, n_slots).hits <= bound, name


def test_hottest_leaves_room_for_a_layers_demand() -> None:
    rows = [Row(step, 0, step, 0, experts) for step, experts in enumerate([(0, 5), (3, 5), (3, 5), (1, 3)])]
    demands = demands_of(rows, info(1, 6, 2))
    assert hottest(demands, 4) == [ExpertKey(0, 3), ExpertKey(0, 5)]  # of equals the lower first; room for 2
    assert hottest(demands, 5) == [ExpertKey(0, 3), ExpertKey(0, 5), ExpertKey(0, 0)]
    assert hottest(demands, 1) == []
    streams = [Row(0, s, 0, 0, (s, s + 1)) for s in range(3)]
    assert hottest(demands_of(streams, info(1, 6, 2)), 6) == [ExpertKey(0, 0), ExpertKey(0, 1)]  # room for 4
    prompt = [Row(0, 0, i, 0, (i, i + 1), None, "prefill") for i in range(3)]
    assert hottest(demands_of(prompt, info(1, 6, 2)), 3) == [ExpertKey(0, 0)]


def test_progress_and_unknown_policies() -> None:
    demands = demands_of([Row(0, 0, 0, 0, (1,))], info(1, 2, 1))
    told: list[tuple[float, float]] = []
    replay(demands, policy_for(demands, "lru", 1), 1, lambda done, total: told.append((done, total)))
    assert told == [(0, 1)]
    with pytest.raises(InputError, match=r"'mru'.*lru.*belady"):
        simulate(demands, "mru", 1)


@pytest.mark.parametrize("seed", [969, 992, 1323, 1696, 1867, 1884, 2175, 2319])
def test_belady_bounds_every_way_to_cut_a_demand(seed: int) -> None:
    """Cases in which evicting what is used last, but from wave to wave as the engine cuts them, is beaten."""
    rng = np.random.default_rng(seed)
    layers, n_expert = int(rng.integers(1, 4)), int(rng.integers(3, 9))
    top_k, steps = int(rng.integers(1, min(3, n_expert) + 1)), int(rng.integers(2, 14))
    streams = int(rng.integers(1, 4))
    rows = runs(rng, layers=layers, n_expert=n_expert, top_k=top_k, steps=steps, streams=streams, prefill=0.6)
    demands, n_slots = demands_of(rows, info(layers, n_expert, top_k)), int(rng.integers(1, 7))
    assert (demands.counts > n_slots).any()
    bound = simulate(demands, "belady", n_slots).hits
    assert all(simulate(demands, name, n_slots).hits <= bound for name in SIMULATED)
