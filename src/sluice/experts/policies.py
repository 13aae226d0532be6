"""Eviction policies: each ranks the experts that own a slot, and knows neither slots nor pins nor reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from sluice.errors import InputError
from sluice.types import ExpertKey

Evictable = Callable[[ExpertKey], bool]


class Policy(Protocol):
    """What the cache tells a policy, and the one thing it asks. All deterministic.

    `scan` marks a sweep over a layer (a prefill wave): what it admits is colder than anything else, and the first to
    go when the sweep itself needs room.
    """

    def tick(self, tick: int) -> None:
        """An acquire at `tick` (steps × layers + layer) begins."""
        ...

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        """A read of `key` was issued: it owns a slot from now on."""
        ...

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        """A router chose `key`, which owns a slot."""
        ...

    def evict(self, key: ExpertKey) -> None:
        """`key` lost its slot, as a victim or otherwise."""
        ...

    def victims(self, n: int, evictable: Evictable) -> list[ExpertKey]:
        """The `n` evictable experts to lose first, fewer if there are no more. The caller evicts all of them."""
        ...


class LRU:
    """Least recently used first; of what only scans have touched, the newest first, before all else.

    Scans sweep the layers in a cycle longer than the cache, where evicting the newest is what keeps any of it.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()  # next victim first

    def tick(self, tick: int) -> None:
        pass

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._order[key] = None
        if scan:
            self._order.move_to_end(key, last=False)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        if not scan:
            self._order.move_to_end(key)

    def evict(self, key: ExpertKey) -> None:
        del self._order[key]

    def victims(self, n: int, evictable: Evictable) -> list[ExpertKey]:
        found: list[ExpertKey] = []
        for key in self._order:
            if evictable(key):
                found.append(key)
                if len(found) == n:
                    break
        return found


class Pinned:
    """A fixed set that goes only when nothing else is left; LRU among the rest, and within the set."""

    def __init__(self, keys: Collection[ExpertKey]) -> None:
        self._fixed, self._members, self._rest = frozenset(keys), LRU(), LRU()

    def _part(self, key: ExpertKey) -> LRU:
        return self._members if key in self._fixed else self._rest

    def tick(self, tick: int) -> None:
        pass

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._part(key).admit(key, scan)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        self._part(key).touch(key, scan)

    def evict(self, key: ExpertKey) -> None:
        self._part(key).evict(key)

    def victims(self, n: int, evictable: Evictable) -> list[ExpertKey]:
        found = self._rest.victims(n, evictable)
        return found + self._members.victims(n - len(found), evictable) if len(found) < n else found


class _Ranked:
    """Base of policies that evict the lowest rank first; a rank only rises while its expert owns a slot.

    A lazy heap: each expert in a slot has one live item, which may lag behind its rank and is put right when it comes
    up. Touching is O(1), a victim O(log n) plus what is passed over because it isn't evictable.
    """

    def __init__(self) -> None:
        self._rank: dict[ExpertKey, tuple[int, int]] = {}  # experts that own a slot
        self._heap: list[tuple[int, int, ExpertKey]] = []
        self._item: dict[ExpertKey, tuple[int, int, ExpertKey]] = {}  # the live item of each; others are leftovers

    def tick(self, tick: int) -> None:
        pass

    def evict(self, key: ExpertKey) -> None:
        del self._rank[key]
        self._item.pop(key, None)

    def _push(self, key: ExpertKey) -> None:
        item = self._item[key] = (*self._rank[key], key)
        heappush(self._heap, item)

    def victims(self, n: int, evictable: Evictable) -> list[ExpertKey]:
        found: list[ExpertKey] = []
        passed: list[ExpertKey] = []
        while self._heap and len(found) < n:
            item = heappop(self._heap)
            key = item[2]
            if self._item.get(key) is not item:
                continue
            if self._rank[key] != item[:2]:
                self._push(key)
            elif evictable(key):
                del self._item[key]
                found.append(key)
            else:
                passed.append(key)
        for key in passed:
            self._push(key)
        return found


class LFU(_Ranked):
    """Least frequently used first, the least recent of equals, with dynamic aging (LFU-DA, Arlitt et al. 2000).

    An expert's rank is its touches since it was admitted plus the rank of the last victim before its newest touch, so
    what was popular long ago is overtaken. What only scans have touched ranks below everything, the newest lowest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count: dict[ExpertKey, int] = {}
        self._age = 0
        self._clock = 0

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._clock += 1
        self._count[key] = 0
        self._rank[key] = (-1, -self._clock) if scan else (self._age, self._clock)
        self._push(key)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        if not scan:
            self._clock += 1
            self._count[key] += 1
            self._rank[key] = (self._age + self._count[key], self._clock)

    def evict(self, key: ExpertKey) -> None:
        super().evict(key)
        del self._count[key]

    def victims(self, n: int, evictable: Evictable) -> list[ExpertKey]:
        found = super().victims(n, evictable)
        if found:
            self._age = max(self._age, self._rank[found[-1]][0])
        return found


class Belady(_Ranked):
    """MIN: the expert whose next use is farthest goes first. Needs the future, so only simulations can have it.

    `future` is every demand of the run in order. The bound that no policy's hit rate exceeds on that sequence.
    """

    def __init__(self, future: Iterable[ExpertKey]) -> None:
        super().__init__()
        self._uses: dict[ExpertKey, list[int]] = {}  # positions of each expert's demands to come, the next one last
        for position, key in enumerate(future):
            self._uses.setdefault(key, []).append(position)
        for uses in self._uses.values():
            uses.reverse()

    def _next(self, key: ExpertKey) -> tuple[int, int]:
        uses = self._uses.get(key)
        return (-uses[-1], 0) if uses else (-(1 << 62), 0)

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._rank[key] = self._next(key)
        self._push(key)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        uses = self._uses.get(key)
        if uses:
            uses.pop()
        self._rank[key] = self._next(key)
        self._push(key)  # its rank has fallen: an item that lags behind would come up too late


class Cyclic:
    """The longest expected wait for the next use goes first, given that the layers run in a cycle 0 … n_layers − 1.

    For steps that demand more experts than there are slots (many streams), where LRU evicts each expert just before its
    layer comes round again and never hits. An expert of a layer that runs in d ticks and demands it with probability p
    per execution waits d + n_layers × (1/p − 1) ticks on average. p is the mean of a fast average of the expert's
    past, which follows the subject, and a slow one, which knows its popularity; both outlive its eviction.

    An expert's p changes only when its layer runs, so a layer is sorted once per execution, and a victim is the last of
    one of the layers.
    """

    # Per execution of a layer. Chosen on 1-32 streams of synthetic routes, where the optimum is flat.
    FAST, SLOW, FAST_SHARE = 0.8, 0.98, 0.7
    MIN_P = 1e-4  # for what only scans or predictions have chosen: d still orders it

    def __init__(self, n_layers: int) -> None:
        self._n_layers = n_layers
        self._now = -1
        self._next_run = list(range(n_layers))  # tick at which each layer runs next
        self._runs = [0] * n_layers  # executions of each layer
        self._past: dict[ExpertKey, tuple[float, float, int]] = {}  # fast, slow average at its newest touch; that run
        self._members: list[dict[ExpertKey, bool]] = [{} for _ in range(n_layers)]  # own a slot; True: only scanned
        self._new: list[set[ExpertKey]] = [set() for _ in range(n_layers)]  # members that are not in the order yet
        self._order: list[list[tuple[float, ExpertKey]] | None] = [None] * n_layers  # (wait beyond d, key) ascending
        self._last_use = [-inf] * n_layers  # expected tick of the next use of the last in each layer's order
        self._dirty: set[int] = set()  # layers whose order or last use is out of date

    def tick(self, tick: int) -> None:
        if tick != self._now:
            self._now = tick
            layer = tick % self._n_layers
            self._next_run[layer] = tick + self._n_layers
            self._runs[layer] += 1
            self._forget_order(layer)

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._members[key.layer][key] = scan
        self._new[key.layer].add(key)
        self._dirty.add(key.layer)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        if scan:
            return
        layer = key.layer
        run = self._runs[layer]
        fast, slow, last = self._past.get(key, (0.0, 0.0, -1))
        if last != run:
            since = run - last
            self._past[key] = (fast * self.FAST**since + 1 - self.FAST, slow * self.SLOW**since + 1 - self.SLOW, run)
        self._members[layer][key] = False
        if key not in self._new[layer]:
            self._forget_order(layer)

    def evict(self, key: ExpertKey) -> None:
        if self._members[key.layer].pop(key, None) is not None:  # else: it left as a victim
            self._forget_order(key.layer)

    def victims(self, n: int, evictable: Evictable) -> list[ExpertKey]:
        for layer in self._dirty:
            self._sort(layer)
            self._show_last(layer)
        self._dirty.clear()
        last_use = self._last_use
        found: list[ExpertKey] = []
        place: dict[int, int] = {}  # index in the layer's order of what comes next there
        while len(found) < n and (latest := max(last_use)) > -inf:
            layer = last_use.index(latest)
            order = self._sort(layer)
            i = place.get(layer, len(order) - 1)
            key = order[i][1]
            if evictable(key):
                found.append(key)
                del order[i], self._members[layer][key]
            place[layer] = i - 1
            last_use[layer] = order[i - 1][0] + self._next_run[layer] if i else -inf
        for layer in place:
            self._show_last(layer)
        return found

    def _forget_order(self, layer: int) -> None:
        self._order[layer] = None
        self._dirty.add(layer)

    def _show_last(self, layer: int) -> None:
        order = self._sort(layer)
        self._last_use[layer] = order[-1][0] + self._next_run[layer] if order else -inf

    def _sort(self, layer: int) -> list[tuple[float, ExpertKey]]:
        """The layer's members in order, after adding what is missing from it."""
        order, members, new = self._order[layer], self._members[layer], self._new[layer]
        if order is None:
            order = self._order[layer] = []
            new = members
        if not new:
            return order
        run, past, never = max(self._runs[layer], 1), self._past, (0.0, 0.0, 0)
        # An average that started at 0 is divided by the weight that the layer's executions so far add up to.
        FAST, SLOW, MIN_P, n_layers = self.FAST, self.SLOW, self.MIN_P, self._n_layers
        fast_scale, slow_scale = self.FAST_SHARE / (1 - FAST**run), (1 - self.FAST_SHARE) / (1 - SLOW**run)
        for key in new:
            if key in members:
                fast, slow, last = never if members[key] else past.get(key, never)
                since = run - last
                p = fast * fast_scale * FAST**since + slow * slow_scale * SLOW**since
                order.append((n_layers / (p if p > MIN_P else MIN_P) - n_layers, key))
        order.sort()
        self._new[layer].clear()
        return order


POLICIES: dict[str, Callable[[int, Collection[ExpertKey]], Policy]] = {
    "lru": lambda n_layers, pinned: LRU(),
    "lfu": lambda n_layers, pinned: LFU(),
    "cyclic": lambda n_layers, pinned: Cyclic(n_layers),
    "pinned": lambda n_layers, pinned: Pinned(pinned),
}


def make_policy(name: str, *, n_layers: int, pinned: Collection[ExpertKey] = ()) -> Policy:
    """A new policy by its name in POLICIES; `pinned` is the fixed set of the policy of that name."""
    if name not in POLICIES:
        raise InputError(f"unknown cache policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](n_layers, pinned)
