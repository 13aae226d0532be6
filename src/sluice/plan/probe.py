"""Measures what a machine does with a model, through an engine that is open; predicts nothing, opens nothing.

What is timed is the engine's own: its graphs on this model's weights, its reader, its Python. A token that is decoded
over and over at one position has the same routes each time, so all its experts stay resident; reads of experts that
it doesn't use, begun before a step, show what arithmetic and reading cost each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mean, median
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.io.probe import measure_read
from sluice.plan.profile import PromptCost, StepCost
from sluice.types import ExpertKey

if TYPE_CHECKING:
    from sluice.engine import Engine, Session
    from sluice.engine.ledger import PhaseLedger
    from sluice.store import Run

RAM_BYTES, RAM_S = 512 << 20, 0.3
RAW_S = 1.5
RAW_MEMORY_BYTES = 1 << 30  # that plain reading writes to: as spread as a pool (see io/probe.py)
PROMPTS = (32, 128, 512)  # tokens: a short prompt, then a chunk, or less where the short one took longer than this
QUICK_PROMPT_S = 1.0
WARM_UP_STEPS, STEPS, NATURAL_STEPS = 3, 10, 16
LOAD_ROUNDS, LOAD_LEVELS = 8, 5  # bursts of each number of cold experts, and how many such numbers there are
PAIR_ROUNDS = 5
USED_BURSTS = 64
FOREVER = 1 << 60  # a deadline, or a tick, after all others
LEAST_SPEED = 0.25  # shares of speed are at least this: less was not measured but disturbed

Check = Callable[[], object]  # called between steps; may raise to end the probe


class Loads(NamedTuple):
    """The fit of an expert load: seconds = a + b × share of cold experts, `error_s` apart (root mean square)."""

    a_s: float
    b_s: float
    error_s: float


class Fresh(NamedTuple):
    """What reading an expert into memory never touched costs more: the thread that begins reads, and the load."""

    host_s: float
    load_s: float


class Beside(NamedTuple):
    """Shares of their speed that arithmetic and reading keep beside each other."""

    compute: float
    read: float


class Natural(NamedTuple):
    """A stretch of the model's own text: seconds a token outside of its step, and the predictor's recall.

    `host_s` is Python, and `reads` the experts read, a step.
    """

    sampling_s: float
    recall: float | None
    host_s: float
    reads: float


def probe_slots(floor_slots: int, all_slots: int, room: int) -> int:
    """Slots to probe with: one token's demand, and as much again for what it doesn't use, within `room` slots.

    Never all of them, where experts that are absent are needed to measure reading.
    """
    return max(1, min(2 * floor_slots, room, max(all_slots - 1, floor_slots)))


def ram_rate(threads: int, seconds: float = RAM_S, n_bytes: int = RAM_BYTES) -> float:
    """Bytes a second that `threads` threads read from memory, out of more than processors' caches hold."""
    done = [0] * threads
    share = n_bytes // threads // 4096 * 4096
    with AlignedBuffer(share * threads) as buffer:
        numbers = np.frombuffer(buffer.view, np.int32)
        numbers[:] = 1
        began = perf_counter()

        def work(i: int, part: np.ndarray) -> None:
            while perf_counter() - began < seconds:
                part.max()  # numpy lets other threads run meanwhile
                done[i] += part.nbytes

        parts = np.array_split(numbers, threads)
        crew = [threading.Thread(target=work, args=each) for each in enumerate(parts)]
        for each in crew:
            each.start()
        for each in crew:
            each.join()
        took = perf_counter() - began
        del numbers, parts
    return sum(done) / took


def raw_rate(files: ModelFiles, runs: Sequence[Run], depth: int, *, memory_bytes: int = RAW_MEMORY_BYTES) -> float:
    """Bytes a second of plain reading at the mean size of `runs`, anywhere in their file, past the page cache."""
    measured = measure_read(
        files, file=runs[0].file, n_bytes=round(mean(run.n_bytes for run in runs)), depth=depth, seconds=RAW_S,
        memory_bytes=memory_bytes, seed=perf_counter_ns(),
    )  # fmt: skip
    return measured.bytes_per_s


def expert_bytes(engine: Engine) -> float:
    """Bytes of an expert, the mean over layers."""
    layout = engine.store.layout
    return sum(run.n_bytes for runs in layout.runs.values() for run in runs) / len(layout.runs)


class Probe:
    """Measures one open engine. `check` is called between steps, to end early."""

    def __init__(self, engine: Engine, check: Check = lambda: None, seed: int = 0) -> None:
        self.engine = engine
        self.check = check
        self.rng = np.random.default_rng(seed)
        self._keys = [ExpertKey(layer, e) for layer in engine.spec.moe_layers for e in range(engine.spec.n_expert)]

    # --- prompts

    def prompts(self) -> list[PromptCost]:
        """Prompt steps of random tokens, which meet most experts, of two of the widths of PROMPTS.

        The pool is full first: memory that is touched for the first time isn't the prompt's cost.
        """
        self.fill()
        short = self._prompt(PROMPTS[0])
        quick = short.compute_s + short.host_s < QUICK_PROMPT_S
        longer = self._prompt(PROMPTS[2] if quick else PROMPTS[1])
        return [short, longer] if longer.tokens > short.tokens else [short]

    def _prompt(self, width: int) -> PromptCost:
        width = min(width, self.engine.n_ctx)
        spent = self.feed(self.tokens(width))
        return PromptCost(width, spent.compute_s, spent.host_s, max(1, spent.demands))

    def feed(self, tokens: Sequence[int]) -> Spent:
        """Feed `tokens` to a new session: what that cost."""
        self.check()
        with self.engine.session() as session:
            before = _copy(self.engine.ledger["prefill"])
            session.feed(tokens)
            return _since(self.engine.ledger["prefill"], before)

    def fresh(self) -> Fresh:
        """Fill the pool, then read into slots that were used: what the first touch of their memory costs an expert.

        A virtual machine's kernel may have pages that its host has given it already, which cost a tenth of others. It
        hands out those first, and a long run soon has had them all: so this is of the last quarter of the slots. Of
        that the mean, not the median: a run's whole time is the sum of both kinds. 0 for a pool that was full, and for
        one that holds all experts.
        """
        bursts = self.fill()
        new = bursts[len(bursts) * 3 // 4 :]
        if not new or not self._absent(1):
            return Fresh(0.0, 0.0)
        used = [self._burst(self._few) for _ in range(min(len(new), USED_BURSTS))]
        return _fresh(new, used)

    @property
    def _few(self) -> int:
        """Experts that are absent at once in a layer of a decode step, about."""
        return max(1, self.engine.spec.top_k // 4)

    def fill(self) -> list[_Burst]:
        """Read experts, few at a time, until every slot has held one."""
        bursts: list[_Burst] = []
        while (free := self.engine.store.cache.n_free) and self._absent(1):
            self.check()
            bursts.append(self._burst(min(free, self._few)))
        return bursts

    def tokens(self, n: int) -> list[int]:
        """Random ones."""
        return self.rng.integers(0, self.engine.tokenizer.n_vocab, n).tolist()

    # --- text

    def natural(self) -> Natural:
        """Let the model write. The first steps, which build graphs and fill the pool, are not counted."""
        engine, ledger = self.engine, self.engine.ledger["decode"]
        tokens = engine.generate(
            self.tokens(min(PROMPTS[0], engine.n_ctx // 2)), NATURAL_STEPS + WARM_UP_STEPS, temperature=1.0, top_p=1.0,
            seed=0, ignore_eos=True,
        )  # fmt: skip
        for _ in islice(tokens, WARM_UP_STEPS):
            self.check()
        began, before = perf_counter(), _copy(ledger)
        for _ in tokens:
            self.check()
        took, spent = perf_counter() - began, _since(ledger, before)
        steps = max(1, spent.steps)
        recall = spent.predicted_right / spent.predicted if spent.predicted else None
        return Natural(max(0.0, took - spent.wall_s) / steps, recall, spent.host_s / steps, spent.experts_read / steps)

    # --- one token, over and over

    def steps(self, session: Session, token: int, n: int) -> Iterator[Spent]:
        """Decode `token` at one position again and again: what each step cost."""
        ledger, at = self.engine.ledger["decode"], len(session.tokens)
        for _ in range(n):
            self.check()
            before = _copy(ledger)
            self.engine.decode([session], [token])
            yield _since(ledger, before)
            session.rewind(at)

    def resident_steps(self, session: Session, token: int, n: int = STEPS) -> list[Spent]:
        """Steps that read nothing; where the pool can't hold a token's experts, steps that read."""
        list(self.steps(session, token, WARM_UP_STEPS))
        found = list(self.steps(session, token, n))
        return [one for one in found if one.waited_for == 0] or found

    def step_cost(self) -> StepCost:
        """A step whose experts are resident."""
        with self._start() as session:
            token = self.tokens(1)[0]
            found = self.resident_steps(session, token)
            experts_s = self._experts_s()
        compute_s = median(one.compute_s for one in found)
        experts_s = min(experts_s, compute_s)
        return StepCost(compute_s - experts_s, experts_s, median(one.host_s for one in found))

    def _start(self) -> Session:
        session = self.engine.session()
        session.feed(self.tokens(min(PROMPTS[0], self.engine.n_ctx // 2)))
        return session

    def _experts_s(self) -> float:
        """Arithmetic of a token's routed experts in all layers: the engine's pair graphs over what is resident."""
        engine = self.engine
        stepper, cache, k = engine._stepper, engine.store.cache, engine.spec.top_k
        arrays = stepper.workspace.arrays
        by_layer: dict[int, list[int]] = {layer: [] for layer in engine.spec.moe_layers}
        for key in cache.keys_resident():
            slot = cache.slot_of(key)
            assert slot is not None
            by_layer[key.layer].append(slot)
        spare = [slot for slots in by_layer.values() for slot in slots]
        times = []
        for _ in range(PAIR_ROUNDS):
            self.check()
            total = 0.0
            for i, (layer, slots) in enumerate(by_layer.items()):
                graph, own = stepper.pairs.single(layer, k), slice(i * k, (i + 1) * k)
                arrays["pair_slots"][own] = ((slots[-k:] or spare[-k:]) * k)[:k]
                arrays["pair_rows"][own] = range(k)
                if "pair_experts" in arrays:
                    arrays["pair_experts"][own] = range(k)
                began = perf_counter()
                stepper.backend.compute(graph)
                total += perf_counter() - began
            times.append(total)
        return min(times)

    # --- reading

    def loads(self) -> Loads:
        """Load top_k experts at a time, some of them cold: nothing else is done meanwhile."""
        k = self.engine.spec.top_k
        levels = sorted({round(share * k) for share in np.linspace(0, 1, LOAD_LEVELS)})
        shares, seconds = [], []
        self._load(k)
        for _ in range(LOAD_ROUNDS):
            self.check()
            for cold in self.rng.permutation(levels).tolist():
                took, was_cold = self._load(cold)
                shares.append(was_cold / k)
                seconds.append(took / k)
        by_share = {share: median(s for x, s in zip(shares, seconds, strict=True) if x == share) for share in shares}
        x, y = np.array(list(by_share)), np.array(list(by_share.values()))
        if len(x) < 2:
            return Loads(0.0, float(y.mean()), 0.0)
        b, a = np.polyfit(x, y, 1)
        b = max(float(b), 1e-9)
        return Loads(max(0.0, float(a)), b, float(np.sqrt(np.mean((a + b * x - y) ** 2))))

    def _load(self, cold: int) -> tuple[float, int]:
        """Acquire top_k experts, `cold` of them absent as far as there are any: seconds, and how many were."""
        store, k = self.engine.store, self.engine.spec.top_k
        resident = list(store.cache.keys_resident())
        absent = self._absent(cold)
        hot = [resident[i] for i in self.rng.permutation(len(resident))[: k - len(absent)].tolist()]
        burst = self._acquire([*absent, *hot])
        return burst.wall_s, burst.reads

    def _burst(self, n: int) -> _Burst:
        """Read up to `n` absent experts, and nothing else."""
        return self._acquire(self._absent(n))

    def _acquire(self, keys: list[ExpertKey]) -> _Burst:
        store, keys = self.engine.store, sorted(keys)
        began = perf_counter()
        acquired = store.acquire(keys, 0)
        begun = perf_counter()
        waiting = set(acquired.waiting)
        while waiting:
            waiting.difference_update(store.arrived(block=True))
        store.release(keys)
        return _Burst(acquired.misses, begun - began, perf_counter() - began)

    def _absent(self, n: int) -> list[ExpertKey]:
        """Up to `n` experts that own no slot, at random."""
        found: list[ExpertKey] = []
        for i in self.rng.permutation(len(self._keys)).tolist():
            if len(found) == n:
                break
            if self.engine.store.cache.slot_of(self._keys[i]) is None:
                found.append(self._keys[i])
        return found

    def contention(self, loads: Loads) -> tuple[Beside, float]:
        """Steps alone and beside reads, in turns: what each keeps of its speed, and Python's seconds an expert read."""
        engine = self.engine
        spare = engine.plan.slots - engine.plan.floor_slots - engine.store.cache.reserve
        alone: list[Spent] = []
        beside: list[Spent] = []
        python: list[float] = []
        with self._start() as session:
            token = self.tokens(1)[0]
            alone += self.resident_steps(session, token, 2)
            n = min(spare, int(median(one.wall_s for one in alone) / loads.b_s) + 1)
            if n < 1 or any(one.waited_for for one in alone):
                return Beside(1.0, 1.0), self._python_of_reads(1)
            for _ in range(STEPS):
                python.append(self._read_ahead(n))
                beside += self.steps(session, token, 1)
                python[-1] += self._settle() / n
                alone += self.steps(session, token, 1)
        return _shares(alone, beside, expert_bytes(engine) / loads.b_s), median(python)

    def _python_of_reads(self, n: int) -> float:
        return self._read_ahead(n) + self._settle() / n

    def _read_ahead(self, n: int) -> float:
        """Begin reading `n` experts that nobody needs: seconds each took to ask for."""
        absent = self._absent(n)
        began = perf_counter()
        self.engine.store.prefetch(absent, FOREVER)
        return (perf_counter() - began) / n

    def _settle(self) -> float:
        """Wait for all reads, and let their experts be evicted: seconds that taking note of what came took."""
        store, python = self.engine.store, 0.0
        store.expire(FOREVER + 1)
        while store.cache.reads_in_flight():
            ended = store.reader.completions(True)
            began = perf_counter()
            for read, error in ended:
                if error is not None:
                    raise error
                store.cache.complete(read)
            python += perf_counter() - began
        return python


class _Burst(NamedTuple):
    """Experts read at once: seconds until all were asked for, and until all were there."""

    reads: int
    begin_s: float
    wall_s: float


@dataclass(frozen=True)
class Spent:
    """A copy of a phase's ledger, or what was added between two."""

    steps: int
    wall_s: float
    compute_s: float
    wait_s: float
    io_busy_s: float
    bytes_read: int
    waited_for: int  # experts that were not resident at their demand
    demands: int
    experts_read: int
    predicted: int
    predicted_right: int
    device_hits: int
    uploads: int
    copies: int  # up for good, or down

    @property
    def host_s(self) -> float:
        return max(0.0, self.wall_s - self.compute_s - self.wait_s)


def _copy(ledger: PhaseLedger) -> Spent:
    return Spent(
        ledger.steps, ledger.wall_s, ledger.compute_s, ledger.wait_s, ledger.io_busy_s, ledger.bytes_read,
        ledger.cache.misses + ledger.cache.late_hits, ledger.cache.demands, ledger.reads, ledger.predicted,
        ledger.predicted_right, ledger.device_hits, ledger.uploads, ledger.promotions + ledger.demotions,
    )  # fmt: skip


def _since(ledger: PhaseLedger, before: Spent) -> Spent:
    now = _copy(ledger)
    return Spent(*(getattr(now, name) - getattr(before, name) for name in Spent.__dataclass_fields__))


def _fresh(new: Sequence[_Burst], used: Sequence[_Burst]) -> Fresh:
    """By means over bursts of reads into slots never used, and into used ones."""

    def costs(bursts: Sequence[_Burst]) -> tuple[float, float]:
        """Seconds that an expert takes to ask for, and to load.

        Loads go one after the other, the first once it was asked for. So n of them take n asks + a load, or an ask + n
        loads, whichever is more: from the time they took, a load is the lesser of what each of the two makes it.
        """
        n = mean(one.reads for one in bursts)
        wall_s, ask_s = mean(one.wall_s for one in bursts), mean(one.begin_s for one in bursts) / n
        return ask_s, min(wall_s - n * ask_s, (wall_s - ask_s) / n)

    (new_host_s, new_load_s), (host_s, load_s) = costs(new), costs(used)
    return Fresh(max(0.0, new_host_s - host_s), max(0.0, new_load_s - load_s))


def _shares(alone: Sequence[Spent], beside: Sequence[Spent], alone_rate: float) -> Beside:
    """From steps alone and beside reads. `alone_rate`: bytes a second of reading alone.

    Of a step's arithmetic, the part under which reading went on did `compute` × its time of the work.
    """
    compute_s = median(one.compute_s for one in alone)
    slow_s = median(one.compute_s for one in beside)
    under_s = median(one.compute_s * min(1.0, one.io_busy_s / one.wall_s) for one in beside)
    rates = [one.bytes_read / one.io_busy_s for one in beside if one.io_busy_s and one.bytes_read]
    compute = (compute_s - slow_s + under_s) / under_s if under_s else 1.0
    read = median(rates) / alone_rate if rates else 1.0
    return Beside(min(1.0, max(LEAST_SPEED, compute)), min(1.0, max(LEAST_SPEED, read)))
