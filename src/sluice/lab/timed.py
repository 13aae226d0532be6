"""Replays a trace's decoding on a simulated machine, with the engine's own cache and its way of using it.

So reads that come too late or for nothing appear, and what a predictor would be worth at a given speed of disk and
arithmetic. It knows no files, threads or real time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from sluice.experts.cache import Acquired, CacheFull, ExpertCache
from sluice.experts.counters import CacheCounters
from sluice.experts.policies import Policy
from sluice.experts.predictors import Predictor, Recall
from sluice.experts.waves import waves
from sluice.lab.machine import SimulatedMachine, Speeds
from sluice.lab.replay import Demands, Execution
from sluice.lab.simulate import demand
from sluice.trace import TraceInfo
from sluice.types import ExpertKey


class Lead(NamedTuple):
    """How long before their demand the prefetches that came to use had been issued, in milliseconds."""

    p10: float
    p50: float


@dataclass(frozen=True)
class TimedResult:
    """What one replay came to. Demands, reads and times are those of decoding, prefetches all there were.

    prefetch_issued = used + wasted + unused; used includes late. Of no demands, tokens or used prefetches there is no
    rate: None.
    """

    tokens: int
    steps: int
    demands: int
    hits: int
    late_hits: int
    misses: int
    evictions: int
    hit_rate: float | None
    prefetch_issued: int
    prefetch_used: int
    prefetch_late: int
    prefetch_wasted: int
    prefetch_unused: int  # still in the cache at the end, or on the way there
    recall_at_k: float | None
    bytes_read: int
    compute_s: float
    wait_s: float
    host_s: float
    tok_per_s: float | None
    lead_ms: Lead | None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self) | {"lead_ms": None if self.lead_ms is None else self.lead_ms._asdict()}


def reserve(demands: Demands) -> int:
    """The slots that the engine would keep from prefetches: one layer's demand of as many streams as decode at once."""
    streams = demands.n_sequences[demands.decode]
    return min(int(streams.max(initial=1)) * demands.info.top_k, demands.info.n_expert)


class TimedReplay:
    """One replay: decode steps as the engine runs them, reading ahead what `predictor` says.

    Prompts pass through the cache as lab.simulate has them, in no time. `reserve` is the slots that prefetches leave to
    demands.
    """

    def __init__(
        self, info: TraceInfo, policy: Policy, n_slots: int, predictor: Predictor, speeds: Speeds, *, reserve: int = 0
    ) -> None:
        self.cache = ExpertCache(n_slots, policy, reserve=min(reserve, n_slots))
        self.machine = SimulatedMachine(speeds, dict(zip(info.moe_layers, info.expert_bytes, strict=True)))
        self._info = info
        self._place = {layer: i for i, layer in enumerate(info.moe_layers)}
        self._predictor = predictor
        self._at = (-1, -1)  # step and layer of the newest decode execution
        self._issued: dict[ExpertKey, float] = {}  # when each expert was last prefetched, until it is demanded
        self._guesses: dict[int, list[int]] = {}  # by the tick that they are for
        self._recall = Recall()
        self._leads = array("d")  # seconds
        self._prompts = CacheCounters()  # what prompts did
        self._tokens = self._steps = 0

    def run(self, executions: Iterable[Execution]) -> TimedResult:
        """Replay `executions`, a trace's from its beginning. To be called once."""
        reach = max(self._predictor.ahead, default=0)
        source, window = iter(executions), deque[Execution]()
        while True:
            while len(window) <= reach and (execution := next(source, None)) is not None:
                window.append(execution)
            if not window:
                return self._result()
            execution = window.popleft()
            if execution.phase == "decode":
                self._decode(execution, window)
            else:
                self._prompt(execution)

    # -- one execution of a layer --

    def _prompt(self, execution: Execution) -> None:
        """What is still on its way for decoding has ended before, and each read ends as it begins."""
        cache = self.cache
        self._expire(execution.tick)
        for read in self.machine.settle():
            cache.complete(read)
        for key in execution.keys if self._issued else ():
            self._issued.pop(key, None)
        before = cache.counters.copy()
        plan = waves(execution.keys, cache.n_slots, cache.resident)
        demand(cache, plan, execution.tick, scan=execution.scan)
        self._prompts -= before - cache.counters  # counters subtract, they don't add

    def _decode(self, execution: Execution, coming: Sequence[Execution]) -> None:
        """`coming[d − 1]` lies d executions ahead."""
        self._come_to(execution)
        self._arrived()
        self._expire(execution.tick)
        plan = waves(execution.keys, self.cache.n_slots, self.cache.resident)
        experts = [key.expert for key in execution.keys]
        if (guess := self._guesses.pop(execution.tick, None)) is not None:
            self._recall.observe(guess, experts)
        self._predictor.observe(execution.layer, experts)
        acquired = self._acquire(plan.groups[0], execution.tick)
        for j, group in enumerate(plan.groups):
            more = j + 1 < len(plan.groups)
            ahead = None
            if plan.overlap and more:
                ahead = self._acquire(plan.groups[j + 1], execution.tick)
            else:
                self._prefetch(execution, coming)
            self._compute(group, acquired)
            self.cache.release(group)
            if more:
                acquired = ahead or self._acquire(plan.groups[j + 1], execution.tick)

    def _come_to(self, execution: Execution) -> None:
        """Spend what lies between the last routed experts and these: layers, and a step's own time as it begins.

        Layers after a step's last one with experts are counted at the next step's beginning.
        """
        speeds, (step, layer) = self.machine.speeds, self._at
        self._at = (execution.step, execution.layer)
        layers = execution.layer - layer
        if step != execution.step:
            self._steps += 1
            self._tokens += execution.n_tokens
            layers = execution.layer + self._info.n_layers - self._info.moe_layers[-1]
            self.machine.host(speeds.step_s)
        self.machine.compute(layers * speeds.layer_s)
        self.machine.host(layers * speeds.layer_host_s)

    def _compute(self, group: Sequence[ExpertKey], acquired: Acquired) -> None:
        """Compute what is resident while the rest arrives, then each as it comes."""
        expert_s = self.machine.speeds.expert_s
        pending = {key for key in acquired.waiting if not self.cache.resident(key)}
        self.machine.compute((len(group) - len(pending)) * expert_s)
        while pending:
            before = len(pending)
            pending.difference_update(self._arrived(block=True))
            self.machine.compute((before - len(pending)) * expert_s)

    def _prefetch(self, execution: Execution, coming: Sequence[Execution]) -> None:
        for distance, share in self._predictor.ahead.items():
            if distance > len(coming):
                continue
            target = coming[distance - 1]
            if not self._goes_on(execution, target, distance):
                continue
            guess = self._predictor.predict(target.layer, [key.expert for key in target.keys], distance)
            if not guess:
                continue
            self._guesses[target.tick] = guess
            keys = [ExpertKey(target.layer, expert) for expert in guess[: max(1, int(len(guess) * share))]]
            for read in self.cache.prefetch(keys, target.tick):
                self._issued[read.key] = self.machine.now
                self.machine.submit(read)

    def _goes_on(self, execution: Execution, target: Execution, distance: int) -> bool:
        """Whether `target` is decoding that follows `execution` with nothing between, as far as the predictor sees."""
        layers = self._info.moe_layers
        steps, place = divmod(self._place[execution.layer] + distance, len(layers))
        if steps and not self._predictor.crosses_tokens:
            return False
        return (target.step, target.layer, target.phase) == (execution.step + steps, layers[place], "decode")

    # -- as the engine's store and step have them --

    def _acquire(self, keys: Sequence[ExpertKey], tick: int) -> Acquired:
        """Pin `keys`, waiting for prefetches in flight to end when they hold the slots that are needed."""
        cache = self.cache
        while True:
            present = [key for key in keys if cache.slot_of(key) is not None]
            try:
                acquired = cache.acquire(keys, tick)
                break
            except CacheFull:
                if not cache.reads_in_flight():
                    raise
                self._expire(tick + 2 * self._info.n_layers)
                self._arrived(block=True)
        for key in present:
            if (issued := self._issued.pop(key, None)) is not None:
                self._leads.append(self.machine.now - issued)
        for read in acquired.promote:
            self.machine.promote(read, tick)
        for read in acquired.submit:
            self._issued.pop(read.key, None)  # its prefetch was for nothing
            self.machine.submit(read)
        return acquired

    def _expire(self, tick: int) -> None:
        for read in self.cache.expire(tick):
            if self.machine.cancel(read):
                self.cache.drop(read)

    def _arrived(self, *, block: bool = False) -> list[ExpertKey]:
        ended = self.machine.ended(block=block)
        for read in ended:
            self.cache.complete(read)
        return [read.key for read in ended]

    def _result(self) -> TimedResult:
        machine, total = self.machine, self.cache.counters
        decoding = total - self._prompts
        decode_s = machine.compute_s + machine.wait_s + machine.host_s
        lead = None
        if self._leads:
            lead = Lead(*(float(ms) for ms in np.percentile(np.asarray(self._leads) * 1e3, (10, 50))))
        return TimedResult(
            tokens=self._tokens, steps=self._steps, demands=decoding.demands, hits=decoding.hits,
            late_hits=decoding.late_hits, misses=decoding.misses, evictions=decoding.evictions,
            hit_rate=decoding.hits / decoding.demands if decoding.demands else None,
            prefetch_issued=total.prefetch_issued, prefetch_used=total.prefetch_used,
            prefetch_late=total.prefetch_late, prefetch_wasted=total.prefetch_wasted,
            prefetch_unused=total.prefetch_issued - total.prefetch_used - total.prefetch_wasted,
            recall_at_k=self._recall.recall_at_k, bytes_read=machine.bytes_asked,
            compute_s=machine.compute_s, wait_s=machine.wait_s, host_s=machine.host_s,
            tok_per_s=self._tokens / decode_s if self._tokens and decode_s else None, lead_ms=lead,
        )  # fmt: skip
