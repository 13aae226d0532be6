"""`sluice batch`: answers a file of requests, as wide as memory allows, and goes on where it was cut short."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.extras import check_extra
from sluice.cli.opening import announce, open_engine, resolve_model, settled
from sluice.cli.options import EngineOptions, Json, check_count, grouped
from sluice.cli.saving import Force
from sluice.cli.signals import Stop, deferred
from sluice.cli.terminal import emit, note, progress_bar
from sluice.config import EngineConfig
from sluice.errors import BudgetError, InputError, SluiceError

if TYPE_CHECKING:
    from sluice.engine import Engine
    from sluice.server.batch_files import Answers, Requests

MAX_STREAMS = 64  # unless told otherwise: past it the arithmetic of a step grows as fast as its width
LEAST_STREAMS = 8  # for which experts give way even where all would fit
CONTEXT_SHARE = 0.5  # of the room that experts would have, what the contexts of all streams may take
Words = Annotated[
    list[str],
    typer.Argument(metavar="[MODEL] IN OUT", help="Requests, one a line in OpenAI's batch format, and the file for the "
                   "answers. MODEL: a GGUF file, or demo, the default.", show_default=False),
]  # fmt: skip
MaxStreams = Annotated[
    int | None,
    typer.Option("--max-streams", metavar="N", show_default=False,
                 help=f"Requests that generate at once. Default: up to {MAX_STREAMS}, as memory allows."),
]  # fmt: skip


@grouped
def batch(
    *, words: Words, max_streams: MaxStreams = None, engine: EngineOptions, force: Force = False, json: Json = False
) -> int:
    """Answer a file of requests in OpenAI's batch format, many at a time: one pass over the disk serves them all.

    Each line of IN has custom_id, url (/v1/chat/completions or /v1/completions) and body; OUT gets a line for each, in
    the order in which they are done. A run that was ended, in any way, goes on where it was when the same command is
    given again: every line is answered once. A line that is no request gets an error in its place.
    """
    model, given, out = _named(words)
    if max_streams is not None:
        check_count("--max-streams", max_streams)
    config = settled(model, engine).config()
    check_extra("serve")
    from sluice.server.batch_files import Answers, Requests
    from sluice.server.limits import SERVER_BYTES, Limits
    from sluice.server.offline import ENVELOPE_BYTES

    for other, what in ((given, "file of requests"), (Path(model), "model")):
        if out.is_file() and other.is_file() and out.samefile(other):
            raise InputError(f"{out}: is the {what}: name another file for the answers")
    requests = Requests(given, Limits().body_bytes + ENVELOPE_BYTES)
    with deferred() as stop, Answers(out, force=force) as answers:
        left = requests.check(answers.answered, stop.check)
        stop.check()
        kept = len(answers.answered)
        if not requests.n_lines:
            raise InputError(f"{given}: holds no requests: give at least one line")
        if kept and left:
            note(f"{out}: has {kept} of {requests.n_lines} answers already; {left} are left")
        if not left:
            note(f"{out}: has all {requests.n_lines} answers; --force starts over")
            if json:
                emit({"lines": requests.n_lines, "skipped": kept, "answered": 0, "failed": 0, "left": 0})
            return 0
        path = resolve_model(model)
        config = replace(config, beside=SERVER_BYTES)
        streams = min(widest(path, config), 4 * left) if max_streams is None else max_streams
        with open_engine(path, replace(config, streams=streams), stop) as opened:
            announce(opened)
            note(f"{opened.config.streams} streams")
            result = _run(opened, model, requests, answers, left, stop)
    if json:
        emit(result)
    _tell(result, stop)
    return stop.exit_code


def _named(words: list[str]) -> tuple[str, Path, Path]:
    if len(words) not in (2, 3):
        raise InputError(f"{len(words)} names are given: give IN and OUT, and MODEL before them unless it is demo")
    model, given, out = words if len(words) == 3 else ["demo", *words]
    return model, Path(given), Path(out)


def widest(path: Path, config: EngineConfig) -> int:
    """How many streams to open: as many as memory that is left over holds; more where that are few, at experts' cost.

    A stream takes its context. Where not all experts fit anyway, all contexts may take CONTEXT_SHARE of their room,
    as each expert is read once for all streams; where all fit, only what makes LEAST_STREAMS.
    """
    from sluice.engine import Engine
    from sluice.engine.budget import budget_for

    one = Engine(path, replace(config, streams=1), plan_only=True)
    plan = one.plan
    if plan.budget is None:  # the pool was set by hand, and no budget to keep to
        return MAX_STREAMS
    spare = max(0, plan.budget - budget_for(plan.needs, plan.slot_bytes, plan.slots))
    shared = CONTEXT_SHARE * plan.slots * plan.slot_bytes
    each = max(1, plan.needs.kv)
    streams = 1 + int((spare + shared) / each)
    if plan.slots == len(one.spec.moe_layers) * one.spec.n_expert:
        streams = max(1 + spare // each, min(streams, LEAST_STREAMS))
    streams = min(streams, MAX_STREAMS)
    while streams > 1:  # the rest of a stream's needs is not counted above
        try:
            Engine(path, replace(config, streams=streams), plan_only=True)
            break
        except BudgetError:
            streams = streams * 3 // 4
    return streams


def _run(
    engine: Engine, model: str, requests: Requests, answers: Answers, left: int, stop: Stop
) -> dict[str, Any]:  # fmt: skip
    """Answer what is left; the result, also of a run that a signal ended."""
    from sluice.memory import peak_rss_bytes
    from sluice.server.limits import Limits
    from sluice.server.model import ServedModel, model_id
    from sluice.server.offline import Offline, most_jobs
    from sluice.server.worker import Worker

    limits, streams = Limits.for_context(engine.n_ctx), engine.config.streams
    served = ServedModel(engine, model_id(model, engine.file.paths[0]), created=int(time.time()))
    service = Worker(engine, max_queue=most_jobs(streams, limits), prompt_share=1.0)  # nobody waits
    ended: BaseException | None = None
    with progress_bar("answering", stop.check) as progress:
        run = Offline(service, served, limits, width=streams, check=stop.check, progress=progress)
        try:
            run.run(requests, answers, left)
        except (KeyboardInterrupt, SluiceError) as error:
            ended = error
        except BaseException as error:
            if not stop:
                raise
            ended = error
        finally:
            service.close(0)
    summary = run.summary
    done = summary.answered + summary.failed
    if isinstance(ended, SluiceError):
        note(f"{done} of {left} answered before a fault; the same command goes on")
        raise ended
    return {
        "lines": requests.n_lines,
        "skipped": requests.n_lines - left,
        "left": left - done,
        **asdict(summary),
        "tok_per_s": summary.generated_tokens / summary.wall_s if summary.wall_s else None,
        "streams": streams,
        "load_s": engine.load_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "budget_bytes": engine.plan.budget,
        "slots": engine.plan.slots,
        "mode": engine.mode | {"ctx": engine.n_ctx},
        "ledger": engine.stats(),
    }


def _tell(result: dict[str, Any], stop: Stop) -> None:
    from sluice.engine.report import mode_text

    speed = result["tok_per_s"]
    note(
        f"{mode_text(result['mode'])}; {result['answered']} answered, {result['failed']} failed in "
        f"{result['wall_s']:.1f} s; {result['generated_tokens']} tokens"
        + ("" if speed is None else f", {speed:.1f} a second on {result['streams']} streams")
    )
    if result["first_failure"]:
        note(f"first failure: {result['first_failure']}")
    if stop:
        note(f"{result['left']} are left: the same command goes on with them")
