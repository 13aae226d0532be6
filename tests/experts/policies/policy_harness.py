"""Runs policies in a cache: on traces of executions, and on single requests beside another implementation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pytest
from hypothesis import strategies as st

from sluice.experts.cache import ExpertCache
from sluice.experts.counters import CacheCounters
from sluice.experts.policies import Belady, Policy
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


# --- request by request

N_IDS = 120


class Reference(Protocol):
    """Another implementation of a policy, with the cache around it."""

    def request(self, id: int) -> bool:
        """Ask for `id` at the next tick; whether it was there."""
        ...


def stream(seed: int, n: int = 3000) -> list[int]:
    """Requests for ids below N_IDS: Zipf-like, with loops, bursts, and favourites that change."""
    rng = random.Random(seed)
    found: list[int] = []
    while len(found) < n:
        shift, length = rng.randrange(N_IDS), rng.randrange(20, 200)
        kind = rng.randrange(3)
        if kind == 0:  # favourites
            found += [(int(N_IDS * rng.random() ** 4) + shift) % N_IDS for _ in range(length)]
        elif kind == 1:  # a loop
            width = rng.randrange(2, 60)
            found += [(shift + i % width) % N_IDS for i in range(length)]
        else:  # single strangers between repetitions
            for _ in range(length):
                found.append((shift + rng.randrange(3)) % N_IDS if rng.random() < 0.6 else rng.randrange(N_IDS))
    return found[:n]


def key_of(id: int) -> ExpertKey:
    return ExpertKey(id % N_LAYERS, id // N_LAYERS)


def hits(policy: Policy, n_slots: int, ids: Sequence[int]) -> Iterator[bool]:
    """Whether each request is a hit; one key an acquire, at consecutive ticks."""
    cache = ExpertCache(n_slots, policy)
    for tick, id in enumerate(ids):
        acquired = cache.acquire([key_of(id)], tick)
        for read in acquired.submit:
            cache.complete(read)
        cache.release([key_of(id)])
        yield acquired.hits == 1
    cache.check()


def assert_same_requests(
    policy: Callable[[int, Sequence[int]], Policy], reference: Callable[[int, Sequence[int]], Reference],
    capacities: Sequence[int] = (1, 2, 5, 20, 37, 60, N_IDS), streams: Callable[[int], list[int]] = stream,
) -> None:  # fmt: skip
    """Equal answers to every request. Both are made of a number of slots and all requests (Belady wants to know)."""
    for seed in range(4):
        ids = streams(seed)
        for n_slots in capacities:
            other = reference(n_slots, ids)
            for i, (id, hit) in enumerate(zip(ids, hits(policy(n_slots, ids), n_slots, ids), strict=True)):
                assert hit == other.request(id), f"seed {seed}, {n_slots} slots: request {i} differs"


class LibCacheSim:
    """A cache of libCacheSim's, an independent implementation in C, with objects of size 1."""

    def __init__(self, name: str, n_slots: int, ids: Sequence[int]) -> None:
        lcs = pytest.importorskip("libcachesim", reason="libcachesim is not installed (pip install libcachesim)")
        self._cache: Any = getattr(lcs, name)(cache_size=n_slots, hashpower=12)
        self._request: Any = lcs.Request()
        self._request.obj_size = 1
        self._next = _next_uses(ids)
        self._at = 0

    def request(self, id: int) -> bool:
        self._request.obj_id = id + 1  # 0 is no object
        self._request.next_access_vtime = self._next[self._at]
        self._at += 1
        return bool(self._cache.get(self._request))


def _next_uses(ids: Sequence[int]) -> list[int]:
    never = (1 << 63) - 1
    found, ahead = [never] * len(ids), dict[int, int]()
    for i in range(len(ids) - 1, -1, -1):
        found[i] = ahead.get(ids[i], never)
        ahead[ids[i]] = i
    return found


def libcachesim(name: str) -> Callable[[int, Sequence[int]], Reference]:
    return lambda n_slots, ids: LibCacheSim(name, n_slots, ids)
