from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.experts.cache import CacheFull, ExpertCache
from sluice.experts.counters import CacheCounters
from sluice.experts.policies import LRU, make_policy
from sluice.types import ExpertKey, Read


def keys(*experts: int, layer: int = 0) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


A, B, C, D, E = keys(0, 1, 2, 3, 4)


def demand(cache: ExpertCache, *wanted: ExpertKey, tick: int = 0, scan: bool = False) -> list[Read]:
    """A whole demand: acquire, complete, release. Returns the reads it took."""
    acquired = cache.acquire(wanted, tick, scan=scan)
    for read in acquired.submit + acquired.promote:
        cache.complete(read)
    cache.release(wanted)
    cache.check()
    return acquired.submit


def count(cache: ExpertCache, **expected: int) -> None:
    got = cache.counters.as_dict()
    assert {name: n for name, n in got.items() if n} == expected


def snapshot(cache: ExpertCache) -> tuple[object, ...]:
    entries = {k: (e.slot, e.read, e.pins, e.deadline, e.binding, e.unused) for k, e in cache._entries.items()}
    return entries, list(cache._free), cache.counters.as_dict(), list(cache.policy._order)  # type: ignore[attr-defined]


def test_miss_late_hit_and_hit() -> None:
    cache = ExpertCache(4, LRU())
    first = cache.acquire([A, B], tick=3)
    assert (first.hits, first.late_hits, first.misses) == (0, 0, 2)
    assert first.submit == [Read(A, first.slots[0], 3, first.submit[0].serial), Read(B, first.slots[1], 3, 2)]
    assert first.waiting == [A, B]
    cache.complete(first.submit[1])
    second = cache.acquire([C, B, A], tick=3)
    assert (second.hits, second.late_hits, second.misses) == (1, 1, 1)
    assert second.waiting == [C, A]
    assert second.promote == []  # A's read is a demand's already
    assert second.slots[1:] == [first.slots[1], first.slots[0]]
    assert [read.key for read in second.submit] == [C]
    assert cache.resident(B) and not cache.resident(A)
    assert cache.slot_of(A) == first.slots[0] and cache.slot_of(D) is None
    assert list(cache.keys_resident()) == [B] and len(cache) == 3
    cache.check()
    count(cache, demands=5, hits=1, late_hits=1, misses=3)


def test_all_keys_are_pinned_before_a_victim_is_chosen() -> None:
    cache = ExpertCache(3, LRU())
    demand(cache, A)
    demand(cache, B, C)
    acquired = cache.acquire([D, E, A], tick=1)  # A is the least recently used
    assert acquired.hits == 1
    assert {cache.slot_of(B), cache.slot_of(C)} == {None}
    count(cache, demands=6, hits=1, misses=5, evictions=2)


def test_use_follows_the_order_of_the_keys_whatever_was_resident() -> None:
    """Which makes LRU a stack algorithm: a larger cache holds what a smaller one holds."""
    for warm in ([], [B], [A, C], [A, B, C]):
        cache = ExpertCache(5, LRU())
        demand(cache, *warm, D)
        demand(cache, A, B, C)
        assert cache.policy.victims(4, lambda key: True) == [D, A, B, C], warm


@pytest.mark.parametrize("experts", [(1, 2, 3), (0, 1, 2, 3), (4, 5, 6, 7, 8)])
def test_cache_full_changes_nothing(experts: tuple[int, ...]) -> None:
    cache = ExpertCache(4, LRU(), reserve=1)
    demand(cache, A, B)
    pinned = cache.acquire([B, E], tick=1)
    (prefetched,) = cache.prefetch([ExpertKey(1, 0)], deadline=5)
    before = snapshot(cache)
    with pytest.raises(CacheFull, match="slots"):
        cache.acquire(keys(*experts), tick=2)
    assert snapshot(cache) == before
    cache.check()
    cache.complete(pinned.submit[0])
    cache.complete(prefetched)
    cache.release([B, E])
    assert cache.acquire(keys(5, 6, 7, 8), tick=2).misses == 4


def test_pins_are_counted() -> None:
    cache = ExpertCache(1, LRU())
    (read,) = cache.acquire([A], 0).submit
    cache.complete(read)
    cache.acquire([A], 0)
    cache.release([A])
    with pytest.raises(CacheFull):
        cache.acquire([B], 0)
    cache.release([A])
    assert cache.acquire([B], 0).misses == 1
    with pytest.raises(AssertionError, match="not pinned"):
        cache.release([B, B])


def test_a_slot_in_flight_is_never_reused() -> None:
    cache = ExpertCache(2, LRU())
    first = cache.acquire([A, B], 0)
    cache.release([A, B])  # an aborted step lets go of what is still being read
    with pytest.raises(CacheFull):
        cache.acquire([C], 1)
    assert cache.prefetch([C], deadline=2) == []
    cache.complete(first.submit[0])
    assert cache.acquire([C], 1).slots == [first.slots[0]]
    cache.check()


def test_prefetch_used_late_and_wasted() -> None:
    cache = ExpertCache(4, LRU())
    reads = cache.prefetch([A, B, C], deadline=7)
    assert [(read.key, read.deadline) for read in reads] == [(A, 7), (B, 7), (C, 7)]
    cache.complete(reads[0])
    cache.check()
    acquired = cache.acquire([A, B], tick=7)
    assert (acquired.hits, acquired.late_hits, acquired.promote) == (1, 1, [reads[1]])
    again = cache.acquire([B], tick=7)
    assert (again.late_hits, again.promote) == (1, [])
    cache.check()
    count(cache, demands=3, hits=1, late_hits=2, prefetch_issued=3, prefetch_used=2, prefetch_late=1)
    assert cache.expire(8) == [reads[2]]
    cache.drop(reads[2])
    cache.check()
    assert cache.counters.prefetch_wasted == 1 and cache.n_free == 2


def test_prefetch_skips_what_is_there_and_protects_it() -> None:
    cache = ExpertCache(3, LRU())
    demand(cache, A)
    demand(cache, B)
    assert [read.key for read in cache.prefetch([A, C], deadline=5)] == [C]
    assert cache.prefetch([A, C], deadline=6) == []
    cache.check()
    assert [read.key for read in cache.prefetch([D], deadline=9)] == [D]
    assert cache.resident(A) and not cache.resident(B)  # A is older, but protected
    assert cache.prefetch([E], deadline=9) == []  # all is protected or loading
    assert cache.expire(6) == []
    assert cache.n_evictable == 0
    assert [read.key for read in cache.expire(7)] == [C]  # its later deadline counts
    assert cache.n_evictable == 1
    cache.check()


def test_prefetch_leaves_the_reserve() -> None:
    cache = ExpertCache(4, LRU(), reserve=2)
    assert [read.key for read in cache.prefetch([A, B, C], deadline=5)] == [A, B]
    cache.check()
    assert cache.prefetch([A, B], deadline=6) == []
    acquired = cache.acquire([D, E], tick=0)
    for read in acquired.submit:
        cache.complete(read)
    assert cache.prefetch([D], deadline=9) == []
    cache.release([D, E])
    assert cache.n_evictable == 2  # D was pinned, and protecting it would have lowered this below the reserve
    assert cache.prefetch([E, C], deadline=9) == []
    assert cache.n_evictable == 2
    cache.check()


def test_demand_takes_a_protected_expert_only_when_nothing_else_is_left() -> None:
    cache = ExpertCache(2, LRU())
    (read,) = cache.prefetch([A], deadline=9)
    cache.complete(read)
    demand(cache, B, tick=1)
    demand(cache, C, tick=2)
    assert cache.resident(A)  # B went, though A is older
    demand(cache, D, E, tick=3)
    assert not cache.resident(A)
    count(cache, demands=4, misses=4, evictions=3, prefetch_issued=1, prefetch_wasted=1)


def test_binding_prefetch_is_never_evicted_before_its_use() -> None:
    cache = ExpertCache(2, LRU())
    (read,) = cache.prefetch([A], deadline=5, binding=True)
    cache.complete(read)
    assert cache.n_claimable == 1
    with pytest.raises(CacheFull):
        cache.acquire([B, C], tick=1)
    demand(cache, A, tick=1)  # an earlier demand, not the one that was predicted
    with pytest.raises(CacheFull):
        cache.acquire([B, C], tick=2)
    demand(cache, A, tick=5)
    demand(cache, B, C, tick=6)
    assert not cache.resident(A)
    count(cache, demands=4, hits=2, misses=2, evictions=1, prefetch_issued=1, prefetch_used=1)


def test_binding_ends_with_its_deadline() -> None:
    cache = ExpertCache(1, LRU())
    (read,) = cache.prefetch([A], deadline=0, binding=True)
    cache.complete(read)
    assert cache.expire(0) == [] and cache.n_claimable == 0
    assert cache.expire(1) == [] and cache.n_evictable == 1
    demand(cache, B, tick=1)


def test_stale_prefetch_that_runs_completes_and_becomes_evictable() -> None:
    cache = ExpertCache(1, LRU())
    (read,) = cache.prefetch([A], deadline=2)
    assert cache.expire(3) == [read]
    assert cache.expire(3) == []
    cache.check()
    cache.complete(read)
    assert cache.n_evictable == 1
    demand(cache, B, tick=3)
    assert cache.counters.prefetch_wasted == 1


def test_a_read_of_an_expired_prefetch_is_still_promoted() -> None:
    cache = ExpertCache(1, LRU())
    (read,) = cache.prefetch([A], deadline=2)
    cache.expire(3)
    assert cache.acquire([A], tick=3).promote == [read]
    with pytest.raises(AssertionError, match="demanded"):
        cache.drop(read)


def test_failed_prefetch_frees_its_slot() -> None:
    cache = ExpertCache(1, LRU())
    (read,) = cache.prefetch([A], deadline=2)
    assert cache.fail(read) is False
    assert cache.n_free == 1 and len(cache) == 0 and cache.expire(3) == []
    cache.check()
    count(cache, prefetch_issued=1, prefetch_wasted=1)


def test_failed_demand_forgets_its_pins() -> None:
    cache = ExpertCache(2, LRU())
    (read,) = cache.acquire([A], 0).submit
    assert cache.fail(read) is True
    cache.check()
    assert cache.n_free == 2 and cache.slot_of(A) is None
    newer = cache.acquire([A], 1)  # before the failed step has let go
    cache.complete(newer.submit[0])
    cache.release([A])  # the failed step's
    with pytest.raises(CacheFull):
        cache.acquire([B, C], 1)
    cache.release([A])
    cache.check()
    assert cache.acquire([B, C], 1).misses == 2


def test_every_pin_of_a_failed_demand_is_forgotten() -> None:
    cache = ExpertCache(2, LRU())
    (read,) = cache.acquire([A], 0).submit
    cache.acquire([A], 0)
    assert cache.fail(read) is True
    cache.release([A])
    cache.release([A])
    cache.check()
    assert cache.acquire([A, B], 1).misses == 2
    cache.release([A, B])
    with pytest.raises(AssertionError, match="not pinned"):
        cache.release([A])


def test_stale_serials_change_nothing() -> None:
    cache = ExpertCache(1, LRU())
    (old,) = cache.prefetch([A], deadline=2)
    cache.drop(old)
    (new,) = cache.acquire([A], 3).submit
    assert new.slot == old.slot and new.serial != old.serial
    cache.complete(old)
    assert not cache.resident(A)
    assert cache.fail(old) is False
    cache.drop(old)
    cache.complete(new)
    cache.complete(new)
    assert cache.fail(new) is False and cache.resident(A)
    cache.check()


def test_reset_inflight() -> None:
    cache = ExpertCache(5, LRU())
    demand(cache, A)
    (read,) = cache.prefetch([B], deadline=9, binding=True)
    cache.complete(read)
    cache.prefetch([C], deadline=9)
    failed, _ = cache.acquire([D, E, A], 1).submit
    cache.fail(failed)
    cache.reset_inflight()
    cache.check()
    assert list(cache.keys_resident()) == [A, B] and len(cache) == 2
    assert cache.n_evictable == 2 and cache.n_free == 3
    assert cache.expire(99) == []
    assert cache.counters.prefetch_wasted == 1
    demand(cache, *keys(5, 6, 7, 8, 9))


@pytest.mark.parametrize("name", ["lru", "lfu", "lfru", "s3fifo", "arc", "cyclic"])
def test_a_scan_takes_as_little_of_the_working_set_as_it_can(name: str) -> None:
    cache = ExpertCache(12, make_policy(name, n_slots=12, n_layers=2))
    hot = [ExpertKey(layer, expert) for layer in range(2) for expert in range(4)]
    for step in range(4):
        for layer in range(2):
            demand(cache, *(key for key in hot if key.layer == layer), tick=2 * step + layer)
    for step in range(4, 7):
        for layer in range(2):
            for first in range(20, 60, 4):
                demand(cache, *keys(*range(first, first + 4), layer=layer), tick=2 * step + layer, scan=True)
    assert all(cache.resident(key) for key in hot)
    for step in range(7, 9):  # a scan that meets the hot experts doesn't make them colder
        for layer in range(2):
            demand(cache, *(key for key in hot if key.layer == layer), tick=2 * step + layer, scan=True)
            demand(cache, *keys(70, 71, layer=layer), tick=2 * step + layer, scan=True)
    assert all(cache.resident(key) for key in hot)
    demand(cache, *keys(80, 81, 82, 83), tick=18)  # a router really chose these: they replace what was scanned
    assert all(cache.resident(key) for key in hot)


@pytest.mark.parametrize("name", ["lru", "cyclic"])
def test_repeated_scans_wider_than_the_cache_keep_a_part_of_it(name: str) -> None:
    cache = ExpertCache(20, make_policy(name, n_slots=20, n_layers=4))
    for step in range(5):
        for layer in range(4):
            demand(cache, *keys(*range(8), layer=layer), tick=4 * step + layer, scan=True)
    assert cache.counters.hits >= 4 * 8  # LRU order would give exactly 0


def test_an_expert_that_a_scan_admitted_warms_up_when_a_router_chooses_it() -> None:
    cache = ExpertCache(3, LRU())
    demand(cache, A, scan=True)
    demand(cache, B)
    demand(cache, A)
    demand(cache, C)
    demand(cache, D)
    assert cache.resident(A) and not cache.resident(B)


def test_counters_subtract() -> None:
    cache = ExpertCache(2, LRU())
    demand(cache, A, B)
    before = cache.counters.copy()
    demand(cache, A, C)
    spent = cache.counters - before
    assert (spent.hits, spent.misses, spent.evictions, spent.demands) == (1, 1, 1, 2)
    assert cache.counters - cache.counters == CacheCounters()
    assert cache.counters != before
    assert "evictions=1" in repr(spent)


@pytest.mark.parametrize("call", [lambda c: c.acquire([A, A], 0), lambda c: c.prefetch([A, A], 0)])
def test_keys_must_be_distinct(call: Callable[[ExpertCache], object]) -> None:
    with pytest.raises(AssertionError, match="distinct"):
        call(ExpertCache(4, LRU()))
