from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.experts.cache import ExpertCache
from sluice.experts.policies import LRU
from sluice.experts.waves import Waves, waves
from sluice.types import ExpertKey


def keys(*experts: int) -> list[ExpertKey]:
    return [ExpertKey(2, expert) for expert in experts]


def test_what_fits_is_one_wave_in_ascending_order() -> None:
    assert waves(keys(5, 1, 3), 3, lambda key: key.expert == 5) == Waves([keys(1, 3, 5)], overlap=False)
    assert waves([], 3, lambda key: False) == Waves([], overlap=False)


def test_resident_experts_come_first() -> None:
    got = waves(keys(0, 1, 2, 3, 4, 5, 6), 5, lambda key: key.expert in (2, 4, 5))
    assert got == Waves([keys(2, 4), keys(5, 0), keys(1, 3), keys(6)], overlap=True)


@pytest.mark.parametrize(("n_available", "size", "overlap"), [(1, 1, False), (2, 1, True), (3, 1, True), (4, 2, True)])
def test_few_slots(n_available: int, size: int, overlap: bool) -> None:
    got = waves(keys(*range(6)), n_available, lambda key: False)
    assert got.overlap is overlap
    assert [len(group) for group in got.groups] == [size] * (6 // size)


@given(
    demanded=st.sets(st.integers(0, 31)),
    before=st.lists(st.integers(0, 31), unique=True, max_size=9),
    n_slots=st.integers(1, 9),
    order=st.randoms(),
)
def test_every_wave_fits_and_nothing_resident_is_read_again(
    demanded: set[int], before: list[int], n_slots: int, order
) -> None:
    cache = ExpertCache(n_slots, LRU())
    before = before[:n_slots]
    for read in cache.acquire(keys(*before), 0).submit:
        cache.complete(read)
    cache.release(keys(*before))
    shuffled = sorted(demanded)
    order.shuffle(shuffled)
    groups, overlap = waves(keys(*shuffled), n_slots, cache.resident)
    assert sorted(key for group in groups for key in group) == keys(*sorted(demanded))
    hits, held = 0, []
    for group in groups:
        if not overlap and held:
            cache.release(held.pop())
        acquired = cache.acquire(group, 1, scan=True)  # CacheFull would be a bug of the cut
        hits += acquired.hits
        for read in acquired.submit:
            cache.complete(read)
        if held:
            cache.release(held.pop())
        held.append(group)
    assert hits == len(demanded.intersection(before))
