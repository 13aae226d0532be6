"""Runs one step of a batch through all layers: segments, demands, pairs, and reads under the arithmetic.

It knows columns and streams; what tokens mean, and who gets which logits, is the session's business.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np

from sluice.engine.ledger import PhaseLedger
from sluice.engine.pairs import KEPT_PAIRS, PAIR_LIMIT, ROW_MAP_BYTES, ROW_MAP_ENTRY, PairGraphs
from sluice.engine.prerouting import HeadGraphs, Prerouting
from sluice.engine.segments import BatchShape, Columns, SegmentGraphs
from sluice.engine.workspace import Workspace
from sluice.experts.cache import Acquired, CacheFull
from sluice.experts.rerouting import Rerouting, reroute_together
from sluice.experts.waves import Waves, waves
from sluice.ggml import Backend, Graph
from sluice.models.kv_cache import KV_PADDING, padded
from sluice.models.spec import ModelSpec
from sluice.store import ExpertStore
from sluice.trace import TraceWriter
from sluice.types import ExpertKey

RECENT_STEPS = 4096  # ledgers of single steps that are kept
MOST_PARTS = 32  # run at once while what heads say may have to be read: about eight layers' worth
Each = Callable[[int, np.ndarray], None]  # (number of the first row, logits [some rows, n_vocab], valid in the call)


class Demand:
    """One layer's demands in one step: distinct experts in ascending order, and the pairs that want each.

    `pairs[e]` are row numbers token × top_k + rank.
    """

    __slots__ = ("experts", "pairs", "top_k")

    def __init__(self, routed: np.ndarray) -> None:  # [n_tokens, top_k] int32
        self.top_k = routed.shape[1]
        if routed.shape[0] == 1:
            ranked = routed[0].tolist()
            self.experts: list[int] = sorted(ranked)
            self.pairs: dict[int, Sequence[int] | np.ndarray] = {e: (rank,) for rank, e in enumerate(ranked)}
            return
        flat = routed.ravel()
        order = np.argsort(flat, kind="stable")
        experts, starts = np.unique(flat[order], return_index=True)
        self.experts = experts.tolist()
        self.pairs = dict(zip(self.experts, np.split(order, starts[1:]), strict=True))


class Stepper:
    """Carries out steps on one engine's parts. `prefetch` issues reads for the next layer's predicted experts.

    `recorder` is told which experts each layer executes and, once they are known, their weights; a step begins there
    before it does here. `prerouting` keeps what is known of the next tokens' routes, which `heads` say unless it has
    them from elsewhere; `reads_routes` issues reads for them. `rerouting` lets experts without a slot give way to
    others in decode steps; neither goes with it.
    `overlap=False` waits for all of a layer's experts before computing any: the naive way, kept for comparison.
    """

    def __init__(
        self, spec: ModelSpec, segments: SegmentGraphs, pairs: PairGraphs, workspace: Workspace, store: ExpertStore,
        backend: Backend, *, prefetch: bool, overlap: bool = True, recorder: TraceWriter | None = None,
        prerouting: Prerouting | None = None, heads: HeadGraphs | None = None, reads_routes: bool = True,
        rerouting: Rerouting | None = None,
    ) -> None:  # fmt: skip
        assert rerouting is None or not (prefetch or prerouting), "outcomes must not depend on what came in time"
        self.spec = spec
        self.segments = segments
        self.pairs = pairs
        self.workspace = workspace
        self.store = store
        self.backend = backend
        self.prefetch = prefetch
        self.overlap = overlap
        self.recorder = recorder
        self.prerouting = prerouting
        self.heads = heads
        self.reads_routes = reads_routes
        self.rerouting = rerouting
        self.n_steps = 0
        self.recent: deque[PhaseLedger] = deque(maxlen=RECENT_STEPS)
        self._ledger = PhaseLedger()
        self._guesses: dict[int, np.ndarray] = {}  # [n_tokens, top_k] for layers to come
        self._parts: list[Graph] = []  # to run next, in one graph
        self._held: list[ExpertKey] = []  # pinned until then
        self._speaking: list[tuple[int, int]] = []  # owners whose heads are among the parts, and their ticks
        self._reroutes: Rerouting | None = None  # in this step
        self._unweighed = 0  # columns that the recorder has yet to hear the weights of
        everything = store.n_slots >= len(spec.moe_layers) * spec.n_expert
        self._most_parts = sys.maxsize if everything else MOST_PARTS

    def run(
        self, streams: Sequence[tuple[int, int, Sequence[int]]], outputs: Sequence[int], ledger: PhaseLedger,
        each: Each | None = None, *, decoding: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """One step. `streams`: (stream, position of its first token, its tokens), `outputs`: columns to give logits of.

        `decoding`: a token of each stream, all of them outputs, which follow those that the streams were fed.

        Returns logits [len(outputs), n_vocab]: a view that the next step overwrites (a copy when there are more
        outputs than fit the workspace). With `each` they are handed over block by block instead, and none are returned:
        more outputs than fit the workspace must then be all columns. After an exception the store must be `abort`ed.
        """
        began = perf_counter()
        self._ledger = step = PhaseLedger(steps=1)
        self._reroutes = self.rerouting if decoding else None
        io_before, cache_before = self.store.reader.stats(), self.store.cache.counters.copy()
        if (ahead := self.prerouting) is not None:
            ahead.begin(streams, decoding=decoding)
        shape = self._write_inputs(streams, outputs)._replace(ahead=ahead is not None and decoding)
        segments = self._graphs(shape)
        scan = shape.n_tokens > len(streams)
        try:
            self._unweighed = 0
            for kept in (self._parts, self._held, self._speaking, self._guesses):
                kept.clear()
            for stream, position, _ in streams:
                if position == 0 and self.spec.recurrent:
                    self._forget(stream)
            for i, layer in enumerate(self.spec.moe_layers):
                if shape.ahead and shape.n_tokens == 1 and self._foretold(i, segments, shape):
                    continue
                self._segment(segments, shape, i)
                if n := shape.n_wanted(layer, self.spec, self.workspace.n_outputs):
                    self._experts(i, shape, n, scan)
            if shape.n_outputs or self.spec.moe_layers[-1] != self.spec.n_layers - 1:
                self._segment(segments, shape, len(self.spec.moe_layers))
            logits = self._logits(shape, each)
            if ahead is not None:
                named, right = ahead.end()
                step.preroutes += named
                step.preroutes_right += right
        finally:
            self.n_steps += 1
            step.tokens = shape.n_tokens
            step.add_io(io_before, self.store.reader.stats())
            step.cache = self.store.cache.counters - cache_before
            step.wall_s = perf_counter() - began
            ledger.add(step)
            self.recent.append(step)
        return logits

    def _graphs(self, shape: BatchShape) -> dict[int, Graph]:
        """The segments' graphs of a step of that shape."""
        return self.segments.of(shape)

    def _forget(self, stream: int) -> None:
        """Clear what recurrent layers remember of a stream."""
        self.segments.states.clear(stream)

    def _segment(self, segments: dict[int, Graph], shape: BatchShape, i: int) -> None:
        """Run segment `i`, and in its graph what was left to it."""
        self._parts.append(segments[i])
        self._run_parts(shape)
        self._weigh()

    def _run_parts(self, shape: BatchShape) -> None:
        """Run what was left for later; then what heads in it have said is known."""
        self._compute(self.segments.joined(shape, self._parts))
        self._parts.clear()
        self.store.release(self._held)
        self._held.clear()
        for owner, tick in self._speaking:
            self._listen(owner, tick)
        self._speaking.clear()

    def _weigh(self) -> None:
        """Tell the recorder the weights of the layer that it last heard of: the segment after that has just run."""
        if self.recorder is not None and self._unweighed:
            self.recorder.weighed(self.workspace.arrays["weights"][: self._unweighed])
            self._unweighed = 0

    # --- inputs and outputs

    def _write_inputs(self, streams: Sequence[tuple[int, int, Sequence[int]]], outputs: Sequence[int]) -> BatchShape:
        arrays = self.workspace.arrays
        n_ctx, mask = self.segments.cache.n_ctx, arrays["mask"]
        columns, start, mask_at, near_at, window = [], 0, 0, 0, self.spec.window
        for stream, position, tokens in streams:
            n = len(tokens)
            end = position + n
            n_kv = padded(end)
            arrays["tokens"][start : start + n] = tokens
            arrays["positions"][start : start + n] = range(position, end)
            arrays["rows"][start : start + n] = range(stream * n_ctx + position, stream * n_ctx + end)
            own = mask[mask_at : mask_at + n_kv * n].reshape(n, n_kv)
            own[:] = -np.inf
            for row in range(n):
                own[row, : position + row + 1] = 0
            near = 0
            if window:
                near = max(0, position - window + 1) // KV_PADDING * KV_PADDING
                own_near = arrays["near_mask"][near_at : near_at + (n_kv - near) * n].reshape(n, n_kv - near)
                own_near[:] = own[:, near:]
                for row in range(max(0, window - position), n):
                    own_near[row, : position + row + 1 - window - near] = -np.inf
                near_at += own_near.size
            columns.append(Columns(stream, n, n_kv, near))
            start, mask_at = start + n, mask_at + n_kv * n
        arrays["outputs"][: len(outputs)] = outputs[: self.workspace.n_outputs]
        return BatchShape(tuple(columns), len(outputs))

    def _logits(self, shape: BatchShape, each: Each | None) -> np.ndarray:
        logits, room = self.workspace.arrays["logits"], self.workspace.n_outputs
        if shape.n_outputs <= room:
            if each is None:
                return logits[: shape.n_outputs]
            each(0, logits[: shape.n_outputs])
            return logits[:0]
        collected = []
        for start in range(0, shape.n_tokens, room):
            n = min(room, shape.n_tokens - start)
            self._head(start, n)
            if each is None:
                collected.append(logits[:n].copy())
            else:
                each(start, logits[:n])
        return np.concatenate(collected) if each is None else logits[:0]

    def _head(self, start: int, n: int) -> None:
        """Make the logits of residual columns [start, start + n)."""
        context, graph = self.segments.head(start, n)
        with context:
            self._compute(graph)

    # --- experts

    def _experts(self, i: int, shape: BatchShape, n: int, scan: bool) -> None:
        """Compute all pairs of the i-th layer with experts over `n` columns, each once its expert is resident."""
        store, layer, ahead = self.store, self.spec.moe_layers[i], self.prerouting
        routed = self._routed(i, shape, n)
        demand, keys, tick = self._demand(layer, routed)
        plan = waves(keys, store.n_slots, store.cache.resident)
        if self.prefetch:
            self._score_guess(i, routed)
        acquired = self._acquire(plan.groups[0], tick, scan)
        if ahead is not None and shape.ahead and layer in ahead.owners:
            if self.heads is not None:
                self._compute(self.heads.of(layer, n))
            self._listen(layer, tick)
        if self.spec.n_ff_shared:
            # needs no reading: done while experts arrive, or together with what comes next where none is awaited
            shared = self.segments.shared(layer, n)
            if n == shape.n_tokens == 1 and len(plan.groups) == 1 and not acquired.waiting:
                self._parts.append(shared)
            else:
                self._compute(shared)
        self._go_through(i, shape, n, scan, demand, plan, acquired, tick, join=shape.n_tokens == 1)

    def _routed(self, i: int, shape: BatchShape, n: int) -> np.ndarray:
        """The final routes [n, top_k] of the i-th layer with experts, whose router has spoken."""
        arrays, layer = self.workspace.arrays, self.spec.moe_layers[i]
        if (ahead := self.prerouting) is not None and shape.ahead:
            routed = ahead.route(layer, arrays["scores"])
        else:
            routed = arrays["routed"][:n]
            routed[:] = arrays["selected"][:n]
            if self._reroutes is not None:
                self._reroute(self._reroutes, layer, routed)
        if self.recorder is not None:
            self._record(self.recorder, layer, shape, routed)
        return routed

    def _go_through(
        self, i: int, shape: BatchShape, n: int, scan: bool, demand: Demand, plan: Waves, acquired: Acquired, tick: int,
        *, join: bool,
    ) -> None:  # fmt: skip
        """Compute the pairs of a plan's groups, of which the first is `acquired`; with `join` the last may be left to
        the next segment."""
        store = self.store
        for j, group in enumerate(plan.groups):
            following = None
            if plan.overlap and j + 1 < len(plan.groups):
                following = self._acquire(plan.groups[j + 1], tick, scan)
            elif self.prefetch:
                self._prefetch_ahead(i, shape, n, tick)
            last = join and group is plan.groups[-1]
            self._compute_wave(i, demand, group, acquired, n, join=last)
            if last:
                self._held += group
                return
            store.release(group)
            if j + 1 < len(plan.groups):
                acquired = following or self._acquire(plan.groups[j + 1], tick, scan)

    def _demand(self, layer: int, routed: np.ndarray) -> tuple[Demand, list[ExpertKey], int]:
        """What `layer` demands for its final routes, as experts in ascending order, and the tick that it is due at.

        What has arrived by then is taken note of, and what was due earlier given up.
        """
        demand, tick = Demand(routed), self.n_steps * self.spec.n_layers + layer
        self._ledger.token_demands += routed.size
        self.store.arrived(block=False)
        self.store.expire(tick)
        return demand, [ExpertKey(layer, e) for e in demand.experts], tick

    def _reroute(self, rule: Rerouting, layer: int, routed: np.ndarray) -> None:
        """Let experts of `routed` [n_columns, top_k] that have no slot give way to ones that have, in place."""
        step, scores = self._ledger, self.workspace.arrays["scores"][: len(routed)]
        found = reroute_together(
            rule, routed.tolist(), scores.tolist(), lambda expert: self._is_near(ExpertKey(layer, expert)),
            logits=self.spec.gating == "chosen",
        )  # fmt: skip
        if found.substituted:
            routed[:] = found.ids
        step.reroutable += routed.size
        step.rerouted_rows += len(routed)
        step.substituted += found.substituted
        step.reroute_kl += found.divergence

    def _is_near(self, key: ExpertKey) -> bool:
        """No read has to be begun for `key`."""
        return self.store.cache.slot_of(key) is not None

    def _foretold(self, i: int, segments: dict[int, Graph], shape: BatchShape) -> bool:
        """The i-th layer with experts of a single token, if its route is known; False if not, and nothing was done.

        What it takes is left to run with the next segment as long as all its experts are there: consecutive layers then
        run without a return to Python.
        """
        ahead, layer = self.prerouting, self.spec.moe_layers[i]
        assert ahead is not None
        routed = ahead.foretold(layer)
        if routed is None:
            return False
        demand, keys, tick = self._demand(layer, routed)
        try:
            acquired = self.store.acquire(keys, tick)
        except CacheFull:
            if self._parts:
                self._run_parts(shape)
            acquired = self._acquire(keys, tick, False)
        self._parts.append(self.segments.bare(shape, i) if ahead.scored else segments[i])
        if layer in ahead.owners:
            if self.heads is None:
                self._listen(layer, tick)
            else:
                self._parts.append(self.heads.of(layer, 1))
                self._speaking.append((layer, tick))
        if acquired.waiting or len(self._parts) >= self._most_parts or self.recorder is not None:
            self._run_parts(shape)
        if self.recorder is not None:  # it hears of one layer at a time
            self._weigh()
            self._record(self.recorder, layer, shape, routed)
        if self.spec.n_ff_shared:
            self._parts.append(self.segments.shared(layer, 1))
            if acquired.waiting:
                self._run_parts(shape)
        self._compute_wave(i, demand, keys, acquired, 1, join=True)
        self._held += keys
        return True

    def _listen(self, owner: int, tick: int) -> None:
        """Take note of what was said after `owner`'s routing, and start reading it."""
        ahead = self.prerouting
        assert ahead is not None
        layer, ids = ahead.said(owner)
        if self.reads_routes and len(ids):
            due = tick - owner + self.spec.n_layers + layer
            self.store.prefetch([ExpertKey(layer, e) for e in _ranked(ids)], due, binding=ahead.decides)

    def _record(self, recorder: TraceWriter, layer: int, shape: BatchShape, routed: np.ndarray) -> None:
        arrays, n = self.workspace.arrays, len(routed)
        columns = None if n == shape.n_tokens else arrays["outputs"][:n]
        scores = arrays["scores"]
        if shape.ahead and self.prerouting is not None:
            scores = self.prerouting.final_scores(layer, scores)
        recorder.chose(layer, routed, scores[:n] if recorder.keeps_scores else None, columns)
        self._unweighed = n

    def _acquire(self, keys: list[ExpertKey], tick: int, scan: bool) -> Acquired:
        """Pin `keys`. Prefetches that hold the slots that are needed give way, those in flight when they have ended."""
        given_up = False
        while True:
            try:
                return self.store.acquire(keys, tick, scan=scan)
            except CacheFull:
                if given_up and not self.store.cache.reads_in_flight():
                    raise
                given_up = True
                # ends every protection, of routes too that a prompt has made void; cancels what has not begun
                self.store.expire(tick + 2 * self.spec.n_layers)
                self._wait(block=bool(self.store.cache.reads_in_flight()))

    def _score_guess(self, i: int, now: np.ndarray) -> None:
        """Count how many of the experts just routed the last guess had named."""
        guess = self._guesses.pop(i, None)
        if guess is None or len(guess) != len(now):
            return
        if len(now) == 1:
            right = len(set(guess[0].tolist()).intersection(now[0].tolist()))
        else:
            right = int((guess[:, :, None] == now[:, None, :]).any(axis=1).sum())
        self._ledger.predicted += now.size
        self._ledger.predicted_right += right

    def _prefetch_ahead(self, i: int, shape: BatchShape, n: int, tick: int) -> None:
        """Start reading what the layers after the i-th with experts will likely want, what is wanted most first."""
        moe, ws = self.spec.moe_layers, self.workspace
        for d, layer in self._looks_ahead(shape, i):
            guess = ws.arrays["predicted"][d * ws.n_tokens : d * ws.n_tokens + n]
            wanted = shape.n_wanted(layer, self.spec, ws.n_outputs)
            guess = guess[ws.arrays["outputs"][:wanted]] if wanted < n else guess.copy()
            self._guesses[i + 1 + d] = guess
            ranked = _ranked(guess)
            # the further ahead, the less sure: only the better half is worth a read that may be wasted
            ranked = ranked[: max(1, len(ranked) >> d)]
            self.store.prefetch(self._below(layer, [ExpertKey(layer, e) for e in ranked]), tick - moe[i] + layer)

    def _below(self, layer: int, keys: list[ExpertKey]) -> list[ExpertKey]:
        """Those of `keys`, of `layer`, that would have to lie in RAM."""
        return keys

    def _looks_ahead(self, shape: BatchShape, i: int) -> list[tuple[int, int]]:
        return self.segments.looks_ahead(shape, i)

    def _compute_wave(
        self, i: int, demand: Demand, group: list[ExpertKey], acquired: Acquired, n: int, *, join: bool
    ) -> None:
        """Compute a group's pairs as their experts arrive; `join`: the last may be left to the next segment."""
        slots = dict(zip(group, acquired.slots, strict=True))
        pending = {key for key in acquired.waiting if not self.store.cache.resident(key)}
        ready = [key for key in group if key not in pending]
        if not self.overlap:
            while pending:
                pending.difference_update(self._wait())
            ready = group
        while ready or pending:
            if ready:
                self._compute_pairs(i, demand, ready, slots, n, join=join and not pending)
            if not pending:
                return
            arrived = self._wait()
            ready = [key for key in arrived if key in pending]
            pending.difference_update(ready)

    def _wait(self, *, block: bool = True) -> list[ExpertKey]:
        began = perf_counter()
        arrived = self.store.arrived(block=block)
        self._ledger.wait_s += perf_counter() - began
        return arrived

    def _compute_pairs(
        self, i: int, demand: Demand, keys: list[ExpertKey], slots: dict[ExpertKey, int], n: int, *, join: bool
    ) -> None:
        """Compute all pairs of `keys`, which are resident in `slots`; with `join`, along with what comes next."""
        pair_slots, pair_rows = self.workspace.arrays["pair_slots"], self.workspace.arrays["pair_rows"]
        all_slots, pair_experts = self.store.n_slots, self.workspace.arrays.get("pair_experts")
        layer = self.spec.moe_layers[i]
        if n == 1:
            for at, key in enumerate(keys, i * demand.top_k):
                pair_slots[at] = slots[key]
                pair_rows[at] = demand.pairs[key.expert][0]
                if pair_experts is not None:
                    pair_experts[at] = key.expert
            graph = self.pairs.single(layer, len(keys))
            if join:
                self._parts.append(graph)
            else:
                self._compute(graph)
            return
        for group, first, n_slots in pair_groups(demand, keys, slots):
            n_pairs = sum(len(demand.pairs[key.expert]) for key in group)
            if n_pairs <= KEPT_PAIRS and all_slots * n_pairs * ROW_MAP_ENTRY <= ROW_MAP_BYTES:
                self._list_pairs(demand, group, [slots[key] for key in group])
                self._compute(self.pairs.kept(layer, n_pairs))
            else:
                self._list_pairs(demand, group, [slots[key] - first for key in group])
                context, graph = self.pairs.once(layer, n_pairs, first, n_slots)
                with context:
                    self._compute(graph)

    def _list_pairs(self, demand: Demand, keys: Sequence[ExpertKey], slots: Sequence[int]) -> int:
        """Write down all pairs of `keys`, whose experts are in `slots`, for a graph: how many they are."""
        arrays = self.workspace.arrays
        rows = np.concatenate([demand.pairs[key.expert] for key in keys])
        counts, n = [len(demand.pairs[key.expert]) for key in keys], len(rows)
        arrays["pair_rows"][:n] = rows
        arrays["pair_tokens"][:n] = rows // demand.top_k
        arrays["pair_slots"][:n] = np.repeat(slots, counts)
        if "pair_experts" in arrays:
            arrays["pair_experts"][:n] = np.repeat([key.expert for key in keys], counts)
        return n

    def _compute(self, graph: Graph) -> None:
        began = perf_counter()
        self.backend.compute(graph)
        self._ledger.compute_s += perf_counter() - began


def _ranked(ids: np.ndarray) -> list[int]:
    """The experts in `ids` [n, top_k], those that most tokens want first."""
    if len(ids) == 1:
        return ids[0].tolist()
    experts, counts = np.unique(ids, return_counts=True)
    return experts[np.argsort(-counts, kind="stable")].tolist()


def pair_groups(
    demand: Demand, keys: list[ExpertKey], slots: dict[ExpertKey, int]
) -> Iterator[tuple[list[ExpertKey], int, int]]:
    """Cut `keys` into groups that one graph can take, each with the range of slots that it spans: (first, number)."""
    group: list[ExpertKey] = []
    first = n_pairs = 0
    for key in sorted(keys, key=slots.__getitem__):
        more = len(demand.pairs[key.expert])
        span = slots[key] - first + 1
        if group and (n_pairs + more > PAIR_LIMIT or span * (n_pairs + more) * ROW_MAP_ENTRY > ROW_MAP_BYTES):
            yield group, first, slots[group[-1]] - first + 1
            group, n_pairs = [], 0
        if not group:
            first = slots[key]
        group.append(key)
        n_pairs += more
    if group:
        yield group, first, slots[group[-1]] - first + 1
