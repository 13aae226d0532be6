"""`sluice serve`: a model behind OpenAI's API, and a page, for many requests at once."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.extras import check_extra
from sluice.cli.opening import announce, open_engine, resolve_model, settled
from sluice.cli.options import EngineOptions, Model, check_count, grouped
from sluice.cli.saving import Force
from sluice.cli.signals import Stop, deferred, noted
from sluice.cli.terminal import note
from sluice.cli.tracing import Trace, TraceScores, tell_trace, trace_config
from sluice.errors import InputError

if TYPE_CHECKING:
    from socket import socket

    from sluice.config import EngineConfig
    from sluice.engine import Engine
    from sluice.server.auth import Keys

MAX_STREAMS = 8  # unless told otherwise; their context may take a quarter of what experts would have
CONTEXT_SHARE = 0.25
_SERVING = "Serving"


def _option(name: str, metavar: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=_SERVING, show_default=False)


Host = Annotated[str, _option("--host", "ADDRESS", "Where to listen. Default 127.0.0.1; others need an API key.")]
Port = Annotated[int, _option("--port", "N", "Default 8000; 0: a free one, which is printed.")]
ApiKey = Annotated[
    str | None,
    _option("--api-key", "KEY", "What clients must send. Who lists processes can read it here: use --api-key-file, or "
            "SLUICE_API_KEY in the environment."),
]  # fmt: skip
ApiKeyFile = Annotated[
    Path | None, _option("--api-key-file", "FILE", "A file of keys, one a line. A queue is shared fairly among keys.")
]
MaxStreams = Annotated[
    int | None,
    _option("--max-streams", "N", f"Requests that generate at once. Default: up to {MAX_STREAMS}, as memory allows."),
]
MaxQueue = Annotated[int, _option("--max-queue", "N", "Requests that may wait; more are told to retry. Default 256.")]
MaxTpot = Annotated[
    float | None,
    _option("--max-tpot", "SECONDS", "Let only so many generate at once that a token takes about that. Default: all."),
]
Deadline = Annotated[
    float | None, _option("--deadline", "SECONDS", "End requests that take longer, waiting included. Default: none.")
]
Drain = Annotated[
    float, _option("--drain", "SECONDS", "After Ctrl-C, how long what runs may finish. Default 30. Again: end now.")
]


@grouped
def serve(
    *,
    model: Model = "demo",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    max_streams: MaxStreams = None,
    max_queue: MaxQueue = 256,
    max_tpot: MaxTpot = None,
    deadline: Deadline = None,
    drain: Drain = 30.0,
    engine: EngineOptions,
    trace: Trace = None,
    trace_scores: TraceScores = False,
    force: Force = False,
) -> int:
    """Serve a model over HTTP: OpenAI's API under /v1, and a page at /.

    Requests generate together, and each expert is read once for all of them. Ctrl-C or SIGTERM lets those that run
    finish, and takes no new ones.
    """
    if max_streams is not None:
        check_count("--max-streams", max_streams)
    check_count("--max-queue", max_queue)
    for name, value in (("--max-tpot", max_tpot), ("--deadline", deadline)):
        if value is not None and not 0 < value < 1e9:
            raise InputError(f"{name} {value:g} can't be: give a number of seconds above 0")
    if not 0 <= drain < 1e9:
        raise InputError(f"--drain {drain:g} can't be: give 0 seconds or more")
    if not 0 <= port < 1 << 16:
        raise InputError(f"--port {port} is out of range: give 1 to 65535, or 0 for a free one")
    config = settled(model, engine).config(**trace_config(trace, trace_scores, force=force))
    check_extra("serve")
    import sluice.server.app  # noqa: F401  # before the engine measures what the process takes
    from sluice.server.auth import is_loopback
    from sluice.server.limits import SERVER_BYTES
    from sluice.server.listening import bind
    from sluice.server.model import model_id

    keys = _keys(api_key, api_key_file)
    if not keys and not is_loopback(host):
        raise InputError(f"--host {host} lets other machines in, so an API key is needed: give --api-key-file")
    path = resolve_model(model)
    config = replace(config, beside=SERVER_BYTES)
    with deferred() as stop, bind(host, port) as bound:
        streams = streams_for(path, config) if max_streams is None else max_streams
        with open_engine(path, replace(config, streams=streams), stop) as opened:
            announce(opened)
            asked = Asked(deadline_s=deadline, max_queue=max_queue, max_tpot_s=max_tpot, drain_s=drain)
            _serve(opened, model_id(model, opened.file.paths[0]), bound, host, keys, asked, stop)
        tell_trace(opened)
    return stop.exit_code


def streams_for(path: Path, config: EngineConfig) -> int:
    """How many streams to open where none were asked for: each one's context takes the room of experts."""
    from sluice.engine import Engine

    if config.ram is None and config.expert_slots is not None:
        return MAX_STREAMS
    one = Engine(path, replace(config, streams=1, trace=None), plan_only=True).plan
    room = CONTEXT_SHARE * one.slots * one.slot_bytes
    return 1 + min(MAX_STREAMS - 1, int(room / max(1, one.needs.kv)))


@dataclass(frozen=True)
class Asked:
    """What the options said of requests; times in seconds."""

    deadline_s: float | None
    max_queue: int
    max_tpot_s: float | None
    drain_s: float


def _keys(key: str | None, file: Path | None) -> Keys:
    """The keys that are taken. Raises InputError."""
    from sluice.server.auth import Keys, read_keys

    if key is not None and file is not None:
        raise InputError("--api-key and --api-key-file are both given: give one of them")
    if file is not None:
        return Keys(read_keys(file.expanduser()))
    given = os.environ.get("SLUICE_API_KEY") or None if key is None else key
    return Keys([] if given is None else [given])  # an empty one, as of a variable that isn't set, is refused


def _serve(engine: Engine, name: str, bound: socket, host: str, keys: Keys, asked: Asked, stop: Stop) -> None:
    """Serve until `stop` asks for the end; say where, and at the end what was done."""
    from sluice.engine.report import mode_text
    from sluice.server.app import Serving, build_app
    from sluice.server.limits import Limits
    from sluice.server.listening import listen, serve, url_of
    from sluice.server.metrics import Metrics
    from sluice.server.model import ServedModel
    from sluice.server.worker import Worker

    model = ServedModel(engine, name, created=int(time.time()))
    service = Worker(engine, max_queue=asked.max_queue, max_step_s=asked.max_tpot_s)
    try:
        limits = Limits.for_context(engine.n_ctx)
        serving = Serving(
            service, model, keys, host=host, deadline_s=asked.deadline_s, limits=limits, metrics=Metrics(note)
        )
        app = build_app(serving)
        listen(bound)
        streams = f"{engine.config.streams} stream{'s' * (engine.config.streams > 1)}"
        print(f"serving {model.id} at {url_of(bound, host)} ({mode_text(engine.mode)}; {streams})", flush=True)

        def draining(n: int) -> None:
            if n:
                note(f"finishing {n} request{'s' * (n > 1)}, at most {asked.drain_s:g} s; Ctrl-C again ends at once")

        with noted() as signals:  # one that raised in the event loop would end answers without a word
            heard = 0

            def asked_to_end() -> bool:
                """Whether another signal has come; each counts once."""
                nonlocal heard
                heard += (more := heard < len(signals))
                return more

            signals += [] if stop.number is None else [stop.number]
            ending = asyncio.run(
                serve(app, bound, service, asked_to_end, drain_s=asked.drain_s, on_drain=draining, limits=limits)
            )
        stop.number = signals[0] if signals else None
    finally:
        service.close(0)
    cut = f", {ending.cut_off} cut off at the end" if ending.cut_off else ""
    done, totals = ending.totals.finished, ending.totals
    note(f"{done} answered, {totals.failed} failed{cut}; {totals.generated_tokens} tokens generated")
