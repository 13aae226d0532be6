from __future__ import annotations

from collections import deque

from policy_harness import assert_same_requests, libcachesim

from sluice.experts.policies import make_policy
from sluice.experts.policies.s3fifo import S3FIFO
from sluice.types import ExpertKey


def key(expert: int) -> ExpertKey:
    return ExpertKey(0, expert)


def used(policy: S3FIFO, expert: int, times: int) -> None:
    """Admitted, and used so often after the use it was admitted for."""
    policy.admit(key(expert))
    for _ in range(1 + times):
        policy.touch(key(expert))


def test_only_what_is_used_again_gets_into_the_main_queue() -> None:
    policy = S3FIFO(40)  # 4 of them small
    for expert, times in enumerate([0, 1, 2, 0]):
        used(policy, expert, times)
    assert policy.victims(2, lambda key: True, [key(8), key(9)]) == [key(0), key(1)]
    policy.evict(key(0))
    policy.evict(key(1))
    used(policy, 1, 0)  # remembered: straight into the main queue
    used(policy, 8, 0)
    # the small queue, 2, 3 and 8, is short; then 2 moves to the main one on the way to 3
    assert policy.victims(4, lambda key: True) == [key(1), key(3), key(2), key(8)]


def test_what_may_not_go_keeps_its_place() -> None:
    policy = S3FIFO(40)
    for expert in range(4):
        used(policy, expert, 0)
    assert policy.victims(1, lambda other: other not in (key(0), key(1))) == [key(2)]
    policy.evict(key(2))
    assert policy.victims(3, lambda other: True) == [key(0), key(1), key(3)]


def test_a_predicted_expert_was_not_used_yet() -> None:
    policy = S3FIFO(40)
    policy.admit(key(0))
    used(policy, 1, 1)
    for _ in range(2):
        policy.touch(key(0))  # the first of these is what it was admitted for
    policy.admit(key(2))
    assert policy.victims(3, lambda other: True) == [key(0), key(1), key(2)]


class PlainS3Fifo:
    """The paper's algorithm 1 and the warm-up, also where libCacheSim's small queue is too small to take anything."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots, self.small_size, self.ghost_size = n_slots, max(1, n_slots // 10), n_slots * 9 // 10
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghost: deque[int] = deque()
        self.freq: dict[int, int] = {}
        self.filling = True

    def request(self, id: int) -> bool:
        if id in self.freq:
            self.freq[id] = min(self.freq[id] + 1, 3)
            return True
        queue = self.small
        if id in self.ghost:
            self.ghost.remove(id)
            queue = self.main
        while len(self.freq) >= self.n_slots:
            self.filling = False
            self.evict_small() if len(self.small) >= self.small_size else self.evict_main()
        if self.filling and len(self.small) >= self.small_size:
            queue = self.main
        queue.append(id)
        self.freq[id] = 0
        return False

    def evict_small(self) -> None:
        while self.small:
            id = self.small.popleft()
            if self.freq[id] > 1:
                self.main.append(id)
                self.freq[id] = 0
                continue
            del self.freq[id]
            self.ghost.append(id)
            if len(self.ghost) > self.ghost_size:
                self.ghost.popleft()
            return

    def evict_main(self) -> None:
        while self.main:
            id = self.main.popleft()
            if not self.freq[id]:
                del self.freq[id]
                return
            self.freq[id] -= 1
            self.main.append(id)


def test_same_as_a_plain_implementation() -> None:
    assert_same_requests(
        lambda n_slots, ids: make_policy("s3fifo", n_slots=n_slots, n_layers=4),
        lambda n_slots, ids: PlainS3Fifo(n_slots),
    )


def test_same_as_libcachesim() -> None:
    """libCacheSim's small queue admits nothing as large as itself: with fewer than 20 slots no object of size 1."""
    assert_same_requests(
        lambda n_slots, ids: make_policy("s3fifo", n_slots=n_slots, n_layers=4),
        libcachesim("S3FIFO"),
        capacities=(20, 37, 60, 90),
    )
