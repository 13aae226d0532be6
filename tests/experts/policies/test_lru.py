from __future__ import annotations

from policy_harness import assert_same_requests, libcachesim

from sluice.experts.policies import make_policy
from sluice.types import ExpertKey


def test_order() -> None:
    a, b, c = (ExpertKey(0, e) for e in range(3))
    policy = make_policy("lru", n_slots=3, n_layers=1)
    for key in (a, b, c):
        policy.admit(key)
        policy.touch(key)
    policy.touch(a)
    assert policy.victims(2, lambda key: True) == [b, c]
    assert policy.victims(3, lambda key: key != b) == [c, a]


def test_same_as_libcachesim() -> None:
    assert_same_requests(lambda n_slots, ids: make_policy("lru", n_slots=n_slots, n_layers=4), libcachesim("LRU"))
