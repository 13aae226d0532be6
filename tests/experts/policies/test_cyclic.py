from __future__ import annotations

import pytest
from policy_harness import N_LAYERS, assert_same_requests, belady, popular, replay, stream

from sluice.experts.policies import make_policy
from sluice.experts.policies.cyclic import Cyclic
from sluice.types import ExpertKey


@pytest.mark.parametrize("top_k", [2, 5, 9])
def test_keeps_the_popular_where_lru_keeps_nothing(top_k: int) -> None:
    trace = popular(120, top_k, 24, seed=7)
    n_slots = 5 * top_k // 2  # less than the other three layers' demand, which LRU would have to hold
    lru, cyclic = (
        replay(trace, make_policy(name, n_slots=n_slots, n_layers=N_LAYERS), n_slots) for name in ("lru", "cyclic")
    )
    bound = replay(trace, belady(trace), n_slots)
    assert lru.hits < 0.02 * lru.demands
    assert lru.hits < 0.5 * bound.hits < cyclic.hits <= bound.hits


def test_prefers_the_layer_that_runs_soonest() -> None:
    policy = Cyclic(N_LAYERS)
    for tick in range(10):
        policy.tick(tick)
        for e in range(2):
            if tick < 4:
                policy.admit(ExpertKey(tick, e))
            policy.touch(ExpertKey(tick % 4, e))
    # Layer 1 is running; then come 2, 3, 0.
    assert [key.layer for key in policy.victims(4, lambda key: key.layer != 1)] == [0, 0, 3, 3]


def test_sees_a_touch_that_comes_after_its_layer_was_sorted() -> None:
    a, b = ExpertKey(0, 0), ExpertKey(0, 1)
    policy = Cyclic(N_LAYERS)
    policy.tick(0)
    for key in (a, b):
        policy.admit(key)
    assert policy.victims(1, lambda key: False) == []  # sorted: both unused, b would be next
    policy.touch(b)
    assert policy.victims(1, lambda key: True) == [a]


def test_holds_a_scanned_expert_cold_whatever_its_past() -> None:
    a, b = ExpertKey(0, 0), ExpertKey(0, 1)
    policy = Cyclic(N_LAYERS)
    policy.tick(0)
    for key in (a, b):
        policy.admit(key)
        policy.touch(key)
    policy.evict(a)
    policy.admit(a, scan=True)
    assert policy.victims(1, lambda key: True) == [a]


class PlainCyclic:
    """Every wait computed anew for every victim; requests come one a tick, layers in a cycle that skips none."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.now = -1
        self.uses: dict[int, list[int]] = {}  # the layer's executions in which an id was used
        self.held: set[int] = set()

    def wait(self, id: int) -> tuple[float, int]:
        layer = id % N_LAYERS
        runs = (self.now - self.now % N_LAYERS) // N_LAYERS + (self.now % N_LAYERS >= layer)  # of the id's layer
        p = 0.0
        for keep, share in ((Cyclic.FAST, Cyclic.FAST_SHARE), (Cyclic.SLOW, 1 - Cyclic.FAST_SHARE)):
            p += share * sum((1 - keep) * keep ** (runs - use) for use in self.uses[id]) / (1 - keep**runs)
        ahead = (layer - self.now - 1) % N_LAYERS + 1
        return ahead + N_LAYERS * (1 / max(p, Cyclic.MIN_P) - 1), id

    def request(self, id: int) -> bool:
        self.now += 1
        hit = id in self.held
        if not hit and len(self.held) == self.n_slots:
            self.held.remove(max(self.held, key=self.wait))
        self.held.add(id)
        self.uses.setdefault(id, []).append(self.now // N_LAYERS + 1)
        return hit


def in_turn(seed: int) -> list[int]:
    """A stream in which each request is for the layer whose turn it is."""
    return [id // N_LAYERS * N_LAYERS + tick % N_LAYERS for tick, id in enumerate(stream(seed, 1500))]


def test_same_as_a_plain_implementation() -> None:
    """libCacheSim knows no layers."""
    assert_same_requests(
        lambda n_slots, ids: make_policy("cyclic", n_slots=n_slots, n_layers=N_LAYERS),
        lambda n_slots, ids: PlainCyclic(n_slots),
        capacities=(1, 5, 20, 37),
        streams=in_turn,
    )
