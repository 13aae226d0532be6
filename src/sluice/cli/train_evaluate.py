"""`sluice train evaluate`: what a model costs and saves on held-out text. Trains nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.options import Json, check_count
from sluice.cli.terminal import emit, print_facts, print_table, progress_bar
from sluice.cli.train_fit import Data
from sluice.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from sluice.train.data import Tokens

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model's folder, as transformers saves it.")]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="GGUF", help="Take the weights that this file of the model dequantises to.",
                 show_default=False),
]  # fmt: skip
Prerouter = Annotated[
    Path | None,
    typer.Option("--prerouter", metavar="FILE", help="Heads, whose recall is measured.", show_default=False),
]
Routing = Annotated[
    str, typer.Option("--routing", metavar="MODE", help="exact: the model's own routes. prerouted: the heads'.")
]
Lora = Annotated[
    Path | None,
    typer.Option("--lora", metavar="FOLDER", help="An adapter beside the weights, as `sluice train recover` saves it.",
                 show_default=False),
]  # fmt: skip
Teacher = Annotated[
    Path | None,
    typer.Option("--teacher", metavar="MODEL", help="Measure the divergence from this model, by its own routes.",
                 show_default=False),
]  # fmt: skip
Passages = Annotated[int, typer.Option("--passages", metavar="N", help="Held-out passages of each domain.")]
Length = Annotated[int, typer.Option("--length", metavar="N", help="Tokens of a passage, at most.")]
Capacity = Annotated[
    str, typer.Option("--capacity", metavar="LIST", help="Simulated caches, in per cent of all experts.")
]
Generate = Annotated[
    int, typer.Option("--generate", metavar="N", help="Continue passages greedily by N tokens: repetition. 0: don't.")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Keep the routes as a trace.", show_default=False)
]
Scores = Annotated[bool, typer.Option("--trace-scores", metavar="", help="With all experts' scores in it.")]
Switching = Annotated[
    bool, typer.Option("--switching", metavar="", help="Also what loading a domain's experts at a switch saves.")
]
Texts = Annotated[
    Path | None,
    typer.Option("--texts", metavar="FOLDER", help="Write the passages there, a file each, and measure nothing.",
                 show_default=False),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite the trace.")]
ROUTING = ("exact", "prerouted")


def evaluate(
    model: Model, data: Data, weights: Weights = None, prerouter: Prerouter = None, routing: Routing = "exact",
    lora: Lora = None, teacher: Teacher = None, passages: Passages = 16, length: Length = 256,
    capacity: Capacity = "13.4%", generate: Generate = 0, trace: Trace = None, trace_scores: Scores = False,
    switching: Switching = False, texts: Texts = None, force: Force = False, json: Json = False,
) -> int:  # fmt: skip
    """Measure a model on held-out text: perplexity by domain, and the misses of a simulated LRU cache in decoding.

    Passages of the domains follow each other. Also measured: how much of a domain's demand its own experts serve; with
    --prerouter recall@k of each layer beside guesses that need no training; with
    --teacher KL; with --generate how often greedy text repeats itself.
    """
    from sluice.train import data as prepared
    from sluice.train.evaluate import Wanted
    from sluice.train.evaluate import evaluate as measure
    from sluice.train.heads import Heads
    from sluice.train.passages import passages as cut
    from sluice.train.passages import write_passages
    from sluice.train.student import Student

    shares = _shares(capacity)
    check_count("--passages", passages)
    if generate:
        check_count("--generate", generate)
    if routing not in ROUTING:
        raise InputError(f"--routing {routing!r} is unknown: choose from {', '.join(ROUTING)}")
    if routing == "prerouted" and prerouter is None:
        raise InputError("--routing prerouted needs predictions: give --prerouter FILE")
    if trace is not None:
        from sluice.new_file import check_out

        check_out(trace, force=force, made="the trace")
    tokens = prepared.Tokens(data)
    found = cut(tokens, "valid", passages, length)
    if texts is not None:
        files = write_passages(found, texts)
        listed = [{"domain": domain, "file": str(file)} for domain, file in files]
        emit({"texts": listed}) if json else print("\n".join(str(file) for _, file in files))
        return 0
    counted = cut(tokens, "train", passages, length)
    opened = _open(model, tokens)
    if weights is not None:
        from sluice.cli.opening import load_ggml
        from sluice.train.opening import dequantise

        dequantise(opened, model, weights, load_ggml(None))
    if lora is not None:
        from sluice.train.lora import open_lora

        open_lora(opened, lora)
    heads = None if prerouter is None else Heads.open(prerouter)
    student = Student(opened, heads) if heads is not None and routing == "prerouted" else None
    wanted = Wanted(
        shares=shares, trace=trace, force=force, scores=trace_scores, switching=switching, generate=generate
    )
    with progress_bar("evaluating") as progress:
        measured = measure(
            opened, found, counted, tokens.end, heads=heads, student=student,
            teacher=None if teacher is None else _open(teacher, tokens), wanted=wanted, name=model.name,
            progress=progress,
        )  # fmt: skip
    result = {
        "model": str(model), "weights": _text(weights), "prerouter": _text(prerouter), "routing": routing,
        "lora": _text(lora), "teacher": _text(teacher), "data": tokens.fingerprint, "passages": passages,
        "length": length, **measured,
    }  # fmt: skip
    if json:
        emit(result)
    else:
        _show(result)
    return 0


def _shares(text: str) -> tuple[float, ...]:
    """Of 1, from "13.4%,25%". Raises InputError."""
    found: list[float] = []
    for item in text.split(","):
        if not (match := re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,9})?)\s*%\s*", item)):
            raise InputError(f"--capacity {item.strip()[:40]!r}: write per cent of all experts, like 13.4%")
        found.append(float(match[1]) / 100)
    return tuple(dict.fromkeys(found))


def _open(path: Path, tokens: Tokens) -> nn.Module:
    """The model in a folder. Raises InputError where it isn't one, or has another tokenizer than the data."""
    from sluice.train.experts import use_fast_experts
    from sluice.train.pretrain import opened

    model = opened(path, tokens)
    use_fast_experts(model)
    return model


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _show(result: dict[str, Any]) -> None:
    domains = result["per_domain"]
    hits = result["domains"]["pinned_hit_rate"]
    compared = result["balanced"]["kl"] is not None
    rows = [
        [name, str(one["tokens"]), f"{one['loss']:.4f}", f"{one['ppl']:.3f}", f"{hits[name]:.1%}"]
        + ([f"{one['kl']:.4f}", f"{one['same_top']:.1%}"] if compared else [])
        for name, one in domains.items()
    ]
    heads = ["domain", "tokens", "loss", "perplexity", "own experts serve"] + (
        ["KL", "same likeliest"] if compared else []
    )
    print_table(heads, rows, title="held-out text; losses and KL in nats a token")
    facts = [
        ("all domains alike", f"loss {result['balanced']['loss']:.4f}, perplexity {result['balanced']['ppl']:.3f}")
    ]
    facts += [
        (f"LRU, {one['capacity_share']:.1%}", f"{one['capacity_slots']} slots: {one['misses']} misses of "
         f"{one['demands']} demands, {one['reads_per_token']:.2f} a token")
        for one in result["cache"]["results"]
    ]  # fmt: skip
    if (repeated := result["repetition"]) is not None:
        rate, distinct = repeated["rate"], repeated["distinct"]
        said = "no text of four tokens" if rate is None else f"{rate:.1%} of 4-grams repeated, {distinct:.1%} distinct"
        facts.append(("greedy text", said))
    print_facts(facts)
    if (recall := result["recall"]) is not None:
        names = [name for name in recall["mean"]]
        table = [[str(one["layer"]), *(f"{one[name]:.1%}" for name in names)] for one in recall["layers"]]
        table.append(["mean", *(f"{recall['mean'][name]:.1%}" for name in names)])
        print_table(["layer", *names], table, title="recall@k of the experts a token ahead")
