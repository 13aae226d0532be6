"""`sluice train pretrain` and `locality`: train whole models by recipes. They compute nothing themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.options import Json
from sluice.cli.signals import deferred
from sluice.cli.terminal import Progress, emit, note, print_facts, progress_bar
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.train.recipe import Recipe

Report = Callable[[Mapping[str, Any]], None]  # a line of metrics

_WHAT = "What the recipe says otherwise"
_SAID_EVERY_S = 20.0


def _option(*names: str, metavar: str, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=_WHAT, show_default=False)


Data = Annotated[Path, typer.Argument(metavar="DATA", help="A data folder, made by `sluice train data`.")]
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's folder. One that was interrupted goes on where it stopped.")
]
ARecipe = Annotated[
    Path, typer.Option("--recipe", metavar="TOML", help="What to train and how.", show_default=False)
]  # fmt: skip
Start = Annotated[
    Path | None,
    typer.Option("--from", metavar="MODEL", help="A model's folder to start from. Default: from scratch, by the "
                 "recipe's section model.", show_default=False),
]  # fmt: skip
Teacher = Annotated[
    Path | None,
    typer.Option("--teacher", metavar="MODEL", show_default=False,
                 help="A model whose predictions are learned too, as the recipe's section distill says."),
]  # fmt: skip
Branch = Annotated[
    Path | None,
    typer.Option("--branch", metavar="CHECKPOINT", show_default=False,
                 help="Another run's checkpoint to go on from by this recipe: RUN/checkpoints/step-N."),
]  # fmt: skip
Steps = Annotated[int | None, _option("--steps", metavar="N", help="Steps of the run.")]
Seed = Annotated[int | None, _option("--seed", metavar="S", help="Decides the first weights and the order of text.")]
Rate = Annotated[float | None, _option("--lr", metavar="X", help="The highest learning rate.")]
Loss = Annotated[str | None, _option("--loss", metavar="NAME", help="The loss on neighbouring tokens' routes.")]
Weight = Annotated[float | None, _option("--weight", metavar="X", help="Its weight, λ.")]
Domain = Annotated[
    float | None,
    _option("--domain", metavar="X", help="Keep each domain's text to its experts, by a loss of this weight."),
]


def pretrain(
    data: Data, run: Run, recipe: ARecipe, start: Start = None, teacher: Teacher = None, branch: Branch = None,
    steps: Steps = None, seed: Seed = None, lr: Rate = None, json: Json = False,
) -> int:  # fmt: skip
    """Train a model with experts on text of several domains, from scratch or from another model.

    Metrics go to RUN/metrics.jsonl and to TensorBoard, the model to RUN/model, what came of it to RUN/result.json.
    Ctrl-C saves a checkpoint; the same command goes on from it, to the same weights. On several GPUs:
    `accelerate launch -m sluice train pretrain …`, which with --use_fsdp splits the weights too.
    """
    from sluice.train.recipe import read_recipe

    changes = {"steps": steps, "seed": seed, "lr": lr}
    asked = read_recipe(recipe).changed({"train": _given(changes)})
    return _train(data, run, asked, start, teacher, branch, json=json)


def locality(
    data: Data, run: Run, recipe: ARecipe, start: Start = None, teacher: Teacher = None, branch: Branch = None,
    loss: Loss = None, weight: Weight = None, domain: Domain = None, steps: Steps = None, seed: Seed = None,
    lr: Rate = None, json: Json = False,
) -> int:  # fmt: skip
    """Train a model whose routes cache well: as pretrain, with a loss on neighbouring tokens' routes, or on domains'.

    From scratch, from a model that is to become local, or (--branch) from a checkpoint of one in training: what is
    annealed "late" changes nothing before half of a run. The recipe's sections locality and domain say how strongly.
    """
    from sluice.train.recipe import read_recipe

    changes = {
        "train": _given({"steps": steps, "seed": seed, "lr": lr}),
        "locality": _given({"loss": loss, "weight": weight}),
        "domain": _given({"weight": domain}),
    }
    asked = read_recipe(recipe).changed(changes)
    if not (asked.locality.weight or asked.locality.reroute or asked.domain.weight or asked.domain.prior):
        raise InputError("nothing local is asked for: give --weight or --domain a number above 0, or the recipe a "
                         "locality.reroute, or use pretrain")  # fmt: skip
    return _train(data, run, asked, start, teacher, branch, json=json)


def _given(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def _train(
    data: Path, run: Path, recipe: Recipe, start: Path | None, teacher: Path | None, branch: Path | None, *, json: bool
) -> int:  # fmt: skip
    from sluice.train.pretrain import pretrain as train

    asked = recipe.without_model() if start is not None and recipe.model else recipe
    return told(
        asked.train.steps,
        lambda progress, report, stop: train(
            data, run, asked, start=start, teacher=teacher, branch=branch, progress=progress, report=report, stop=stop
        ),
        _show, json=json,
    )  # fmt: skip


def told(
    steps: int, begin: Callable[[Progress, Report, Callable[[], bool]], dict[str, Any]],
    show: Callable[[Mapping[str, Any]], None], *, json: bool,
) -> int:  # fmt: skip
    """Train, tell how it goes, print what came of it; returns the exit code. `begin` takes what `fit` calls back."""
    from sluice.train.loop import Stopped
    from sluice.train.processes import place

    with deferred() as stop, progress_bar("training") as progress:
        try:
            result = begin(progress, _reporter(steps), lambda: bool(stop))
        except Stopped as stopped:
            if place().first:
                note(f"sluice: {stopped}")
            return stop.exit_code
    if not place().first:
        return 0  # the first process speaks for all
    if json:
        emit(result)
    else:
        show(result)
    return 0


def _reporter(steps: int) -> Report:
    """Says on stderr now and then how training goes: a line of metrics as a sentence, with the time that is left."""
    said_at = -_SAID_EVERY_S

    def report(line: Mapping[str, Any]) -> None:
        nonlocal said_at
        now = perf_counter()
        if "valid" in line:
            figures = ", ".join(f"{name} {value:.4g}" for name, value in line["valid"].items())
            note(f"step {line['step']}/{steps}, held out: {figures}")
        elif now - said_at >= _SAID_EVERY_S or line["step"] == steps:
            said_at = now
            left = ""
            if line["tok_per_s"]:
                seconds = (steps - line["step"]) * line["tokens"] / line["step"] / line["tok_per_s"]
                left = f", {seconds / 60:.0f} min left"
            note(f"step {line['step']}/{steps}, loss {line['loss']:.4f}, {line['tok_per_s'] or 0:,.0f} tokens/s{left}")

    return report


def _show(result: Mapping[str, Any]) -> None:
    figures = result["valid"]
    facts = [
        ("model", str(result["model"])),
        ("trained", f"{result['steps']} steps, {result['tokens']:,} tokens in {result['elapsed_s'] / 60:.1f} min"),
        ("parameters", f"{result['parameters']:,}"),
    ]
    if "loss" in figures:
        facts.append(("held out", f"loss {figures['loss']:.4f}, perplexity {figures['perplexity']:.3f}"))
    if "reuse" in figures:
        facts.append(("routes", f"{figures['reuse']:.1%} of a token's experts are the token before's; a layer's LRU of "
                      f"13.4 % would miss {figures['lru_miss']:.1%}"))  # fmt: skip
    print_facts(facts)
