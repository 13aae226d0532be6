"""Replays a trace with router scores through caches that routes give way to; knows no engine, no machine and no time.

Each decode row's recorded experts are what its router chose; with the row's scores and the slots of the simulated cache
they become the final ids as in a live step (`sluice.experts.rerouting`), and these are demanded. Prompts keep their
routes. What a live run would route on after its first replacement differs, as its hidden states do; a replay takes
every token's scores as they were recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.experts.cache import ExpertCache
from sluice.experts.policies import Policy
from sluice.experts.rerouting import Rerouting, reroute_together
from sluice.experts.waves import waves
from sluice.lab.replay import Demands, Execution
from sluice.lab.simulate import Progress, demand, policy_for
from sluice.trace import REROUTED, TraceReader
from sluice.types import ExpertKey

Array = np.ndarray[Any, Any]
_STRIDE = 1 << 9  # executions from one report of progress to the next


@dataclass(frozen=True)
class ReroutedResult:
    """What a cache came to with a margin. Rates of nothing are None.

    `native_agreement`: share of the decode steps' chosen experts that were not replaced, `reroute_kl`: mean over their
    rows of the divergence of routing weights, in nats; both count decode steps, whatever the phase.
    """

    policy: str
    capacity_slots: int
    capacity_share: float  # of all experts
    margin: float
    keep: int
    demands: int
    hits: int
    misses: int
    evictions: int
    hit_rate: float | None
    reads_per_token: float | None
    substituted: int
    native_agreement: float | None
    reroute_kl: float | None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


class _Replay:
    """One cache, one rule, and what they have come to so far."""

    def __init__(self, name: str, policy: Policy, n_slots: int, rule: Rerouting, *, logits: bool) -> None:
        self.name = name
        self.n_slots = n_slots
        self.rule = rule
        self.cache = ExpertCache(n_slots, policy)
        self.hits = self.misses = self.evictions = 0
        self.substituted = self.rows = self.token_demands = 0
        self.divergence = 0.0
        self._logits = logits

    def run(
        self, execution: Execution, chosen: list[list[int]], scores: list[list[float]], keys: list[ExpertKey], *,
        counted: bool,
    ) -> None:  # fmt: skip
        """One execution; `keys` are those of all experts of its layer, `chosen` and `scores` those of a decode step."""
        cache, wanted = self.cache, execution.keys
        if chosen:
            slot_of = cache.slot_of
            found = reroute_together(
                self.rule, chosen, scores, lambda expert: slot_of(keys[expert]) is not None, logits=self._logits
            )
            self.rows += len(chosen)
            self.token_demands += execution.token_demands
            if found.substituted:
                self.substituted += found.substituted
                self.divergence += found.divergence
                wanted = [keys[expert] for expert in sorted(set().union(*found.ids))]
        counters = cache.counters
        hits, misses, evictions = counters.hits, counters.misses, counters.evictions
        demand(cache, waves(wanted, self.n_slots, cache.resident), execution.tick, scan=execution.scan)
        if counted:
            self.hits += counters.hits - hits
            self.misses += counters.misses - misses
            self.evictions += counters.evictions - evictions

    def result(self, demands: Demands, phase: str) -> ReroutedResult:
        n, tokens = self.hits + self.misses, demands.tokens(phase)
        return ReroutedResult(
            policy=self.name,
            capacity_slots=self.n_slots,
            capacity_share=self.n_slots / demands.n_experts,
            margin=self.rule.margin,
            keep=self.rule.keep,
            demands=n,
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
            hit_rate=self.hits / n if n else None,
            reads_per_token=self.misses / tokens if tokens else None,
            substituted=self.substituted,
            native_agreement=1 - self.substituted / self.token_demands if self.rows else None,
            reroute_kl=self.divergence / self.rows if self.rows else None,
        )


def simulate_rerouting(
    reader: TraceReader, demands: Demands, policies: Sequence[str], slots: Sequence[int], rules: Sequence[Rerouting], *,
    phase: str = "all", pinned: Collection[ExpertKey] | None = None, progress: Progress | None = None,
) -> list[ReroutedResult]:  # fmt: skip
    """One result for each number of slots, policy and rule, in that order, from one pass over the trace in `reader`.

    `demands` are those of the same trace. Raises InputError for `belady`, which would have to know what its own choices
    make of the future, for a trace without scores, and for one of a run that was rerouted itself.
    """
    if "belady" in policies:
        raise InputError("belady can't be rerouted: what it looks ahead to would depend on what it does, leave it out")
    if REROUTED in reader.info.source:
        raise InputError(f"{reader.path}: of a rerouted run, which lacks the routers' own choice: record another")
    logits = _are_logits(reader)
    replays = [
        _Replay(name, policy_for(demands, name, n_slots, pinned), n_slots, rule, logits=logits)
        for n_slots in slots for name in policies for rule in rules
    ]  # fmt: skip
    info, rows = demands.info, _rows(reader)
    keys = {layer: [ExpertKey(layer, expert) for expert in range(info.n_expert)] for layer in info.moe_layers}
    for i, execution in enumerate(demands):
        if progress is not None and i % _STRIDE == 0:
            progress(i, len(demands))
        own = list(islice(rows, execution.n_rows))
        decode = execution.phase == "decode"
        chosen = [experts.tolist() for experts, _ in own] if decode else []
        scores = [row.tolist() for _, row in own] if decode else []
        for replay in replays:
            replay.run(execution, chosen, scores, keys[execution.layer], counted=phase in ("all", execution.phase))
    return [replay.result(demands, phase) for replay in replays]


def _rows(reader: TraceReader) -> Iterator[tuple[Array, Array]]:
    """Experts and scores of each row of the trace."""
    for batch in reader.batches(scores=True):
        scores = _scores(reader, batch.scores)
        for i, (begin, end) in enumerate(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)):
            yield batch.experts[begin:end], scores[i]


def _are_logits(reader: TraceReader) -> bool:
    """Whether the scores are router logits, as of families that normalise over the chosen, not shares of 0 to 1.

    A trace doesn't say; numbers beyond 0 and 1 in its first row group do.
    """
    scores = _scores(reader, next(reader.batches(scores=True)).scores)
    return bool((scores < 0).any() or (scores > 1).any())


def _scores(reader: TraceReader, scores: Array | None) -> Array:
    if scores is None:
        raise InputError(f"{reader.path}: the trace has no scores of all experts: record it with --trace-scores")
    return scores
