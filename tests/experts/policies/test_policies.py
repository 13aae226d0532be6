"""What all live policies have in common."""

from __future__ import annotations

import pytest
from policy_harness import N_LAYERS, popular, replay

from sluice.errors import InputError
from sluice.experts.cache import ExpertCache
from sluice.experts.policies import POLICIES, make_policy
from sluice.types import ExpertKey


@pytest.mark.parametrize("name", POLICIES)
def test_deterministic(name: str) -> None:
    trace = popular(40, 3, 12, seed=1)

    def evicted() -> list[ExpertKey]:
        policy, order = make_policy(name, n_slots=14, n_layers=N_LAYERS, pinned=trace[0]), []
        evict = policy.evict
        policy.evict = lambda key: (order.append(key), evict(key))[1]
        replay(trace, policy, 14)
        return order

    first = evicted()
    assert len(first) > 50
    assert evicted() == first


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_scan_brings_in_goes_before_all_else(name: str) -> None:
    policy = make_policy(name, n_slots=6, n_layers=1)
    warm, swept = [ExpertKey(0, e) for e in range(3)], [ExpertKey(0, e) for e in range(3, 6)]
    policy.tick(0)
    for key in warm:
        policy.admit(key)
        policy.touch(key)
    for key in swept:
        policy.admit(key, scan=True)
        policy.touch(key, scan=True)
    assert set(policy.victims(3, lambda key: True)) == set(swept)
    for key in swept:
        policy.evict(key)
    assert set(policy.victims(6, lambda key: True)) == set(warm)


@pytest.mark.parametrize("name", POLICIES)
def test_every_evictable_expert_is_found(name: str) -> None:
    """Whatever is pinned, and in whatever queue: the cache has counted on it."""
    cache = ExpertCache(9, make_policy(name, n_slots=9, n_layers=2, pinned=[ExpertKey(0, 1), ExpertKey(1, 2)]))
    held: list[list[ExpertKey]] = []
    for tick in range(400):
        if len(held) == 3 or tick % 7 == 0:
            for keys in held[: 1 + tick % 3]:
                cache.release(keys)
            del held[: 1 + tick % 3]
        first = tick * tick % 11
        keys = [ExpertKey(tick % 2, (first + i * (1 + tick % 3)) % 11) for i in range(3)]
        for read in cache.acquire(keys, tick, scan=tick % 5 == 0).submit:
            cache.complete(read)
        held.append(keys)
        cache.check()
    assert cache.counters.evictions > 100


def test_unknown_policy_lists_the_choices() -> None:
    with pytest.raises(InputError, match=r"'mru'.*lru, lfu, lfru, s3fifo, arc, cyclic, pinned"):
        make_policy("mru", n_slots=1, n_layers=1)
