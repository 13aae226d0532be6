"""`sluice run`: one prompt, one answer."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.opening import announce, check_prompt, feed_ahead, open_engine, resolve_model, settled
from sluice.cli.options import EngineOptions, Json, Model, PromptOptions, SamplingOptions, check_count, grouped
from sluice.cli.saving import Force, SaveResidents, check_residents, save_residents
from sluice.cli.signals import Stop, deferred
from sluice.cli.terminal import emit, note
from sluice.cli.tracing import Trace, TraceScores, tell_trace, trace_config
from sluice.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice.engine import Engine, Generation
    from sluice.text.sampling import SamplingParams

MAX_STDIN_BYTES = 64 << 20
MaxTokens = Annotated[int, typer.Option("-n", metavar="N", help="At most so many tokens.", show_default=True)]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", metavar="", help="Go on past the end of text.")]


@grouped
def run(
    *,
    model: Model = "demo",
    prompt: PromptOptions,
    max_tokens: MaxTokens = 256,
    engine: EngineOptions,
    sampling: SamplingOptions,
    ignore_eos: IgnoreEos = False,
    residents: SaveResidents = None,
    trace: Trace = None,
    trace_scores: TraceScores = False,
    force: Force = False,
    json: Json = False,
) -> int:
    """Answer one prompt, from -p, --prompt-ids or stdin; the answer streams to stdout.

    A line on stderr then says how fast it was, and what held it back. Ctrl-C ends the answer after the current token.
    """
    check_count("-n", max_tokens)
    check_residents(residents, force=force)
    config = settled(model, engine).config(**trace_config(trace, trace_scores, force=force))
    params = sampling_params(sampling)
    source = prompt.ids or prompt.prompt or _from_stdin()
    path = resolve_model(model)
    from sluice.engine import Generation
    from sluice.engine.report import summary

    with deferred() as stop, open_engine(path, config, stop) as opened:
        ids = opened.encode_prompt(source, raw=prompt.raw) if isinstance(source, str) else source
        check_prompt(opened, ids)
        announce(opened)
        with opened.session() as session:
            state, began = opened.cache_state, perf_counter()
            rest = feed_ahead(session, ids, stop)
            generation = Generation(
                session, rest, params, max_tokens=max_tokens, stop=sampling.stop or (), ignore_eos=ignore_eos
            )
            before_s = perf_counter() - began
            stream(generation, stop, show=not json)
            extra = {"max_tokens": max_tokens, "stop": sampling.stop or [], "ignore_eos": ignore_eos}
            result = result_of(
                opened, generation, prompt_tokens=len(ids), before_s=before_s,
                mode=sampling_mode(params) | extra | {"raw": prompt.raw or not isinstance(source, str)},
                cache_state=state,
            )  # fmt: skip
            note(summary(result, random_seed=sampling.seed is None))
            if json:
                emit(result)
        save_residents(opened, residents, force=force)
    tell_trace(opened)
    return stop.exit_code


def sampling_params(sampling: SamplingOptions, **defaults: float) -> SamplingParams:
    """As the sampler takes it, checked; with a random seed where none was given."""
    import secrets

    from sluice.text.sampling import SamplingParams

    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
    return SamplingParams(seed=seed, **sampling.params(**defaults))


def sampling_mode(params: SamplingParams) -> dict[str, Any]:
    """The sampling's part of a result's `mode`."""
    names = ("temperature", "sample_top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
    return {name: getattr(params, name) for name in names}


def stream(generation: Generation, stop: Stop, *, show: bool) -> None:
    """Generate to the end, or until `stop` asks for it; with `show`, print the text as it comes."""
    for token in generation:
        if show and token.text:
            sys.stdout.write(token.text)
            sys.stdout.flush()
        if stop:
            break
    if show and not generation.text.endswith("\n"):
        print(flush=True)


def result_of(
    engine: Engine, generation: Generation, *, prompt_tokens: int, before_s: float, mode: dict[str, Any],
    cache_state: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The JSON object of one generation; `before_s` went by between the prompt's first chunk and its last.

    `cache_state` is the engine's from before the prompt.
    """
    from sluice.engine.report import rate, run_result
    from sluice.memory import peak_rss_bytes

    intervals: Sequence[float] = generation.intervals_s
    return run_result(
        text=generation.text, tokens=generation.tokens, finish_reason=generation.finish_reason,
        prompt_tokens=prompt_tokens, generated_tokens=len(generation.tokens), load_s=engine.load_s,
        ttft_s=None if generation.ttft_s is None else generation.ttft_s + before_s,
        intervals_s=intervals, tok_per_s=rate(len(intervals), sum(intervals)),
        peak_rss_bytes=peak_rss_bytes(), budget_bytes=engine.plan.budget, slots=engine.plan.slots,
        seed=generation.seed, mode=engine.mode | {"ctx": engine.n_ctx} | mode, ledger=engine.stats(),
        placed=engine.placed, device=engine.device, cache_state=cache_state,
    )  # fmt: skip


def _from_stdin() -> str:
    """The prompt from a pipe or file on stdin, without its last line's end. Raises InputError."""
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("there is no prompt: give -p TEXT, --prompt-ids, or text on stdin")
    raw = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(raw) > MAX_STDIN_BYTES:
        raise InputError(f"the text on stdin is longer than {MAX_STDIN_BYTES >> 20} MiB: give a prompt that fits")
    text = raw.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
    if not text:
        raise InputError("the prompt on stdin is empty: give -p TEXT, or some text on stdin")
    return text
