from __future__ import annotations

from policy_harness import assert_same_requests, libcachesim

from sluice.experts.policies import make_policy
from sluice.experts.policies.arc import ARC
from sluice.types import ExpertKey


def key(expert: int) -> ExpertKey:
    return ExpertKey(0, expert)


def used(policy: ARC, expert: int, times: int = 1) -> None:
    policy.admit(key(expert))
    for _ in range(times):
        policy.touch(key(expert))


def replaced(policy: ARC, newcomer: int) -> list[ExpertKey]:
    """Makes room for one expert, which takes it."""
    victims = policy.victims(1, lambda other: True, [key(newcomer)])
    for victim in victims:
        policy.evict(victim)
    used(policy, newcomer)
    return victims


def test_a_miss_that_is_remembered_moves_the_proportion() -> None:
    policy = ARC(4)
    for expert, times in ((0, 2), (1, 2), (2, 1), (3, 1)):
        used(policy, expert, times)
    assert replaced(policy, 4) == [key(2)]  # the least recent of those used once
    assert replaced(policy, 2) == [key(3)]  # it comes back: those used once ought to have one slot more
    assert policy._p == 1
    assert replaced(policy, 5) == [key(0)]  # one of them is no longer too many
    assert replaced(policy, 0) == [key(4)]  # remembered by the other side: one slot fewer again
    assert policy._p == 0


def test_what_may_not_go_is_passed_over() -> None:
    policy = ARC(3)
    used(policy, 0, 2)
    used(policy, 1)
    used(policy, 2)
    assert policy.victims(1, lambda other: other not in (key(1), key(2)), [key(3)]) == [key(0)]
    policy.evict(key(0))
    assert policy.victims(2, lambda other: other != key(1), [key(3), key(4)]) == [key(2)]


def test_a_predicted_expert_was_not_used_yet() -> None:
    policy = ARC(3)
    policy.admit(key(0))
    used(policy, 1, 2)
    used(policy, 2)
    policy.touch(key(0))  # the use it was admitted for: still among those used once
    assert policy.victims(3, lambda other: True) == [key(2), key(0), key(1)]


def test_a_failed_read_is_not_remembered() -> None:
    policy = ARC(2)
    policy.admit(key(0))
    policy.evict(key(0))
    used(policy, 1)
    used(policy, 2)
    replaced(policy, 0)
    assert policy._p == 0 and key(0) in policy._t1


def test_same_as_libcachesim() -> None:
    assert_same_requests(lambda n_slots, ids: make_policy("arc", n_slots=n_slots, n_layers=4), libcachesim("ARC"))
