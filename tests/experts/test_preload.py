"""Preloading and the eviction order: what fills a pool before its first demand, and what is written down of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_cache_machine import N_LAYERS, CacheMachine

from sluice.experts.cache import CacheFull, ExpertCache
from sluice.experts.policies import LRU, POLICIES, Policy, make_policy, pinning
from sluice.types import ExpertKey

N_EXPERTS = 8
A, B, C, D = (ExpertKey(0, expert) for expert in range(4))


def fill(cache: ExpertCache, keys: list[ExpertKey]) -> None:
    for read in cache.preload(keys):
        cache.complete(read)
    cache.check()


def walk(cache: ExpertCache, rng: random.Random, n: int, first_tick: int = 0) -> None:
    """`n` executions of layers in turn, two or three experts each, read at once; popular experts are likelier."""
    for tick in range(first_tick, first_tick + n):
        chosen = {min(int(rng.expovariate(0.4)), N_EXPERTS - 1) for _ in range(3)}
        keys = [ExpertKey(tick % N_LAYERS, expert) for expert in sorted(chosen)]
        for read in cache.acquire(keys, tick).submit:
            cache.complete(read)
        cache.release(keys)
        cache.check()


def test_what_is_preloaded_is_counted_nowhere_and_hit() -> None:
    cache = ExpertCache(3, LRU())
    reads = cache.preload([B, A])
    assert [read.key for read in reads] == [B, A] and len({read.slot for read in reads}) == 2
    cache.complete(reads[1])
    acquired = cache.acquire([A, B], 0)
    assert (acquired.hits, acquired.late_hits, acquired.misses) == (1, 1, 0)
    assert acquired.submit == acquired.promote == []  # B's read is as urgent as can be
    cache.complete(reads[0])
    cache.release([A, B])
    cache.check()
    counted = cache.counters.as_dict()
    assert {name: n for name, n in counted.items() if n} == {"demands": 2, "hits": 1, "late_hits": 1}


def test_what_is_preloaded_and_never_demanded_is_no_wasted_prefetch() -> None:
    cache = ExpertCache(2, LRU())
    fill(cache, [A, B])
    for read in cache.acquire([C, D], 0).submit:
        cache.complete(read)
    assert cache.counters.evictions == 2
    assert cache.counters.prefetch_wasted == cache.counters.prefetch_issued == 0


def test_preloading_evicts_nothing() -> None:
    cache = ExpertCache(3, LRU())
    fill(cache, [A, B])
    with pytest.raises(CacheFull):
        cache.preload([A, C, D])
    assert cache.slot_of(C) is None and cache.n_free == 1
    cache.check()
    assert [read.key for read in cache.preload([A, C])] == [C]


def test_a_preload_that_fails_leaves_a_free_slot() -> None:
    cache = ExpertCache(2, LRU())
    (read,) = cache.preload([A])
    assert cache.fail(read) is False
    cache.check()
    assert cache.n_free == 2 and cache.counters.as_dict() == ExpertCache(1, LRU()).counters.as_dict()


def test_the_last_preloaded_stays_longest() -> None:
    cache = ExpertCache(3, LRU())
    fill(cache, [C, A, B])
    assert cache.eviction_order() == [C, A, B]
    cache.acquire([D], 0)
    assert [cache.resident(key) for key in (A, B, C)] == [True, True, False]


@pytest.mark.parametrize("seed", range(5))
def test_an_lru_cache_goes_on_where_the_one_before_was(seed: int) -> None:
    first = ExpertCache(9, LRU())
    walk(first, random.Random(seed), 50)
    again = ExpertCache(9, LRU())
    fill(again, first.eviction_order())
    before = first.counters.copy()
    walk(first, random.Random(seed + 100), 50, first_tick=50)
    walk(again, random.Random(seed + 100), 50, first_tick=50)
    assert first.counters - before == again.counters
    assert first.eviction_order() == again.eviction_order()
    assert 0 < again.counters.misses < 150


@pytest.mark.parametrize("name", POLICIES)
def test_asking_for_the_order_changes_nothing(name: str) -> None:
    def made() -> Policy:
        return make_policy(name, n_slots=9, n_layers=N_LAYERS, pinned=[A])

    asked, other = ExpertCache(9, made()), ExpertCache(9, made())
    for start in range(0, 60, 6):
        walk(asked, random.Random(start), 6, first_tick=start)
        walk(other, random.Random(start), 6, first_tick=start)
        assert sorted(asked.eviction_order()) == sorted(asked.keys_resident()), "all of them, each once"
    assert asked.counters == other.counters
    assert list(asked.keys_resident()) == list(other.keys_resident())


@pytest.mark.parametrize("name", POLICIES)
def test_the_order_is_that_of_the_next_victims(name: str) -> None:
    cache = ExpertCache(9, make_policy(name, n_slots=9, n_layers=N_LAYERS))
    walk(cache, random.Random(3), 60)
    first = cache.eviction_order()[0]
    absent = next(key for key in (ExpertKey(0, expert) for expert in range(N_EXPERTS)) if cache.slot_of(key) is None)
    if name == "cyclic":
        cache.policy.tick(60)  # the layer that runs now is wanted last
        first = cache.eviction_order()[0]
    cache.acquire([absent], 60)
    assert cache.slot_of(first) is None


@pytest.mark.parametrize("name", POLICIES)
def test_pins_stay_while_anything_else_can_go(name: str) -> None:
    pins = [ExpertKey(layer, expert) for layer in range(N_LAYERS) for expert in (5, 6)]  # nobody's favourites
    cache = ExpertCache(10, pinning(pins, name, n_slots=10, n_layers=N_LAYERS))
    fill(cache, pins)
    for tick in range(120):
        walk(cache, random.Random(tick), 1, first_tick=tick)
        assert all(cache.resident(key) for key in pins)
    assert cache.counters.evictions > 0


def test_pins_go_when_nothing_else_is_left() -> None:
    cache = ExpertCache(3, pinning([A, B], "lru", n_slots=3, n_layers=1))
    fill(cache, [B, A])
    assert cache.acquire([C, D], 0).misses == 2
    assert cache.resident(A) and cache.slot_of(B) is None, "the hottest pin goes last"


@pytest.mark.parametrize("name", POLICIES)
def test_without_pins_a_policy_is_itself(name: str) -> None:
    caches = [
        ExpertCache(9, policy)
        for policy in (
            make_policy(name, n_slots=9, n_layers=N_LAYERS),
            pinning([], name, n_slots=9, n_layers=N_LAYERS),
        )
    ]
    for cache in caches:
        walk(cache, random.Random(1), 90)
    assert caches[0].counters == caches[1].counters


class PreloadMachine(CacheMachine):
    """The machine of all other events, with preloads among them."""

    @rule(ids=st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=5), layer=st.integers(0, N_LAYERS - 1))
    def preload(self, ids: list[int], layer: int) -> None:
        keys = [ExpertKey(layer, expert) for expert in ids]
        absent = [key for key in keys if self.cache.slot_of(key) is None]
        before, free, evictable = self.cache.counters.as_dict(), self.cache.n_free, self.cache.n_evictable
        try:
            reads = self.cache.preload(keys)
        except CacheFull:
            assert len(absent) > free == self.cache.n_free
        else:
            assert [read.key for read in reads] == absent
            assert self.cache.n_free == free - len(absent)
            self.issue(reads)
        assert self.cache.counters.as_dict() == before and self.cache.n_evictable == evictable


TestPreloadMachine = PreloadMachine.TestCase
TestPreloadMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
