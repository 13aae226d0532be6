"""Runs steps of a model that is divided over a device and the processor. It places nothing and opens nothing.

A layer's experts are computed where they lie: in the device's slots there, in RAM here, at the same time. What many
tokens want of an expert in RAM is uploaded first where that is sooner. The weighted sum runs where the next segment
does. So what an expert adds may be rounded in two ways: logits depend on where experts lie, which `mode` tells.

Experts are copied while the device computes: what a prompt uploads, beside the upload before it; who rises to stay,
beside the segment that comes next. Slots that the device may be reading are pinned, so no copy goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from sluice.engine.device_site import DeviceSite
from sluice.engine.ledger import PhaseLedger
from sluice.engine.pairs import KEPT_PAIRS
from sluice.engine.segments import BatchShape
from sluice.engine.step import Demand, Each, Stepper, pair_groups
from sluice.experts.waves import waves
from sluice.ggml import Graph
from sluice.types import ExpertKey
from sluice.vram import Group

PAIR_LISTS = ("pair_rows", "pair_slots", "pair_tokens", "pair_experts")  # what graphs of pairs read
UPLOADED_AT_ONCE = 8  # experts that a prompt brings up together


class SplitStepper(Stepper):
    """A Stepper whose segments are partly `site`'s. What `upload_from` pairs of a step want is uploaded first."""

    def __init__(self, *parts: Any, site: DeviceSite, upload_from: int, **options: Any) -> None:
        super().__init__(*parts, **options)
        assert self.prerouting is None, "routes known ahead are run on the processor alone"
        self.site = site
        self.upload_from = upload_from
        # of the layer whose experts are being computed: who was uploaded for it, whom of them the device may still be
        # computing with, the rows of pairs that the host has computed, and when it is due
        self._uploaded: set[ExpertKey] = set()
        self._passing: list[ExpertKey] = []
        self._by_host: list[np.ndarray] = []
        self._tick = 0
        self._rising: list[ExpertKey] = []  # those that should come up for good, beside the next segment

    def run(
        self, streams: Sequence[tuple[int, int, Sequence[int]]], outputs: Sequence[int], ledger: PhaseLedger,
        each: Each | None = None, *, decoding: bool = False,
    ) -> np.ndarray:  # fmt: skip
        try:
            return super().run(streams, outputs, ledger, each, decoding=decoding)
        except BaseException:
            self.site.wait()
            self._passing, self._rising = [], []
            for group in self._groups():
                group.level.lost()
            raise

    def _groups(self) -> list[Group]:
        return [] if self.site.pool is None else self.site.pool.groups

    # --- inputs and outputs

    def _here(self, i: int) -> bool:
        """Segment `i` is the device's."""
        return i in self.site.segment_numbers

    def _write_inputs(self, streams: Sequence[tuple[int, int, Sequence[int]]], outputs: Sequence[int]) -> BatchShape:
        shape = super()._write_inputs(streams, outputs)
        n, put = shape.n_tokens, self.site.put
        for name in ("tokens", "positions", "rows"):
            put(name, n)
        if outputs:
            put("outputs", min(len(outputs), self.workspace.n_outputs))
        put("mask", sum(column.n_kv * column.n for column in shape.columns))
        if self.spec.window:
            put("near_mask", sum((column.n_kv - column.near) * column.n for column in shape.columns))
        return shape

    def _graphs(self, shape: BatchShape) -> dict[int, Graph]:
        return self.segments.of(shape) | self.site.segments.of(shape)

    def _forget(self, stream: int) -> None:
        super()._forget(stream)
        self.site.wait()
        self.site.states.clear(stream)

    def _logits(self, shape: BatchShape, each: Each | None) -> np.ndarray:
        self._raise()  # where the step ends with experts
        if self._here(len(self.spec.moe_layers)) and 0 < shape.n_outputs <= self.workspace.n_outputs:
            self.site.get("logits", shape.n_outputs)
        return super()._logits(shape, each)

    def _head(self, start: int, n: int) -> None:
        if not self._here(len(self.spec.moe_layers)):
            super()._head(start, n)
            return
        context, graph = self.site.segments.head(start, n)
        with context:
            self._compute_there(graph)
        self.site.get("logits", n)

    # --- segments

    def _segment(self, segments: dict[int, Graph], shape: BatchShape, i: int) -> None:
        if i and self._here(i - 1) != self._here(i):
            self._carry(i, shape)
        if not self._here(i):
            self._raise()
            super()._segment(segments, shape, i)
            return
        self._compute_there(segments[i])
        ws, site, moe = self.workspace, self.site, self.spec.moe_layers
        if self.recorder is not None and self._unweighed:
            site.get("weights", self._unweighed)
            self._weigh()
        if i < len(moe) and (n := shape.n_wanted(moe[i], self.spec, ws.n_outputs)):
            site.get("selected", n)
            if self._reroutes is not None or self.recorder is not None:
                site.get("scores", n)
            for d, _ in self._looks_ahead(shape, i):
                site.get("predicted", n, d * ws.n_tokens)

    def _carry(self, i: int, shape: BatchShape) -> None:
        """Bring what segment `i` reads of the layer before to where it runs."""
        if self._parts:
            self._run_parts(shape)
        moe, spec = self.spec.moe_layers, self.spec
        m = max(1, shape.n_wanted(moe[i - 1], spec, self.workspace.n_outputs))
        move = self.site.put if self._here(i) else self.site.get
        for name in ("residual", "scores", "routed", *(["shared"] if spec.n_ff_shared else [])):
            move(name, m)
        move("pairs", m * spec.top_k)

    def _looks_ahead(self, shape: BatchShape, i: int) -> list[tuple[int, int]]:
        return (self.site.segments if self._here(i) else self.segments).looks_ahead(shape, i)

    def _compute_there(self, graph: Graph) -> None:
        """Run `graph` on the device, and beside it copy what should rise."""
        began = perf_counter()
        self.site.start(graph)
        self._ledger.compute_s += perf_counter() - began
        if not self.overlap:
            self._await()
        self._raise()
        self._await()

    def _await(self) -> None:
        began = perf_counter()
        self.site.wait()
        self._ledger.compute_s += perf_counter() - began

    # --- experts

    def _is_near(self, key: ExpertKey) -> bool:
        group = self.site.group(key.layer)
        return super()._is_near(key) or (group is not None and group.level.cache.resident(key))

    def _below(self, layer: int, keys: list[ExpertKey]) -> list[ExpertKey]:
        group = self.site.group(layer)
        return keys if group is None else [key for key in keys if not group.level.cache.resident(key)]

    def _experts(self, i: int, shape: BatchShape, n: int, scan: bool) -> None:
        if not self._here(i):
            super()._experts(i, shape, n, scan)
            return
        site, store, layer = self.site, self.store, self.spec.moe_layers[i]
        routed = self._routed(i, shape, n)
        site.put("routed", n)
        demand, keys, tick = self._demand(layer, routed)
        if self.prefetch:
            self._score_guess(i, routed)
        group = site.group(layer)
        above, rising = ({}, []) if group is None else group.level.meet(keys, tick, scan=scan)
        below = [key for key in keys if key not in above]
        self._uploaded, self._by_host, self._tick = set(), [], tick
        self._ledger.device_hits += len(above)
        if below:
            site.get("normed", n)
        if self.spec.n_ff_shared:
            site.start(site.segments.shared(layer, n))
        if above and group is not None:
            self._pairs_there(i, group, demand, above, n)
        if below:
            plan = waves(below, store.n_slots, store.cache.resident)
            acquired = self._acquire(plan.groups[0], tick, scan)
            self._go_through(i, shape, n, scan, demand, plan, acquired, tick, join=False)
        elif self.prefetch:
            self._prefetch_ahead(i, shape, n, tick)
        if self._by_host:
            rows = np.concatenate(self._by_host)
            site.scatter(self.workspace.arrays["pairs"], rows)
        if group is not None:
            self._let_pass(group)
            group.level.release(list(above))
            self._rising = rising

    def _raise(self) -> None:
        """Bring those that should rise up, if they lie in RAM, in the place of others there."""
        if not self._rising:
            return
        keys, self._rising = self._rising, []
        pool, group, cache = self.site.pool, self.site.group(keys[0].layer), self.store.cache
        assert pool is not None and group is not None
        for key in keys:
            if not cache.resident(key) or group.level.cache.resident(key):
                continue
            rise = group.level.rise(key, self._tick)
            if rise is None:
                return
            slot = cache.slot_of(key)
            assert slot is not None
            self._ledger.promotions += 1
            self._ledger.overlapped += self.site.busy
            self._ledger.demotions += pool.swap(rise, slot)
            group.level.release([key])

    def _compute_pairs(
        self, i: int, demand: Demand, keys: list[ExpertKey], slots: dict[ExpertKey, int], n: int, *, join: bool
    ) -> None:
        if not self._here(i):
            super()._compute_pairs(i, demand, keys, slots, n, join=join)
            return
        here = keys
        if (group := self.site.group(keys[0].layer)) is not None:
            many = [key for key in keys if len(demand.pairs[key.expert]) >= self.upload_from]
            for at in range(0, len(many), UPLOADED_AT_ONCE):
                self._upload(i, group, demand, many[at : at + UPLOADED_AT_ONCE], slots, n)
            here = [key for key in keys if key not in self._uploaded]
        if here:
            super()._compute_pairs(i, demand, here, slots, n, join=False)
            self._by_host.append(np.concatenate([np.asarray(demand.pairs[key.expert], np.int64) for key in here]))

    def _upload(
        self, i: int, group: Group, demand: Demand, keys: list[ExpertKey], slots: dict[ExpertKey, int], n: int
    ) -> None:
        """Have the device compute the pairs of `keys`, which lie in `slots` of RAM and are copied up for that.

        It may still be computing with those that were uploaded before, which keep their slots until it is done.
        """
        pool, there = self.site.pool, {}
        assert pool is not None
        if not self.overlap:
            self._let_pass(group)
        for key in keys:
            rise = group.level.rise(key, self._tick, passing=True)
            if rise is None and self._passing:
                self._let_pass(group)
                rise = group.level.rise(key, self._tick, passing=True)
            if rise is None:
                break
            self._ledger.overlapped += self.site.busy
            self._ledger.demotions += pool.pass_through(rise, slots[key])
            there[key] = rise.read.slot
        self._ledger.uploads += len(there)
        self._uploaded.update(there)
        self._let_pass(group)
        self._passing = list(there)
        if there:
            self._pairs_there(i, group, demand, there, n)

    def _let_pass(self, group: Group) -> None:
        """Wait for the device, after which what was uploaded may go."""
        self._await()
        group.level.release(self._passing)
        self._passing = []

    def _pairs_there(self, i: int, group: Group, demand: Demand, slots: dict[ExpertKey, int], n: int) -> None:
        """Have the device begin with the pairs of experts in its `slots`."""
        layer, arrays, site = self.spec.moe_layers[i], self.workspace.arrays, self.site
        by_bank: dict[int, dict[ExpertKey, int]] = {}
        for key, slot in slots.items():
            bank, index = group.at(slot)
            by_bank.setdefault(bank, {})[key] = index
        for bank, members in by_bank.items():
            graphs = site.pairs[layer][bank]
            for some, _, _ in pair_groups(demand, list(members), members):
                n_pairs = self._list_pairs(demand, some, [members[key] for key in some])
                for name in PAIR_LISTS:
                    if name in arrays:
                        site.put(name, n_pairs)
                if n == 1:
                    site.start(graphs.single(layer, n_pairs))
                elif n_pairs <= KEPT_PAIRS:
                    site.start(graphs.kept(layer, n_pairs))
                else:
                    context, graph = graphs.once(layer, n_pairs, 0, graphs.store.n_slots)
                    site.start(graph, context)
