from __future__ import annotations

from policy_harness import N_LAYERS, assert_same_requests

from sluice.experts.policies import lfru, make_policy
from sluice.types import ExpertKey


def test_many_old_uses_weigh_less_than_a_few_new_ones() -> None:
    a, b = ExpertKey(0, 0), ExpertKey(0, 1)
    policy = make_policy("lfru", n_slots=2, n_layers=1)
    policy.admit(a)
    policy.admit(b)
    for tick in range(8):
        policy.tick(tick)
        policy.touch(a)
    policy.touch(b)
    assert policy.victims(1, lambda key: False) == []
    assert policy.victims(2, lambda key: True) == [b, a]
    for key in (a, b):
        policy.evict(key)
        policy.admit(key)  # what was counted outlives the eviction
    policy.tick(8 + int(4 * lfru.HALF_LIFE))
    policy.touch(b)  # what all of a's uses are worth by now is less than one
    assert policy.victims(2, lambda key: True) == [a, b]


def test_what_was_scanned_goes_first_the_newest_before_the_older() -> None:
    a, b, c = (ExpertKey(0, e) for e in range(3))
    policy = make_policy("lfru", n_slots=3, n_layers=1)
    policy.tick(0)
    policy.admit(a)
    policy.touch(a)
    for key in (b, c):
        policy.admit(key, scan=True)
        policy.touch(key, scan=True)
    assert policy.victims(3, lambda key: True) == [c, b, a]


class PlainLrfu:
    """The sum by its definition, brought up to date whenever it is looked at; the least goes."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.now = -1
        self.sums: dict[int, tuple[float, int]] = {}  # of all uses there ever were, at the newest; its time
        self.held: set[int] = set()

    def value(self, id: int) -> float:
        then, use = self.sums.get(id, (0.0, 0))
        return then * 0.5 ** ((self.now - use) / N_LAYERS / lfru.HALF_LIFE)

    def request(self, id: int) -> bool:
        self.now += 1
        hit = id in self.held
        if not hit and len(self.held) == self.n_slots:
            self.held.remove(min(self.held, key=self.value))
        self.held.add(id)
        self.sums[id] = (self.value(id) + 1, self.now)
        return hit


def test_same_as_a_plain_implementation(monkeypatch) -> None:
    """libCacheSim has no LRFU. With a half-life that makes all sums of the test differ beyond rounding."""
    monkeypatch.setattr(lfru, "HALF_LIFE", 3.7)
    assert_same_requests(
        lambda n_slots, ids: make_policy("lfru", n_slots=n_slots, n_layers=N_LAYERS),
        lambda n_slots, ids: PlainLrfu(n_slots),
    )
