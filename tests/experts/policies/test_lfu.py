from __future__ import annotations

from policy_harness import assert_same_requests

from sluice.experts.policies import make_policy
from sluice.types import ExpertKey


def test_order_and_aging() -> None:
    a, b, c, d = (ExpertKey(0, e) for e in range(4))
    policy = make_policy("lfu", n_slots=4, n_layers=1)
    for key, touches in ((a, 5), (b, 2), (c, 2)):
        policy.admit(key)
        for _ in range(touches):
            policy.touch(key)
    policy.touch(b)
    policy.touch(c)
    assert policy.victims(1, lambda key: key != b) == [c]  # as often as b, but b may not go
    policy.evict(c)
    for _ in range(3):  # each newcomer starts from the rank of the last victim, so that a's past fades
        assert policy.victims(1, lambda key: key != a) in ([b], [d])
        policy.evict(b if b in policy._rank else d)  # type: ignore[attr-defined]
        policy.admit(d)
        policy.touch(d)
        policy.touch(d)
    assert policy.victims(1, lambda key: True) == [a]


class PlainLfuDa:
    """LFU-DA by its definition: rank = uses + the rank of the newest victim before the newest use; the least goes."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.age = self.clock = 0
        self.held: dict[int, tuple[int, int, int]] = {}  # rank, time of the newest use, uses

    def request(self, id: int) -> bool:
        self.clock += 1
        hit = id in self.held
        if not hit and len(self.held) == self.n_slots:
            victim = min(self.held, key=self.held.__getitem__)
            self.age = max(self.age, self.held.pop(victim)[0])
        uses = self.held[id][2] + 1 if hit else 1
        self.held[id] = (self.age + uses, self.clock, uses)
        return hit


def test_same_as_a_plain_implementation() -> None:
    """libCacheSim's LFU doesn't age, and its LFUDA adds the age at every use instead of once."""
    assert_same_requests(
        lambda n_slots, ids: make_policy("lfu", n_slots=n_slots, n_layers=4), lambda n_slots, ids: PlainLfuDa(n_slots)
    )
