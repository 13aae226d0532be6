from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from made_demands import demands_of, runs, small_runs
from small_traces import Row, info

from sluice.lab.simulate import policy_for, replay
from sluice.lab.stack_distance import LruStack, stack_distances
from sluice.trace import TraceInfo


@settings(deadline=None, max_examples=200)
@given(groups=st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=5), min_size=1, max_size=60))
def test_places_in_the_order_of_recency(groups: list[set[int]]) -> None:
    order: list[int] = []  # the newest first
    expected = []
    for group in groups:
        expected += [order.index(id) if id in order else 99 for id in sorted(group)]
        for id in sorted(group):
            order = [id, *(other for other in order if other != id)]
    ids = np.array([id for group in groups for id in sorted(group)], np.int32)
    offsets = np.cumsum([0, *map(len, groups)])
    assert stack_distances(ids, offsets, 99).tolist() == expected


@settings(deadline=None, max_examples=60)
@given(run=small_runs(prefill=False))
def test_same_as_the_cache_at_every_capacity_that_fits(run: tuple[list[Row], TraceInfo]) -> None:
    demands = demands_of(*run)
    stack = LruStack(demands)
    assert stack.exact
    for n_slots in range(int(demands.counts.max()), demands.n_experts + 1):
        assert LruStack.covers(demands, n_slots)
        found = replay(demands, policy_for(demands, "lru", n_slots), n_slots)
        assert stack.misses(n_slots).tolist() == found.tolist()
        assert stack.hits[min(n_slots, stack.never)] == len(demands.ids) - found.sum()


def test_same_as_the_cache_on_a_longer_run() -> None:
    rows = runs(np.random.default_rng(3), layers=8, n_expert=32, top_k=4, steps=400, streams=1)
    demands = demands_of(rows, info(8, 32, 4))
    stack = LruStack(demands)
    for n_slots in (4, 31, 32, 33, 60, 120, 250, 256):
        assert stack.misses(n_slots).tolist() == replay(demands, policy_for(demands, "lru", n_slots), n_slots).tolist()


def test_what_it_does_not_cover() -> None:
    demands = demands_of([Row(0, 0, i, 0, (i,), None, "prefill") for i in range(3)], info(1, 4, 1))
    assert not LruStack(demands).exact and not LruStack.covers(demands, 4)  # a sweep
    demands = demands_of([Row(0, s, 0, 0, (s,)) for s in range(3)], info(1, 4, 1))
    assert LruStack(demands).exact and LruStack.covers(demands, 3) and not LruStack.covers(demands, 2)


def test_blocks_of_queries(monkeypatch) -> None:
    from sluice.lab import stack_distance

    rows = runs(np.random.default_rng(3), layers=3, n_expert=9, top_k=3, steps=50, streams=2)
    demands = demands_of(rows, info(3, 9, 3))
    whole = LruStack(demands).distances
    monkeypatch.setattr(stack_distance, "_QUERIES", 7)
    assert LruStack(demands).distances.tolist() == whole.tolist()
