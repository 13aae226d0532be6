"""Runs one step of a batch through all layers: segments, demands, pairs, and reads under the arithmetic.

It knows columns and streams; what tokens mean, and who gets which logits, is the session's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np

from sluice.engine.ledger import PhaseLedger
from sluice.engine.pairs import KEPT_PAIRS, PAIR_LIMIT, ROW_MAP_BYTES, ROW_MAP_ENTRY, PairGraphs
from sluice.engine.segments import BatchShape, Columns, SegmentGraphs
from sluice.engine.workspace import LOOKAHEAD, Workspace
from sluice.experts.cache import Acquired, CacheFull
from sluice.experts.waves import waves
from sluice.ggml import Backend, Graph
from sluice.models.kv_cache import KV_PADDING, padded
from sluice.models.spec import ModelSpec
from sluice.store import ExpertStore
from sluice.trace import TraceWriter
from sluice.types import ExpertKey

RECENT_STEPS = 4096  # ledgers of single steps that are kept
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
    before it does here.
    `overlap=False` waits for all of a layer's experts before computing any: the naive way, kept for comparison.
    """

    def __init__(
        self, spec: ModelSpec, segments: SegmentGraphs, pairs: PairGraphs, workspace: Workspace, store: ExpertStore,
        backend: Backend, *, prefetch: bool, overlap: bool = True, recorder: TraceWriter | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.segments = segments
        self.pairs = pairs
        self.workspace = workspace
        self.store = store
        self.backend = backend
        self.prefetch = prefetch
        self.overlap = overlap
        self.recorder = recorder
        self.n_steps = 0
        self.recent: deque[PhaseLedger] = deque(maxlen=RECENT_STEPS)
        self._ledger = PhaseLedger()
        self._guesses: dict[int, np.ndarray] = {}  # [n_tokens, top_k] for layers to come
        self._joining: list[ExpertKey] = []  # pairs written down, to be computed with the next segment
        self._held: list[ExpertKey] = []  # pinned until then
        self._joining_shared = False  # the shared experts too
        self._unweighed = 0  # columns that the recorder has yet to hear the weights of

    def run(
        self, streams: Sequence[tuple[int, int, Sequence[int]]], outputs: Sequence[int], ledger: PhaseLedger,
        each: Each | None = None,
    ) -> np.ndarray:  # fmt: skip
        """One step. `streams`: (stream, position of its first token, its tokens), `outputs`: columns to give logits of.

        Returns logits [len(outputs), n_vocab]: a view that the next step overwrites (a copy when there are more
        outputs than fit the workspace). With `each` they are handed over block by block instead, and none are returned:
        more outputs than fit the workspace must then be all columns. After an exception the store must be `abort`ed.
        """
        began = perf_counter()
        self._ledger = step = PhaseLedger(steps=1)
        io_before, cache_before = self.store.reader.stats(), self.store.cache.counters.copy()
        shape = self._write_inputs(streams, outputs)
        segments = self.segments.of(shape)
        scan = shape.n_tokens > len(streams)
        try:
            self._joining, self._joining_shared, self._unweighed = [], False, 0
            self._guesses.clear()
            for stream, position, _ in streams:
                if position == 0 and self.spec.recurrent:
                    self.segments.states.clear(stream)
            for i, layer in enumerate(self.spec.moe_layers):
                self._segment(segments, shape, i)
                if n := shape.n_wanted(layer, self.spec, self.workspace.n_outputs):
                    self._experts(i, shape, n, scan)
            if shape.n_outputs or self.spec.moe_layers[-1] != self.spec.n_layers - 1:
                self._segment(segments, shape, len(segments) - 1)
            logits = self._logits(shape, each)
        finally:
            self.n_steps += 1
            step.tokens = shape.n_tokens
            step.add_io(io_before, self.store.reader.stats())
            step.cache = self.store.cache.counters - cache_before
            step.wall_s = perf_counter() - began
            ledger.add(step)
            self.recent.append(step)
        return logits

    def _segment(self, segments: list[Graph], shape: BatchShape, i: int) -> None:
        """Run segment `i`, and in its graph the pairs of the layer before that were left to it."""
        if not self._joining:
            self._compute(segments[i])
        else:
            n = len(self._joining)
            self._compute(self.segments.joined(shape, i, n, self.pairs, shared=self._joining_shared))
            self.store.release(self._held)
            self._joining = []
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
            context, graph = self.segments.head(start, n)
            with context:
                self._compute(graph)
            if each is None:
                collected.append(logits[:n].copy())
            else:
                each(start, logits[:n])
        return np.concatenate(collected) if each is None else logits[:0]

    # --- experts

    def _experts(self, i: int, shape: BatchShape, n: int, scan: bool) -> None:
        """Compute all pairs of the i-th layer with experts over `n` columns, each once its expert is resident."""
        arrays, store, n_layers, layer = self.workspace.arrays, self.store, self.spec.n_layers, self.spec.moe_layers[i]
        routed = arrays["routed"][:n]
        routed[:] = arrays["selected"][:n]
        demand = Demand(routed)
        if self.recorder is not None:
            self._record(self.recorder, layer, shape, routed)
        tick = self.n_steps * n_layers + layer
        self._ledger.token_demands += n * demand.top_k
        store.arrived(block=False)
        store.expire(tick)
        keys = [ExpertKey(layer, e) for e in demand.experts]
        plan = waves(keys, store.n_slots, store.cache.resident)
        if self.prefetch:
            self._score_guess(i, n)
        acquired = self._acquire(plan.groups[0], tick, scan)
        if self.spec.n_ff_shared:
            # needs no reading: done while experts arrive, or together with what comes next where none is awaited
            self._joining_shared = n == shape.n_tokens == 1 and len(plan.groups) == 1 and not acquired.waiting
            if not self._joining_shared:
                self._compute(self.segments.shared(layer, n))
        for j, group in enumerate(plan.groups):
            ahead = None
            if plan.overlap and j + 1 < len(plan.groups):
                ahead = self._acquire(plan.groups[j + 1], tick, scan)
            elif self.prefetch:
                self._prefetch_ahead(i, shape, n, tick)
            self._compute_wave(layer, demand, group, acquired, n, join=shape.n_tokens == 1 and group is plan.groups[-1])
            if self._joining:
                self._held = group
                return
            store.release(group)
            if j + 1 < len(plan.groups):
                acquired = ahead or self._acquire(plan.groups[j + 1], tick, scan)

    def _record(self, recorder: TraceWriter, layer: int, shape: BatchShape, routed: np.ndarray) -> None:
        arrays, n = self.workspace.arrays, len(routed)
        columns = None if n == shape.n_tokens else arrays["outputs"][:n]
        recorder.chose(layer, routed, arrays["scores"][:n] if recorder.keeps_scores else None, columns)
        self._unweighed = n

    def _acquire(self, keys: list[ExpertKey], tick: int, scan: bool) -> Acquired:
        """Pin `keys`, waiting for prefetches in flight to end when they hold the slots that are needed."""
        while True:
            try:
                return self.store.acquire(keys, tick, scan=scan)
            except CacheFull:
                if not self.store.cache.reads_in_flight():
                    raise
                self.store.expire(tick + 2 * self.spec.n_layers)  # give up every prefetch that has not begun
                self._wait(block=bool(self.store.cache.reads_in_flight()))

    def _score_guess(self, i: int, n: int) -> None:
        """Count how many of the experts just routed the last guess had named."""
        guess = self._guesses.pop(i, None)
        if guess is None or len(guess) != n:
            return
        now = self.workspace.arrays["selected"][:n]
        if n == 1:
            right = len(set(guess[0].tolist()).intersection(now[0].tolist()))
        else:
            right = int((guess[:, :, None] == now[:, None, :]).any(axis=1).sum())
        self._ledger.predicted += now.size
        self._ledger.predicted_right += right

    def _prefetch_ahead(self, i: int, shape: BatchShape, n: int, tick: int) -> None:
        """Start reading what the layers after the i-th with experts will likely want, what is wanted most first."""
        moe, ws = self.spec.moe_layers, self.workspace
        for d, layer in enumerate(moe[i + 1 : i + 1 + LOOKAHEAD]):
            guess = ws.arrays["predicted"][d * ws.n_tokens : d * ws.n_tokens + n]
            wanted = shape.n_wanted(layer, self.spec, ws.n_outputs)
            guess = guess[ws.arrays["outputs"][:wanted]] if wanted < n else guess.copy()
            self._guesses[i + 1 + d] = guess
            if len(guess) == 1:
                ranked = guess[0].tolist()
            else:
                experts, counts = np.unique(guess, return_counts=True)
                ranked = experts[np.argsort(-counts, kind="stable")].tolist()
            # the further ahead, the less sure: only the better half is worth a read that may be wasted
            ranked = ranked[: max(1, len(ranked) >> d)]
            self.store.prefetch([ExpertKey(layer, e) for e in ranked], tick - moe[i] + layer)

    def _compute_wave(
        self, layer: int, demand: Demand, group: list[ExpertKey], acquired: Acquired, n: int, *, join: bool
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
                self._compute_pairs(layer, demand, ready, slots, n, join=join and not pending)
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
        self, layer: int, demand: Demand, keys: list[ExpertKey], slots: dict[ExpertKey, int], n: int, *, join: bool
    ) -> None:
        """Compute all pairs of `keys`, which are resident in `slots`."""
        pair_slots, pair_rows = self.workspace.arrays["pair_slots"], self.workspace.arrays["pair_rows"]
        all_slots, pair_experts = self.store.n_slots, self.workspace.arrays.get("pair_experts")
        if n == 1:
            for at, key in enumerate(keys):
                pair_slots[at] = slots[key]
                pair_rows[at] = demand.pairs[key.expert][0]
                if pair_experts is not None:
                    pair_experts[at] = key.expert
            if join:
                self._joining = keys
            else:
                self._compute(self.pairs.single(layer, len(keys)))
            return
        for group, first, n_slots in _pair_groups(demand, keys, slots):
            rows = np.concatenate([demand.pairs[key.expert] for key in group])
            counts = [len(demand.pairs[key.expert]) for key in group]
            n_pairs = len(rows)
            pair_rows[:n_pairs] = rows
            self.workspace.arrays["pair_tokens"][:n_pairs] = rows // demand.top_k
            if pair_experts is not None:
                pair_experts[:n_pairs] = np.repeat([key.expert for key in group], counts)
            if n_pairs <= KEPT_PAIRS and all_slots * n_pairs * ROW_MAP_ENTRY <= ROW_MAP_BYTES:
                pair_slots[:n_pairs] = np.repeat([slots[key] for key in group], counts)
                self._compute(self.pairs.kept(layer, n_pairs))
            else:
                pair_slots[:n_pairs] = np.repeat([slots[key] - first for key in group], counts)
                context, graph = self.pairs.once(layer, n_pairs, first, n_slots)
                with context:
                    self._compute(graph)

    def _compute(self, graph: Graph) -> None:
        began = perf_counter()
        self.backend.compute(graph)
        self._ledger.compute_s += perf_counter() - began


def _pair_groups(
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
