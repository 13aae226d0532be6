from __future__ import annotations

from collections import OrderedDict

from policy_harness import assert_same_requests, key_of

from sluice.experts.policies import make_policy
from sluice.types import ExpertKey

FIXED = range(0, 60, 5)


def test_the_set_goes_last() -> None:
    fixed, other, third = (ExpertKey(0, e) for e in range(3))
    policy = make_policy("pinned", n_slots=3, n_layers=1, pinned=[fixed])
    for key in (fixed, other, third):
        policy.admit(key)
        policy.touch(key)
    policy.touch(other)
    assert policy.victims(3, lambda key: True) == [third, other, fixed]
    policy.evict(third)
    assert policy.victims(1, lambda key: key == fixed) == [fixed]


class PlainPinned:
    """One order of recency; the victim is its first that isn't fixed, or else its first."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.order: OrderedDict[int, None] = OrderedDict()

    def request(self, id: int) -> bool:
        hit = id in self.order
        if not hit and len(self.order) == self.n_slots:
            del self.order[next((other for other in self.order if other not in FIXED), next(iter(self.order)))]
        self.order[id] = None
        self.order.move_to_end(id)
        return hit


def test_same_as_a_plain_implementation() -> None:
    """libCacheSim has no policy of this kind."""
    pinned = [key_of(id) for id in FIXED]
    assert_same_requests(
        lambda n_slots, ids: make_policy("pinned", n_slots=n_slots, n_layers=4, pinned=pinned),
        lambda n_slots, ids: PlainPinned(n_slots),
    )
