"""Which experts rise into a device's memory: by the rules, and whatever happens, each slot is one expert's."""

from __future__ import annotations

import random

from sluice.experts.policies import make_policy
from sluice.experts.tiers import MOST_RISES, UpperLevel
from sluice.types import ExpertKey


def level(n_slots: int) -> UpperLevel:
    return UpperLevel(n_slots, make_policy("lru", n_slots=n_slots, n_layers=2))


def keys(*experts: int) -> list[ExpertKey]:
    return [ExpertKey(0, e) for e in experts]


def bring(upper: UpperLevel, key: ExpertKey, tick: int = 0, *, passing: bool = False) -> ExpertKey | None:
    """Have `key` rise and arrive; who goes down for it."""
    rise = upper.rise(key, tick, passing=passing)
    assert rise is not None and rise.read.key == key
    upper.arrived(rise.read)
    upper.release([key])
    return rise.down


def test_whoever_is_demanded_rises_while_there_is_room() -> None:
    upper = level(2)
    slots, rising = upper.meet(keys(0, 1, 2), 0)
    assert slots == {} and rising == keys(0, 1)
    assert [bring(upper, key) for key in rising] == [None, None]
    slots, rising = upper.meet(keys(0, 1), 1)
    assert sorted(slots.values()) == [0, 1] and rising == []
    upper.release(list(slots))


def test_in_a_full_memory_only_those_rise_that_come_again_soon() -> None:
    upper = level(2)
    for key in upper.meet(keys(0, 1), 0)[1]:
        bring(upper, key)
    assert upper.meet(keys(2), 1)[1] == [], "it was never demanded before"
    assert upper.meet(keys(2), 2)[1] == keys(2), "it comes again at once"
    assert bring(upper, ExpertKey(0, 2)) in keys(0, 1)
    for other in range(3, 8):
        upper.meet(keys(other), other)
    assert upper.meet(keys(0), 9)[1] == [], "too long ago: here it would have gone meanwhile"


def test_a_step_brings_few_up() -> None:
    upper = level(8)
    for key in upper.meet(keys(*range(8)), 0)[1]:
        bring(upper, key)
    upper.meet(keys(8, 9, 10), 1)
    assert len(upper.meet(keys(8, 9, 10), 2)[1]) == MOST_RISES


def test_a_prompt_neither_displaces_nor_counts_as_a_demand() -> None:
    upper = level(2)
    for key in upper.meet(keys(0, 1), 0)[1]:
        bring(upper, key)
    assert upper.meet(keys(2), 1, scan=True)[1] == []
    assert upper.meet(keys(2), 2, scan=True)[1] == []
    assert upper.meet(keys(2), 3)[1] == []


def test_what_passes_is_replaced_by_what_passes_next() -> None:
    upper = level(3)
    for key in upper.meet(keys(0, 1, 2), 0)[1]:
        bring(upper, key)
    assert bring(upper, ExpertKey(0, 3), 1, passing=True) == ExpertKey(0, 0), "the least recently used makes room"
    assert bring(upper, ExpertKey(0, 4), 1, passing=True) is None, "who passed lies below as well"
    assert upper.cache.resident(ExpertKey(0, 1)) and upper.cache.resident(ExpertKey(0, 2))


def test_nobody_rises_where_all_are_pinned() -> None:
    upper = level(1)
    bring(upper, ExpertKey(0, 0))
    slots, _ = upper.meet(keys(0), 1)
    assert upper.rise(ExpertKey(0, 1), 1) is None
    upper.release(list(slots))
    assert upper.rise(ExpertKey(0, 1), 2) is not None


def test_after_a_broken_step_only_what_had_arrived_is_here() -> None:
    upper = level(2)
    bring(upper, ExpertKey(0, 0))
    assert upper.rise(ExpertKey(0, 1), 1) is not None
    upper.lost()
    upper.cache.check()
    slots, rising = upper.meet(keys(0, 1), 2)
    assert list(slots) == keys(0) and rising == keys(1)


def test_each_slot_is_one_experts_whatever_happens() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        n_slots = rng.randint(1, 6)
        upper, held = level(n_slots), {}  # slot -> who lies there, as copies were made
        for tick in range(60):
            scan = rng.random() < 0.3
            wanted = sorted({ExpertKey(rng.randint(0, 1), rng.randint(0, 7)) for _ in range(rng.randint(1, 5))})
            slots, rising = upper.meet(wanted, tick, scan=scan)
            assert all(held[slot] == key for key, slot in slots.items())
            passing = [key for key in wanted if key not in slots and scan and rng.random() < 0.5]
            pinned = list(slots)
            for key in passing + [key for key in rising if key not in passing]:
                rise = upper.rise(key, tick, passing=key in passing)
                if rise is None:
                    continue
                before = held.get(rise.read.slot)
                assert rise.down in (None, before) and before not in slots
                held[rise.read.slot] = key
                pinned.append(key)
                if rng.random() < 0.05:
                    upper.lost()
                    held = {slot: k for slot, k in held.items() if k != key}
                    pinned = []
                    break
                upper.arrived(rise.read)
            upper.release(pinned)
            upper.cache.check()
            assert {upper.cache.slot_of(key): key for key in upper.cache.keys_resident()} == held
