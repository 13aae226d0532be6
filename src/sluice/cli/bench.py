"""`sluice bench`: how fast a model runs here, and what bounds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.bench_compare import ARMS, REROUTE, compare, quality
from sluice.cli.bench_repeats import Plan, measure
from sluice.cli.eval_texts import read_text
from sluice.cli.inspect import UNLIMITED
from sluice.cli.machine import cpu_name
from sluice.cli.opening import load_ggml, open_engine, resolve_model, settled
from sluice.cli.options import (
    EngineOptions,
    Json,
    Model,
    PromptOptions,
    SamplingOptions,
    arguments,
    check_count,
    grouped,
)
from sluice.cli.run import sampling_params
from sluice.cli.saving import Force, SaveResidents, check_residents, save_residents
from sluice.cli.signals import deferred
from sluice.cli.terminal import emit, note, print_table
from sluice.cli.tracing import Trace, TraceScores, tell_trace, trace_config
from sluice.config import EngineConfig, format_size, parse_reroute, parse_size, usable_cores
from sluice.errors import InputError
from sluice.nano import NAME

if TYPE_CHECKING:
    from sluice.plan.profile import MachineProfile

MAX_STREAMS, MAX_COUNT = 1024, 1 << 24
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Length of the made-up prompts.")]
Gen = Annotated[int, typer.Option("--gen", "-n", metavar="N", help="Tokens to generate in each stream.")]
Repeat = Annotated[int, typer.Option("--repeat", metavar="R", help="Repeats; the result is their median.")]
Streams = Annotated[
    int, typer.Option("--streams", metavar="N", help="Sequences that decode together, one step a token.")
]
ReadRate = Annotated[
    str | None, typer.Option("--read-rate", metavar="SIZE", help="Emulate a disk of that many bytes a second.")
]
Routes = Annotated[
    Path | None,
    typer.Option("--routes", metavar="FILE", help="With --routing prerouted: the routes of a trace of the same run, "
                 "as if they had been predicted.", show_default=False),
]  # fmt: skip
NoOverlap = Annotated[
    bool,
    typer.Option(
        "--no-overlap", metavar="", help="Wait for all experts of a layer before computing any: the naive way."
    ),
]
RawRead = Annotated[
    bool,
    typer.Option(
        "--raw-read", metavar="", help="Measure raw reading, 1 s before and after each repeat, and bound by that."
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="A machine profile of `sluice plan`: predict beside measuring.",
                 show_default=False),
]  # fmt: skip
Compare = Annotated[
    str | None,
    typer.Option(
        "--compare", metavar="MODES", help=f"Compare some of {', '.join(ARMS)}, {REROUTE}MARGIN[:J], as a,b,c."
    ),
]
QualityText = Annotated[
    Path | None,
    typer.Option("--quality-text", metavar="FILE", help="With --compare: the perplexity of a text, and the KL of lossy "
                 "modes.", show_default=False),
]  # fmt: skip


@grouped
def bench(
    *,
    model: Model = "demo",
    prompt: PromptOptions,
    prompt_tokens: PromptTokens = 32,
    gen: Gen = 32,
    repeat: Repeat = 3,
    streams: Streams = 1,
    read_rate: ReadRate = None,
    no_overlap: NoOverlap = False,
    routes: Routes = None,
    raw_read: RawRead = False,
    compare_modes: Compare = None,
    quality_text: QualityText = None,
    profile: Profile = None,
    residents: SaveResidents = None,
    trace: Trace = None,
    trace_scores: TraceScores = False,
    force: Force = False,
    engine: EngineOptions,
    sampling: SamplingOptions,
    json: Json = False,
) -> int:
    """Measure decoding: the median over repeats of all streams' tokens a second, prompts not counted.

    Without a prompt, stream s gets the ids 100 + s + 16 i (modulo the vocabulary) and seed + s. The end of text is
    ignored; temperature 1 and nothing cut off unless given; --ctx is what prompt and tokens need. Every repeat starts
    anew but for the expert pool: cold (empty) in the first, warm after. --compare runs each mode in a process of its
    own, each repeat all modes in turn, each with a cold pool: naive (on demand, no overlap), demand (overlap, no
    prefetch), exact (both), hints (exact, read as --prerouter says), prerouted, oracle (prerouted by the true routes,
    which a run that isn't timed records), and reroute:MARGIN (--reroute, any number of margins). --quality-text then
    scores a text in the exact and all lossy modes, as `sluice eval` does. --raw-read reads at an expert part's size
    and the engine's mean depth so far.
    """
    for name, value in (
        ("--prompt-tokens", prompt_tokens),
        ("--gen", gen),
        ("--repeat", repeat),
        ("--streams", streams),
    ):
        if check_count(name, value) > (MAX_STREAMS if name == "--streams" else MAX_COUNT):
            raise InputError(
                f"{name} {value} is too large: give at most {MAX_STREAMS if name == '--streams' else MAX_COUNT}"
            )
    if residents is not None and compare_modes is not None:
        raise InputError("--compare runs processes that each end: leave out --save-residents")
    if trace is not None and compare_modes is not None:
        raise InputError("--compare runs many processes, and a trace is of one: leave out --trace")
    if quality_text is not None:
        if compare_modes is None:
            raise InputError("--quality-text is scored in the modes of --compare: name some, or use sluice eval")
        read_text(str(quality_text))
    check_residents(residents, force=force)
    rate = None if read_rate is None else parse_size(read_rate)
    n_prompt = prompt_tokens if prompt.ids is None else len(prompt.ids)
    config = (engine if routes else settled(model, engine)).config(
        ctx=n_prompt + gen if prompt.prompt is None else None,
        streams=streams, read_rate=rate, overlap=not no_overlap, routes=routes,
        **trace_config(trace, trace_scores, force=force),
    )  # fmt: skip
    params = sampling_params(sampling, temperature=1.0, top_p=1.0)
    plan = Plan(
        prompt=prompt.ids or prompt.prompt, raw=prompt.raw, prompt_tokens=prompt_tokens, gen=gen, repeats=repeat,
        streams=streams, params=params, stop=tuple(sampling.stop or ()), raw_read=raw_read,
    )  # fmt: skip
    if compare_modes is not None:
        modes = _modes(compare_modes, no_overlap or engine.no_prefetch)
        if engine.routing != "exact" or engine.reroute is not None or routes is not None:
            raise InputError("--compare sets routing itself: leave out --routing, --reroute and --routes")
        own = {"prerouted"} if model == NAME else set[str]()
        if engine.prerouter is None and (needing := {"hints", "prerouted"}.intersection(modes) - own):
            raise InputError(f"--compare {min(needing)} needs --prerouter FILE, which `sluice prerouter init` makes")
        if engine.prerouter is not None and not {"hints", "prerouted"}.intersection(modes):
            raise InputError("--prerouter is for the modes hints and prerouted of --compare: name one, or leave it out")
        words = [
            f"--prompt-tokens={prompt_tokens}", f"--gen={gen}", f"--streams={streams}",
            *([] if read_rate is None else [f"--read-rate={read_rate}"]),
            *(["--raw-read"] if raw_read else []),
            *([] if profile is None else [f"--profile={profile}"]),
            *arguments(prompt), *(opening := arguments(replace(engine, prerouter=None))),
            *arguments(replace(sampling, seed=params.seed)),
        ]  # fmt: skip
        name = model if own else str(resolve_model(model))
        compared = compare(name, modes, words, rounds=repeat, prerouter=engine.prerouter)
        if quality_text is not None:
            compared["quality"] = quality(name, modes, opening, quality_text, prerouter=engine.prerouter)
        if json:
            emit(compared)
        else:
            _show_arms(compared)
        return 0
    path = resolve_model(model)
    if profile is not None:
        plan = replace(plan, profile=profile_for(profile, path, config))
    with deferred() as stop, open_engine(path, config, stop) as opened:
        result, reader = measure(opened, plan, stop), opened.store.reader.name
        policy = opened.policy
        if json:
            emit(result)
        else:
            _show_repeats(result)
        save_residents(opened, residents, force=force)
    from sluice.engine.report import mode_text

    note(f"mode {mode_text(result['mode'])}, policy {policy}, read by {reader}, seed {params.seed}")
    tell_trace(opened)
    return 0


def profile_for(file: Path, path: Path, config: EngineConfig) -> MachineProfile:
    """The machine profile in `file`, which must be of this machine and the model at `path`. Raises InputError."""
    from sluice.engine import Engine
    from sluice.engine.devices import device_of
    from sluice.plan.measure import machine_name
    from sluice.plan.profile import load

    profile = load(file)
    if (device := device_of(load_ggml(config.ggml), config)) is not None:
        raise InputError(f"--profile predicts the processor alone, and {device.name} takes part: give --device cpu")
    config = replace(config, device="cpu")
    planned = Engine(path, replace(config, ram=UNLIMITED, expert_slots=None, plan=None, trace=None), plan_only=True)
    profile.check(
        file, fingerprint=planned.fingerprint, machine=machine_name(cpu_name(), usable_cores()),
        threads=planned.threads, ggml=planned.library.version,
    )  # fmt: skip
    return profile


def _modes(text: str, fixed: bool) -> list[str]:
    """The arms of --compare. Raises InputError naming what is unknown."""
    modes, settings = [mode.strip() for mode in text.split(",")], set()
    for mode in modes:
        if mode.startswith(REROUTE):
            settings.add(parse_reroute(mode.removeprefix(REROUTE)))  # 0.1 and 0.10 are one
        elif mode in ARMS:
            settings.add(mode)
        else:
            raise InputError(f"--compare {mode!r} is unknown: choose from {', '.join(ARMS)}, {REROUTE}MARGIN[:J]")
    if len(settings) < len(modes):
        raise InputError(f"--compare {text} names a mode twice: name each once")
    if fixed:
        raise InputError("--compare sets overlap and prefetch itself: leave out --no-overlap and --no-prefetch")
    return modes


_HEADS = (
    "tok/s",
    "predicted",
    "ms/step p50",
    "p95",
    "hit rate",
    "read/step",
    "waiting",
    "bottleneck",
    "bound ms",
    "compute ms",
    "read ms",
)


def _figures(one: dict[str, Any]) -> list[str]:
    """The columns of _HEADS for a repeat or an arm."""
    from sluice.engine.report import bottleneck, hit_rate, wait_share

    decode, limit = one["ledger"]["decode"], one["bound"] or {}

    def text(value: float | None, form: str) -> str:
        return "–" if value is None else form.format(value)

    def ms(name: str) -> str:
        seconds = limit.get(name)
        return text(None if seconds is None else seconds * 1e3, "{:.1f}")

    predicted = one["predicted"] or {}
    return [
        text(one["tok_per_s"], "{:.2f}"),
        text(predicted.get("tok_per_s"), "{:.2f}"),
        text(one["itl_ms"]["p50"], "{:.1f}"),
        text(one["itl_ms"]["p95"], "{:.1f}"),
        text(hit_rate(decode), "{:.1%}"),
        format_size(round(decode["bytes_read"] / decode["steps"])) if decode["steps"] else "–",
        text(wait_share(decode), "{:.0%}"),
        bottleneck(decode) or "–",
        ms("bound_s"), ms("compute_s"), ms("read_s"),
    ]  # fmt: skip


def _show_repeats(result: dict[str, Any]) -> None:
    rows = [[f"{i} ({one['pool']} pool)", *_figures(one)] for i, one in enumerate(result["repeats"], 1)]
    tok_per_s = result["tok_per_s"]
    speed = "no token was decoded" if tok_per_s is None else f"median {tok_per_s:.2f} tok/s"
    budget = "" if result["budget_bytes"] is None else f" of a budget of {format_size(result['budget_bytes'])}"
    title = f"{speed}; {result['slots']} expert slots{budget}, peak memory {format_size(result['peak_rss_bytes'])}"
    print_table(["repeat", *_HEADS], rows, title=title)


def _show_arms(compared: dict[str, Any]) -> None:
    rows = []
    scored = compared.get("quality")
    for mode, arm in compared["arms"].items():
        against = compared["relative"][mode]
        of_text = [] if scored is None else _quality(scored.get(mode, scored["exact"]))
        rows.append([mode, *_figures(arm), "–" if against is None else f"{against:.2f}×", *of_text])
    first = next(iter(compared["arms"]))
    title = f"medians of {compared['rounds']}, every run in a process of its own with a cold pool"
    heads = ["mode", *_HEADS, f"÷ {first}", *([] if scored is None else ["ppl", "KL"])]
    if all(arm["predicted"] is None for arm in compared["arms"].values()):  # no profile: the table is wide enough
        at = heads.index("predicted")
        del heads[at]
        for row in rows:
            del row[at]
    print_table(heads, rows, title=title)


def _quality(one: dict[str, Any]) -> list[str]:
    """Perplexity, and the mean KL from the exact mode where it was taken: modes that are not lossy have exact's."""
    return [f"{one['ppl']:.2f}", f"{one['kl']['mean']:.3g}" if "kl" in one else "–"]
