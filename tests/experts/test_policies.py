from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import InputError
from sluice.experts.cache import ExpertCache
from sluice.experts.counters import CacheCounters
from sluice.experts.policies import POLICIES, Belady, Policy, make_policy
from sluice.types import ExpertKey

N_LAYERS = 4
Trace = list[list[ExpertKey]]  # one item per execution of a layer, layers in a cycle


def replay(trace: Trace, policy: Policy, n_slots: int) -> CacheCounters:
    cache = ExpertCache(n_slots, policy)
    for tick, keys in enumerate(trace):
        for read in cache.acquire(keys, tick).submit:
            cache.complete(read)
        cache.release(keys)
        cache.check()
    return cache.counters


def belady(trace: Trace) -> Belady:
    return Belady(key for keys in trace for key in keys)


def popular(n_steps: int, top_k: int, n_experts: int, seed: int) -> Trace:
    """Every layer has its own favourites; `top_k` of `n_experts` a step."""
    rng = random.Random(seed)
    weights = [[rng.random() ** 4 for _ in range(n_experts)] for _ in range(N_LAYERS)]
    return [
        [ExpertKey(layer, e) for e in sorted(range(n_experts), key=lambda e: -weights[layer][e] * rng.random())[:top_k]]
        for _ in range(n_steps)
        for layer in range(N_LAYERS)
    ]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    sets = draw(st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=60))
    return [[ExpertKey(tick % N_LAYERS, e) for e in sorted(experts)] for tick, experts in enumerate(sets)]


@settings(deadline=None, max_examples=200)
@given(trace=traces(), n_slots=st.integers(3, 12))
def test_belady_bounds_every_policy(trace: Trace, n_slots: int) -> None:
    bound = replay(trace, belady(trace), n_slots).hits
    for name in POLICIES:
        policy = make_policy(name, n_layers=N_LAYERS, pinned=[ExpertKey(1, 0), ExpertKey(2, 3)])
        assert replay(trace, policy, n_slots).hits <= bound, name


@settings(deadline=None, max_examples=100)
@given(trace=traces(), n_slots=st.integers(3, 6))
def test_belady_is_the_best_there_is(trace: Trace, n_slots: int) -> None:
    """Against every choice of victims, tried exhaustively on the start of the trace."""
    trace = trace[:7]
    states = {frozenset[ExpertKey](): 0}  # experts in slots -> most hits so far
    for keys in trace:
        after: dict[frozenset[ExpertKey], int] = {}
        for held, hits in states.items():
            hits += len(held.intersection(keys))
            for kept in subsets(held.difference(keys), n_slots - len(keys)):
                state = kept.union(keys)
                after[state] = max(hits, after.get(state, 0))
        states = after
    assert replay(trace, belady(trace), n_slots).hits == max(states.values())


def subsets(items: frozenset[ExpertKey], most: int) -> set[frozenset[ExpertKey]]:
    """Those of `items` that can stay: all if they fit, else each choice of `most`."""
    if len(items) <= most:
        return {items}
    return set().union(*(subsets(items - {item}, most) for item in items))


@pytest.mark.parametrize("name", POLICIES)
def test_deterministic(name: str) -> None:
    trace = popular(40, 3, 12, seed=1)

    def evicted() -> list[ExpertKey]:
        policy, order = make_policy(name, n_layers=N_LAYERS, pinned=trace[0]), []
        evict = policy.evict
        policy.evict = lambda key: (order.append(key), evict(key))[1]
        replay(trace, policy, 14)
        return order

    first = evicted()
    assert len(first) > 50
    assert evicted() == first


def test_lru_order() -> None:
    a, b, c = (ExpertKey(0, e) for e in range(3))
    policy = make_policy("lru", n_layers=1)
    for key in (a, b, c):
        policy.admit(key)
        policy.touch(key)
    policy.touch(a)
    assert policy.victims(2, lambda key: True) == [b, c]
    assert policy.victims(3, lambda key: key != b) == [c, a]


def test_lfu_order_and_aging() -> None:
    a, b, c, d = (ExpertKey(0, e) for e in range(4))
    policy = make_policy("lfu", n_layers=1)
    for key, touches in ((a, 5), (b, 2), (c, 2)):
        policy.admit(key)
        for _ in range(touches):
            policy.touch(key)
    policy.touch(b)
    policy.touch(c)
    assert policy.victims(1, lambda key: key != b) == [c]  # as often as b, but b may not go
    policy.evict(c)
    for _ in range(3):  # each newcomer starts from the rank of the last victim, so that a's past fades
        assert policy.victims(1, lambda key: key != a) in ([b], [d])
        policy.evict(b if b in policy._rank else d)  # type: ignore[attr-defined]
        policy.admit(d)
        policy.touch(d)
        policy.touch(d)
    assert policy.victims(1, lambda key: True) == [a]


def test_pinned_set_goes_last() -> None:
    fixed, other, third = (ExpertKey(0, e) for e in range(3))
    policy = make_policy("pinned", n_layers=1, pinned=[fixed])
    for key in (fixed, other, third):
        policy.admit(key)
        policy.touch(key)
    policy.touch(other)
    assert policy.victims(3, lambda key: True) == [third, other, fixed]
    policy.evict(third)
    assert policy.victims(1, lambda key: key == fixed) == [fixed]


@pytest.mark.parametrize("top_k", [2, 5, 9])
def test_cyclic_keeps_the_popular_where_lru_keeps_nothing(top_k: int) -> None:
    trace = popular(120, top_k, 24, seed=7)
    n_slots = 5 * top_k // 2  # less than the other three layers' demand, which LRU would have to hold
    lru, cyclic, bound = (
        replay(trace, policy, n_slots)
        for policy in (make_policy("lru", n_layers=N_LAYERS), make_policy("cyclic", n_layers=N_LAYERS), belady(trace))
    )
    assert lru.hits < 0.02 * lru.demands
    assert lru.hits < 0.5 * bound.hits < cyclic.hits <= bound.hits


def test_cyclic_prefers_the_layer_that_runs_soonest() -> None:
    policy = make_policy("cyclic", n_layers=N_LAYERS)
    for tick in range(10):
        policy.tick(tick)
        for e in range(2):
            if tick < 4:
                policy.admit(ExpertKey(tick, e))
            policy.touch(ExpertKey(tick % 4, e))
    # Layer 1 is running; then come 2, 3, 0.
    assert [key.layer for key in policy.victims(4, lambda key: key.layer != 1)] == [0, 0, 3, 3]


def test_cyclic_sees_a_touch_that_comes_after_its_layer_was_sorted() -> None:
    a, b = ExpertKey(0, 0), ExpertKey(0, 1)
    policy = make_policy("cyclic", n_layers=N_LAYERS)
    policy.tick(0)
    for key in (a, b):
        policy.admit(key)
    assert policy.victims(1, lambda key: False) == []  # sorted: both unused, b would be next
    policy.touch(b)
    assert policy.victims(1, lambda key: True) == [a]


def test_cyclic_holds_a_scanned_expert_cold_whatever_its_past() -> None:
    a, b = ExpertKey(0, 0), ExpertKey(0, 1)
    policy = make_policy("cyclic", n_layers=N_LAYERS)
    policy.tick(0)
    for key in (a, b):
        policy.admit(key)
        policy.touch(key)
    policy.evict(a)
    policy.admit(a, scan=True)
    assert policy.victims(1, lambda key: True) == [a]


def test_unknown_policy_lists_the_choices() -> None:
    with pytest.raises(InputError, match=r"'mru'.*lru, lfu, cyclic, pinned"):
        make_policy("mru", n_layers=1)
