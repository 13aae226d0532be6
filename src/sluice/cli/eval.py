"""`sluice eval`: what a model's quality is, and what a lossy mode costs of it. It computes no score itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.commands import group
from sluice.cli.eval_tasks import tasks
from sluice.cli.eval_texts import TextOptions
from sluice.cli.opening import announce, open_engine, resolve_model, settled
from sluice.cli.options import EngineOptions, Json, Model, grouped
from sluice.cli.signals import deferred
from sluice.cli.spool import check_room, spool
from sluice.cli.terminal import emit, note, print_table, progress_bar

if TYPE_CHECKING:
    from sluice.engine import Engine

CTX = 512  # positions of a window unless --ctx is given: llama.cpp's default, so that figures stand side by side
DIFFERENCE_HEADS = (
    *("text", "tokens", "KL mean", "median", "p95", "max"),
    *("same likeliest", "perplexity", "reference's", "change"),
)


Reference = Annotated[
    str | None,
    typer.Option("--reference", metavar="MODEL", help="Compare with this model, of the same vocabulary, not with MODEL "
                 "itself.", show_default=False),
]  # fmt: skip


@grouped
def ppl(*, model: Model = "demo", texts: TextOptions, engine: EngineOptions, json: Json = False) -> int:
    """Perplexity: exp of the mean loss of a text's tokens, each predicted from those before it.

    A text is fed in windows of --ctx positions (512 unless given). A window begins half a window before the first token
    that it scores, so every token is scored once, and all but the first few with at least half a window of the text
    before them. llama.cpp's windows don't overlap, and it scores the second half of each only.
    """
    config = settled(model, engine).config(ctx=CTX)
    given = texts.texts()
    from sluice.eval.perplexity import perplexity, pooled
    from sluice.eval.windows import tokenize
    from sluice.memory import peak_rss_bytes

    with deferred() as stop, open_engine(resolve_model(model), config, stop) as opened:
        ids = tokenize(opened, {name: text.text for name, text in given.items()})
        announce(opened)
        began = perf_counter()
        with progress_bar("scoring", stop.check) as progress:
            tallies = perplexity(opened, ids, progress)
        result = {
            **pooled(tallies.values()).as_dict(),
            "per_domain": {name: tally.as_dict() for name, tally in tallies.items()},
            "model": str(opened.file.paths[0]),
            "texts": {name: text.facts for name, text in given.items()},
            "window": _window(opened),
            "load_s": opened.load_s,
            "eval_s": perf_counter() - began,
            "peak_rss_bytes": peak_rss_bytes(),
            "budget_bytes": opened.plan.budget,
            "slots": opened.plan.slots,
            "mode": opened.mode | {"ctx": opened.n_ctx},
            "ledger": opened.stats(),
        }
    if json:
        emit(result)
    else:
        rows = [[name, *_loss(one)] for name, one in _rows(result)]
        print_table(["text", "tokens", "perplexity", "± one standard error"], rows)
    _tell(result)
    return 0


@grouped
def kl(
    *,
    model: Model = "demo",
    texts: TextOptions,
    reference: Reference = None,
    engine: EngineOptions,
    json: Json = False,
) -> int:
    """KL divergence of a lossy mode from the exact one, token by token: how far its predictions are off.

    The flags describe the lossy side. The reference is the same model, or that of --reference, with exact routing, the
    model's own number of experts and an f16 KV cache. The two run one after the other, on the same tokens, in windows
    as in `eval ppl`. Between them the reference's logits wait in a temporary file: 4 bytes × vocabulary a token, in the
    system's folder for such files (TMPDIR names another).
    """
    config = settled(model, engine).config(ctx=CTX)
    same_model = reference is None
    exact = replace(
        config, routing="exact", reroute=None, kv="f16", top_k_experts=None, lora=(),
        plan=config.plan if same_model else None,
    )  # fmt: skip
    given = texts.texts()
    from sluice.eval.divergence import compare, record, spooled_bytes, together
    from sluice.eval.windows import tokenize
    from sluice.memory import peak_rss_bytes

    path = resolve_model(model)
    with deferred() as stop, spool() as (file, folder):
        with open_engine(path if reference is None else resolve_model(reference), exact, stop) as opened:
            ids = tokenize(opened, {name: text.text for name, text in given.items()})
            check_room("the reference's logits take", spooled_bytes(opened, ids), folder, "give less text")
            with progress_bar("scoring the reference", stop.check) as progress:
                recorded = record(opened, ids, file, progress)
            theirs = _side(opened)
        with open_engine(path, config, stop) as opened:
            announce(opened)
            with progress_bar("scoring", stop.check) as progress:
                differences = compare(opened, recorded, progress)
            result = {
                **together(differences.values()).as_dict(),
                "per_domain": {name: one.as_dict() for name, one in differences.items()},
                "texts": {name: text.facts for name, text in given.items()},
                "window": _window(opened),
                **_side(opened),
                "reference": theirs,
                "peak_rss_bytes": peak_rss_bytes(),
            }
    if json:
        emit(result)
    else:
        rows = [[name, *_difference(one)] for name, one in _rows(result)]
        print_table(DIFFERENCE_HEADS, rows, title="KL in nats")
    _tell(result, result["reference"])
    return 0


# --- results


def _side(engine: Engine) -> dict[str, Any]:
    """What one of two engines ran as, and what that cost."""
    return {
        "model": str(engine.file.paths[0]),
        "budget_bytes": engine.plan.budget,
        "slots": engine.plan.slots,
        "mode": engine.mode | {"ctx": engine.n_ctx},
        "ledger": engine.stats(),
    }


def _window(engine: Engine) -> dict[str, int]:
    from sluice.eval.windows import lead_of, overlap

    return {"ctx": engine.n_ctx, "overlap": overlap(engine.n_ctx, len(lead_of(engine)))}


def _rows(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The rows of a table: each text, and all together if there are several."""
    domains = list(result["per_domain"].items())
    return domains if len(domains) == 1 else [*domains, ("all", result)]


def _loss(one: Mapping[str, Any]) -> list[str]:
    error = one["ppl_error"]
    return [str(one["tokens"]), f"{one['ppl']:.4f}", "–" if error is None else f"{error:.4f}"]


def _difference(one: Mapping[str, Any]) -> list[str]:
    return [
        str(one["tokens"]),
        *(f"{one['kl'][name]:.3g}" for name in ("mean", "median", "p95", "max")),
        f"{one['same_top']:.2%}", f"{one['ppl']:.4f}", f"{one['ppl_reference']:.4f}", f"{one['ppl_change']:+.3%}",
    ]  # fmt: skip


def _tell(result: Mapping[str, Any], reference: Mapping[str, Any] | None = None) -> None:
    """Say on stderr what ran."""
    from sluice.engine.report import mode_text

    window = result["window"]
    against = "" if reference is None else f", against {reference['model']}: {mode_text(reference['mode'])}"
    shared = f"windows of {window['ctx']} positions, {window['overlap']} of them shared"
    note(f"{mode_text(result['mode'])}{against}; {shared}")


ABOUT = "Measure a model's quality on texts and tasks, and what a lossy mode costs of it."
app = group("eval", ABOUT, {"ppl": ppl, "kl": kl, "tasks": tasks})
