"""One arm: Sluice in one configuration, in one process, walking token sequences; a JSON line per measured repeat.

    python benchmarks/arm.py MODEL --ram 4G --gen 48 --repeat 3 --dump walk.json
    python benchmarks/arm.py MODEL --resident --replay walk.json

Theory. A streamed decode step can't be shorter than its arithmetic, nor than its reads at the disk's raw rate:
max(compute, bytes ÷ raw). An arm delivers some of these figures. *Streamed*: step time and bytes. *--raw*: plain
reading of the same size, at the depth that the engine had on average before, in the same process, for 3 s right
before and right after each repeat; a repeat around which the two differ by more than 10 % was disturbed: it is taken
again, and counted (`kept` false). *--resident --replay*: the arithmetic of exactly the same tokens with all their
experts in memory; each walk is fed once untimed, which reads them, then timed.

By default: a prompt, --warm-up steps, then --repeat spans of --gen steps that continue one text, all streams in one
step; --walks does all that anew. --measure prefill times prompts alone, one repeat a walk, after one untimed.
The step's time includes sampling. --cap (a memory cgroup that counts page cache) and --cold need root.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any, TypeVar

import walks
from common import WORKER, emit, log, rerun_as_worker, run_main
from machine import cap_peak_bytes, drop_page_cache, reset_peak_rss
from walks import Walk

from sluice.config import format_size, parse_size
from sluice.engine import Engine, Session
from sluice.engine.ledger import PhaseLedger
from sluice.engine.report import difference, itl_ms, rate
from sluice.errors import InputError
from sluice.io.probe import measure_read
from sluice.memory import free_bytes, peak_rss_bytes
from sluice.text.sampling import Sampler, SamplingParams

EVERY_SLOT = 1 << 24  # the engine takes as many as there are experts
SETTLING_STEPS = 4  # decoded untimed before a span of a resident walk, whose other steps are fed as a prompt
CAPPED_RAW_BYTES = 256 << 20  # what plain reading may write to within a memory cap, beside the engine

T = TypeVar("T")


class Company:
    """The streams of one walk in an engine, one token a step each: sampled, or forced where the walk has them."""

    def __init__(self, engine: Engine, walk: Walk, stack: ExitStack, seed: int) -> None:
        self.engine = engine
        self.walk = walk
        self.sessions: list[Session] = [stack.enter_context(engine.session()) for _ in walk.prompts]
        self.forced = walk.n_steps > 0
        params = SamplingParams(temperature=1.0, top_p=1.0)
        self._samplers = [Sampler(replace(params, seed=seed + stream)) for stream in range(len(self.sessions))]
        self._next = [0] * len(self.sessions)
        if not self.forced:
            walk.tokens = [[] for _ in self.sessions]
        self.at = 0  # steps taken

    def prefill(self) -> None:
        """Feed all prompts, from the start."""
        for session in self.sessions:
            session.rewind(0)
        prompts = list(zip(self.sessions, self.walk.prompts, strict=True))
        for stream, logits in self.engine.prefill_many(prompts):
            self._sample(stream, logits)

    def _sample(self, stream: int, logits: Any) -> None:
        if not self.forced:
            n_vocab = self.engine.tokenizer.n_vocab  # some files pad the head beyond the tokens there are
            self._next[stream] = self._samplers[stream].sample(logits[:n_vocab], self.sessions[stream].tokens)

    def steps(self, n: int) -> list[float]:
        """Decode `n` tokens of each stream: the seconds that each step took, sampling included."""
        marks = [perf_counter()]
        for _ in range(n):
            if self.forced:
                ids = [tokens[self.at] for tokens in self.walk.tokens]
            else:
                ids = list(self._next)
                for tokens, id in zip(self.walk.tokens, ids, strict=True):
                    tokens.append(id)
            logits = self.engine.decode(self.sessions, ids)
            for stream in range(len(ids)):
                self._sample(stream, logits[stream])
            self.at += 1
            marks.append(perf_counter())
        return [later - earlier for earlier, later in pairwise(marks)]

    def skip_to(self, step: int) -> None:
        """Get to `step` of a forced walk with everything resident: feed what lies before, decode the last few."""
        n_fed = step - self.at - SETTLING_STEPS
        if n_fed > 0:
            rest = [tokens[self.at : self.at + n_fed] for tokens in self.walk.tokens]
            for _ in self.engine.prefill_many(list(zip(self.sessions, rest, strict=True))):
                pass
            self.at += n_fed
        self.steps(step - self.at)


class RawReading:
    """Plain reading beside an idle engine, at the size of its reads, into memory as widely spread as its pool."""

    def __init__(self, engine: Engine, seconds: float, capped: bool) -> None:
        self.engine = engine
        self.seconds = seconds
        runs = [run for runs in engine.store.layout.runs.values() for run in runs]
        self.file = runs[0].file
        self.n_bytes = round(mean(run.n_bytes for run in runs))
        self.memory_bytes = min(engine.store.pool_bytes, CAPPED_RAW_BYTES if capped else free_bytes() // 2)

    def measure(self, depth: int) -> float:
        """Bytes a second."""
        measured = measure_read(
            self.engine.files, file=self.file, n_bytes=self.n_bytes, depth=depth, seconds=self.seconds,
            memory_bytes=self.memory_bytes,
        )  # fmt: skip
        return measured.bytes_per_s


class Arm:
    """Measures repeats on one open engine, each with the ledger of what happened in it."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine = engine
        self.args = args
        self.raw = RawReading(engine, args.raw_seconds, args.cap is not None) if args.raw else None
        self.depth = engine.config.io_threads  # of plain reading: the engine's own mean, once there is one
        self.peak_rss: int | None = 0

    def opened(self) -> dict[str, Any]:
        """How the engine was opened."""
        engine = self.engine
        runs = [run.n_bytes for of_layer in engine.store.layout.runs.values() for run in of_layer]
        return {
            "slots": engine.plan.slots,
            "budget_bytes": engine.plan.budget,
            "n_ctx": engine.n_ctx,
            "threads": engine.threads,
            "policy": engine.policy,
            "prefetch": engine.config.prefetch,
            "moe_layers": len(engine.spec.moe_layers),
            "expert_bytes": sum(runs) / len(engine.spec.moe_layers),  # the mean over layers
            "load_s": engine.load_s,
        }

    def ledgers(self) -> dict[str, PhaseLedger]:
        return {name: replace(phase, cache=phase.cache.copy()) for name, phase in self.engine.ledger.items()}

    def since(self, before: dict[str, PhaseLedger]) -> dict[str, dict[str, Any]]:
        """The ledger's increase; also learns the mean depth of reading from it."""
        phases = {name: difference(phase, before[name]).as_dict() for name, phase in self.engine.ledger.items()}
        for name in ("prefill", "decode"):
            if depth := phases[name]["io_depth_mean"]:
                self.depth = max(1, round(depth))
        return phases

    def repeats(self, phase: str, work: Callable[[], T]) -> Iterator[tuple[T, dict[str, Any]]]:
        """Do `work` until plain reading around it agrees, at most 1 + --retakes times: its result and its figures."""
        for attempt in range(1 + self.args.retakes):
            depth = self.depth
            raw_before = self._plain(depth)
            before, began = self.ledgers(), perf_counter()
            result = work()
            seconds = perf_counter() - began
            ledger = self.since(before)
            raw_after = self._plain(depth)
            figures = {"phase": phase, "attempt": attempt, "kept": True, "seconds": seconds, "ledger": ledger}
            differ = 0.0
            if self.raw is not None and raw_before is not None and raw_after is not None:
                raw = mean((raw_before, raw_after))
                differ = abs(raw_after - raw_before) / raw
                figures["raw"] = {
                    "before_bytes_per_s": raw_before, "after_bytes_per_s": raw_after, "bytes_per_s": raw,
                    "differ": differ, "read_bytes": self.raw.n_bytes, "depth": depth,
                }  # fmt: skip
                figures["kept"] = differ <= self.args.tolerance
            yield result, figures | {"peak_rss_bytes": self._peak(), "cap_peak_bytes": self._cap_peak()}
            if figures["kept"]:
                return
            log(f"  plain reading changed by {differ:.0%} around this repeat: taken again")

    def _plain(self, depth: int) -> float | None:
        if self.raw is None:
            return None
        self._peak()
        rate = self.raw.measure(depth)
        if not reset_peak_rss():  # the peak would be plain reading's own
            self.peak_rss = None
        return rate

    def _peak(self) -> int | None:
        if self.peak_rss is not None:
            self.peak_rss = max(self.peak_rss, peak_rss_bytes())
        return self.peak_rss

    def _cap_peak(self) -> int | None:
        return None if self.args.cap is None else cap_peak_bytes()

    # --- what is measured

    def rehearse(self, walk: Walk) -> None:
        """Go along a walk untimed, so that its experts are resident."""
        args = self.args
        with ExitStack() as stack:
            if walk.n_steps:
                whole = [prompt + tokens for prompt, tokens in zip(walk.prompts, walk.tokens, strict=True)]
                Company(self.engine, Walk(whole), stack, args.seed).prefill()
            else:
                company = Company(self.engine, Walk(walk.prompts), stack, args.seed)
                company.prefill()
                if args.measure == "decode":  # the same seed gives the same tokens: those that will be timed
                    company.steps(args.warm_up + args.gen * args.repeat)

    def prefills(self, walk: Walk) -> Iterator[dict[str, Any]]:
        """Time one walk's prompts."""
        with ExitStack() as stack:
            company = Company(self.engine, walk, stack, self.args.seed)
            for _, figures in self.repeats("prefill", company.prefill):
                yield figures | self._speeds(figures["ledger"], [])

    def decodes(self, walk: Walk) -> Iterator[dict[str, Any]]:
        """Prefill and warm up one walk, then time its spans."""
        args = self.args
        with ExitStack() as stack:
            company = Company(self.engine, walk, stack, args.seed)
            before = self.ledgers()
            company.prefill()
            prefill = self.since(before)["prefill"]
            if company.forced:
                for first, end in walk.spans:
                    company.skip_to(first) if args.resident else company.steps(first - company.at)
                    for intervals, figures in self.repeats("decode", lambda n=end - first: company.steps(n)):
                        figures["ledger"]["prefill"] = prefill
                        yield figures | self._speeds(figures["ledger"], intervals) | {"span": [first, end]}
                return
            before = self.ledgers()
            company.steps(args.warm_up)
            self.since(before)
            for _ in range(args.repeat):
                for intervals, figures in self.repeats("decode", lambda: company.steps(args.gen)):
                    span = (company.at - args.gen, company.at)
                    if figures["kept"]:
                        walk.spans.append(span)
                    figures["ledger"]["prefill"] = prefill
                    yield figures | self._speeds(figures["ledger"], intervals) | {"span": list(span)}

    def _speeds(self, ledger: dict[str, dict[str, Any]], intervals: list[float]) -> dict[str, Any]:
        prefill, decode = ledger["prefill"], ledger["decode"]
        return {
            "prefill_tok_per_s": rate(prefill["tokens"], prefill["wall_s"]),
            "decode_tok_per_s": rate(decode["tokens"], sum(intervals)),
            "decode_s": sum(intervals) or None,
            "itl_ms": itl_ms(intervals),
            "intervals_s": intervals,
        }


def _walks(args: argparse.Namespace, n_vocab: int) -> list[Walk]:
    if args.replay is not None:
        return walks.load(args.replay)
    prompts = [walks.prompt_ids(args.prompt, stream, n_vocab) for stream in range(args.streams)]
    return [Walk(prompts) for _ in range(args.walks)]


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What to open the engine with. Streams and context are what the walks need, unless given."""
    streams, ctx = args.streams, args.prompt
    if args.replay is not None:
        given = walks.load(args.replay)
        streams, ctx = max(len(walk.prompts) for walk in given), max(walk.longest for walk in given)
    elif args.measure == "decode":
        ctx += args.warm_up + args.gen * args.repeat * (1 + args.retakes)
    slots = EVERY_SLOT if args.resident else args.expert_slots
    return {
        "ram": args.ram, "expert_slots": slots, "ctx": args.ctx or ctx, "threads": args.threads, "kv": args.kv,
        "policy": args.policy, "prefetch": not (args.no_prefetch or args.resident), "overlap": not args.no_overlap,
        "streams": streams, "io_threads": args.io_threads,
    }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """Open the engine, walk, print a line for each repeat."""
    if args.cold:
        drop_page_cache()
    with Engine.open(args.model, **_options(args)) as engine:
        arm = Arm(engine, args)
        todo = _walks(args, engine.tokenizer.n_vocab)
        log(f"  {engine.plan.slots} slots of {format_size(engine.plan.slot_bytes)}, opened in {engine.load_s:.1f} s")
        if args.measure == "prefill" and not args.resident:
            with ExitStack() as stack:  # untimed: builds graphs, and leaves a pool as it is found later
                Company(engine, todo[-1], stack, args.seed).prefill()
        for i, walk in enumerate(todo):
            if args.resident and (i == 0 or args.replay is not None):
                arm.rehearse(walk)
            for _ in range(args.passes):
                for figures in (arm.prefills if args.measure == "prefill" else arm.decodes)(walk):
                    speed = figures[f"{args.measure}_tok_per_s"]
                    log(f"  {args.measure} {'–' if speed is None else f'{speed:.2f}'} tok/s")
                    emit({"walk": i, "streams": len(walk.prompts), **figures, "arm": arm.opened()})
        if args.dump is not None:
            walks.save(args.dump, todo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument("--ram", help="the whole process's budget, as 4G")
    pool.add_argument("--expert-slots", type=int)
    pool.add_argument("--resident", action="store_true", help="a slot for every expert, no prefetch")
    add("--no-prefetch", action="store_true")
    add("--no-overlap", action="store_true")
    add("--policy", default="auto")
    add("--threads", type=int)
    add("--io-threads", type=int, default=4)
    add("--kv", default="f16")
    add("--ctx", type=int, help="positions of each stream; by default what the walks need")
    add("--streams", type=int, default=1)
    add("--prompt", type=int, default=32, help="tokens")
    add("--warm-up", type=int, default=32, help="steps before the first span")
    add("--gen", type=int, default=32, help="steps of a span")
    add("--repeat", type=int, default=1, help="spans of a walk")
    add("--walks", type=int, default=1)
    add("--passes", type=int, default=1, help="of each walk with --replay")
    add("--seed", type=int, default=7)
    add("--measure", choices=("decode", "prefill"), default="decode")
    add("--cap", help="run inside a memory cgroup of this size, cold")
    add("--cold", action="store_true", help="empty the page cache first")
    add("--raw", action="store_true", help="measure plain reading around each repeat")
    add("--raw-seconds", type=float, default=3.0)
    add("--tolerance", type=float, default=0.1, help="by which plain reading may differ around a repeat")
    add("--retakes", type=int, default=5, help="of a repeat around which it differs more, at most")
    add("--replay", type=Path, help="walk the token sequences of this file instead")
    add("--dump", type=Path, help="write the walks that were taken to this file")
    add(WORKER, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    counts = ("prompt", "gen", "repeat", "walks", "passes", "streams")
    if any(getattr(args, name) < 1 for name in counts) or min(args.warm_up, args.retakes) < 0:
        parser.error(f"{', '.join(counts)} must be at least 1, warm-up and retakes at least 0")
    if args.ram is not None:
        args.ram = parse_size(args.ram)
    if args.resident and args.raw:
        raise InputError("--resident reads nothing that --raw could be compared with: leave one out")
    if args.replay is not None and args.raw and args.measure == "decode":
        raise InputError("a replayed span can't be taken again: leave out --raw, or give --measure prefill")
    if args.passes > 1 and args.replay is None:
        raise InputError("--passes needs --replay: give --walks")
    if not args.raw:
        args.retakes = 0
    if args.cap is not None and not args.worker:
        rerun_as_worker(args.cap)
    else:
        measure(args)


if __name__ == "__main__":
    run_main(main)
