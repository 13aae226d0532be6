"""Cuts one layer's demands into acquires that fit the cache; knows only how many slots there are to claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sluice.types import ExpertKey


class Waves(NamedTuple):
    """`groups` are acquired in order. With `overlap`, a group is acquired before the one before it is released."""

    groups: list[list[ExpertKey]]
    overlap: bool


def waves(keys: Sequence[ExpertKey], n_available: int, resident: Callable[[ExpertKey], bool]) -> Waves:
    """Cut `keys` (one layer's distinct experts) into groups, given `n_available` slots for them all.

    What fits is one group, in ascending order. What doesn't goes in groups of at most half the slots, so that the next
    group's reads run under this one's arithmetic: first the resident experts, so that arithmetic starts at once and
    no wave evicts what a later one needs, then the absent ones; both ascending, which is the order on disk. A single
    slot takes one expert at a time with nothing beside it.
    """
    assert n_available > 0, "no slot to claim"
    if len(keys) <= n_available:
        return Waves([sorted(keys)] if keys else [], overlap=False)
    ordered = sorted(keys, key=lambda key: (not resident(key), key))
    size = max(n_available // 2, 1)
    return Waves([ordered[i : i + size] for i in range(0, len(ordered), size)], overlap=n_available > 1)
