"""Runs the repeats of one benchmark in this process and times them; knows no other process and prints no result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sluice.cli.opening import announce, check_prompt, feed_ahead
from sluice.cli.options import MAX_SEED
from sluice.cli.run import sampling_mode
from sluice.cli.signals import Stop
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from sluice.engine import Engine
    from sluice.plan.profile import MachineProfile
    from sluice.text.sampling import SamplingParams

RAW_READ_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What to run. `prompt`: ids or text for every stream; None: made-up ids."""

    prompt: list[int] | str | None
    raw: bool
    prompt_tokens: int
    gen: int
    repeats: int
    streams: int
    params: SamplingParams
    stop: tuple[str, ...]
    raw_read: bool
    profile: MachineProfile | None = None  # of this machine and model, to predict from


def measure(engine: Engine, plan: Plan, stop: Stop) -> dict[str, Any]:
    """The JSON object of a benchmark on an open engine.

    Raises SluiceError if repeats differ in their tokens; with rerouting they may, and each repeat has its own.
    """
    from sluice.engine.report import quantile, run_result
    from sluice.memory import peak_rss_bytes

    prompts = [_prompt(engine, plan, stream) for stream in range(plan.streams)]
    for prompt in prompts:
        check_prompt(engine, prompt)
    announce(engine)
    repeats: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    depth = engine.config.io_threads
    for i in range(plan.repeats):
        before = _raw_read(engine, depth) if plan.raw_read else None
        one = _repeat(engine, plan, prompts, stop)
        if plan.raw_read:
            depth = max(1, round(one["ledger"]["decode"]["io_depth_mean"] or depth))
            after = _raw_read(engine, depth)
            one["raw_read"] = {"before_bytes_per_s": before, "after_bytes_per_s": after, "depth": depth}
        _add_bound(one)
        one["predicted"] = _predicted(engine, plan, one["ledger"]["decode"])
        own = {name: one.pop(name) for name in ("tokens", "text", "finish_reason")}
        first = first or own
        if engine.config.reroute:  # what a pool holds has a say in it
            one["tokens"] = own["tokens"]
        elif own["tokens"] != first["tokens"]:
            raise SluiceError(
                f"repeat {i + 1} generated other tokens than the first, which must not be: run it again, and report it"
            )
        repeats.append({"pool": "warm" if i else "cold" if engine.placed is None else "planned", **one})
    figures = sorted(repeats, key=lambda one: one["tok_per_s"] or 0)
    middle = figures[(len(figures) - 1) // 2]
    speeds = [one["tok_per_s"] for one in repeats if one["tok_per_s"] is not None]
    single = plan.streams == 1
    result = run_result(
        text=first["text"][0] if single else first["text"],
        tokens=first["tokens"][0] if single else first["tokens"],
        finish_reason=first["finish_reason"],
        prompt_tokens=sum(map(len, prompts)), generated_tokens=sum(map(len, first["tokens"])),
        load_s=engine.load_s, ttft_s=middle["ttft_s"], intervals_s=(), tok_per_s=quantile(speeds, 0.5),
        peak_rss_bytes=peak_rss_bytes(), budget_bytes=engine.plan.budget, slots=engine.plan.slots,
        seed=plan.params.seed or 0,
        mode=engine.mode | {"ctx": engine.n_ctx} | sampling_mode(plan.params) | {
            "max_tokens": plan.gen, "stop": list(plan.stop), "ignore_eos": True,
            "raw": plan.raw or not isinstance(plan.prompt, str),
        },
        ledger=engine.stats(), placed=engine.placed, device=engine.device,
    )  # fmt: skip
    result["prefill_tok_per_s"] = middle["prefill_tok_per_s"]
    result["itl_ms"] = middle["itl_ms"]
    result["repeats"] = repeats
    result["bound"] = middle["bound"]
    result["predicted"] = middle["predicted"]
    if plan.raw_read:
        result["raw_read"] = middle["raw_read"]
    return result


def _prompt(engine: Engine, plan: Plan, stream: int) -> list[int]:
    if isinstance(plan.prompt, str):
        return engine.encode_prompt(plan.prompt, raw=plan.raw)
    if plan.prompt is not None:
        return plan.prompt
    return [(100 + stream + 16 * i) % engine.tokenizer.n_vocab for i in range(plan.prompt_tokens)]


def _repeat(engine: Engine, plan: Plan, prompts: list[list[int]], stop: Stop) -> dict[str, Any]:
    """One timed run of all streams, in sessions of their own."""
    from contextlib import ExitStack

    from sluice.engine import Generation, generate
    from sluice.engine.report import difference, itl_ms, rate

    ledgers = engine.ledger
    before = {name: replace(phase, cache=phase.cache.copy()) for name, phase in ledgers.items()}
    state = engine.cache_state
    with ExitStack() as stack:
        sessions = [stack.enter_context(engine.session()) for _ in prompts]
        began = perf_counter()
        generations = []
        for stream, (session, prompt) in enumerate(zip(sessions, prompts, strict=True)):
            params = replace(plan.params, seed=((plan.params.seed or 0) + stream) & MAX_SEED)
            rest = feed_ahead(session, prompt, stop)
            generations.append(Generation(session, rest, params, max_tokens=plan.gen, stop=plan.stop, ignore_eos=True))
        marks = [began]  # when each decode step was over, its tokens sampled; the first entry, the prompts
        n_first = 0
        for _ in generate.run(generations):
            step = ledgers["decode"].steps - before["decode"].steps
            marks += [0.0] * (step + 1 - len(marks))
            marks[step] = perf_counter()
            n_first += step == 0
            stop.check()
    decode_s = marks[-1] - marks[0]
    tokens = [generation.tokens for generation in generations]
    phases = {name: difference(phase, before[name]).as_dict() for name, phase in ledgers.items()}
    return {
        "tok_per_s": rate(sum(map(len, tokens)) - n_first, decode_s),
        "prefill_tok_per_s": rate(phases["prefill"]["tokens"], phases["prefill"]["wall_s"]),
        "ttft_s": marks[0] - began,  # until every stream has its first token
        "itl_ms": itl_ms([later - earlier for earlier, later in pairwise(marks)]),
        "decode_s": decode_s if phases["decode"]["steps"] else None,
        "ledger": phases,
        "tokens": tokens,
        "text": [generation.text for generation in generations],
        "finish_reason": generations[0].finish_reason,
        **({} if state is None else {"cache_state": state}),
    }


def _add_bound(one: dict[str, Any]) -> None:
    from sluice.engine.report import bound

    raw = one.get("raw_read")
    raw_rate = mean((raw["before_bytes_per_s"], raw["after_bytes_per_s"])) if raw else None
    one["bound"] = bound(one["ledger"]["decode"], one["decode_s"], raw_rate)


def _predicted(engine: Engine, plan: Plan, decode: dict[str, Any]) -> dict[str, Any] | None:
    """What the profile says that a repeat with these counters takes; None without one, and for several streams."""
    if plan.profile is None or plan.streams > 1:
        return None
    from sluice.plan.bandwidth import predict_counters

    predicted = predict_counters(plan.profile, decode, slots=engine.plan.slots, prefetch=engine.prefetching)
    return None if predicted is None else predicted.as_dict()


def _raw_read(engine: Engine, depth: int) -> float:
    """Bytes a second of plain reading, at the size of the experts' reads."""
    from sluice.io.probe import measure_read

    runs = [run for runs in engine.store.layout.runs.values() for run in runs]
    n_bytes = round(mean(run.n_bytes for run in runs))
    measured = measure_read(engine.files, file=runs[0].file, n_bytes=n_bytes, depth=depth, seconds=RAW_READ_S)
    return measured.bytes_per_s
