"""Cyclic: for steps that want more experts than there are slots, what will be wanted last goes first."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from sluice.experts.policies.base import Evictable
from sluice.types import ExpertKey


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
        self._moved: list[set[ExpertKey]] = [set() for _ in range(n_layers)]  # members with another place in the order
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
        self._moved[key.layer].add(key)
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
        self._moved[layer].add(key)
        self._dirty.add(layer)

    def evict(self, key: ExpertKey) -> None:
        if self._members[key.layer].pop(key, None) is not None:  # else: it left as a victim
            self._forget_order(key.layer)

    def victims(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey] = ()) -> list[ExpertKey]:
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
        """The layer's members in order, after giving those their place that lack it."""
        order, members, moved = self._order[layer], self._members[layer], self._moved[layer]
        if order is None:
            order = self._order[layer] = []
            moved = members
        elif not moved:
            return order
        else:
            order[:] = [item for item in order if item[1] not in moved]
        run, past, never = max(self._runs[layer], 1), self._past, (0.0, 0.0, 0)
        # An average that started at 0 is divided by the weight that the layer's executions so far add up to.
        FAST, SLOW, MIN_P, n_layers = self.FAST, self.SLOW, self.MIN_P, self._n_layers
        fast_scale, slow_scale = self.FAST_SHARE / (1 - FAST**run), (1 - self.FAST_SHARE) / (1 - SLOW**run)
        for key in moved:
            if key in members:
                fast, slow, last = never if members[key] else past.get(key, never)
                since = run - last
                p = fast * fast_scale * FAST**since + slow * slow_scale * SLOW**since
                order.append((n_layers / (p if p > MIN_P else MIN_P) - n_layers, key))
        order.sort()
        self._moved[layer].clear()
        return order
