"""`sluice train text`, `prerouter`, `recover`, `onpolicy`: from a model to heads and an adapter. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.opening import load_ggml
from sluice.cli.options import Json, check_count, grouped
from sluice.cli.terminal import emit, print_facts
from sluice.cli.train_fit import Data, Run, told

if TYPE_CHECKING:
    from sluice.train.staged import Going

_HOW = "How it is trained"


def _option(*names: str, metavar: str, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=_HOW)


Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="The model's folder, as transformers saves it: the teacher.")
]
Gguf = Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file of the teacher, unquantised.")]
ATexts = Annotated[Path, typer.Argument(metavar="TEXTS", help="A folder of texts, made by `sluice train text`.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder for the texts.")]
Weights = Annotated[
    Path, typer.Option("--weights", metavar="GGUF", help="The quantised file of the model that will be served.",
                       show_default=False),
]  # fmt: skip
MaybeWeights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="GGUF", help="Learn on what this quantised file of the model computes.",
                 show_default=False),
]  # fmt: skip
AHeads = Annotated[
    Path, typer.Option("--heads", metavar="FILE", help="Heads, as the stage before wrote them.", show_default=False)
]
MaybeHeads = Annotated[
    Path | None,
    typer.Option("--heads", metavar="FILE", help="Heads to go on from. Default: untrained ones.", show_default=False),
]
AnAdapter = Annotated[
    Path, typer.Option("--adapter", metavar="FOLDER", help="The adapter that recover wrote.", show_default=False)
]
Hidden = Annotated[int, _option("--hidden", metavar="N", help="Width of untrained heads.")]
Rank = Annotated[int, _option("--rank", metavar="R", help="Rank of the adapter.")]
Targets = Annotated[
    str, _option("--targets", metavar="LIST", help="What is adapted: attention, dense, experts; with commas.")
]
Kl = Annotated[
    float, _option("--kl", metavar="X", help="Weight of the divergence from the teacher, beside its tokens.")
]
HeadsRate = Annotated[float, _option("--heads-lr", metavar="X", help="The heads' learning rate, times the adapter's.")]
Generate = Annotated[int, _option("--generate", metavar="N", help="Tokens that the student writes for a prompt.")]
Temperature = Annotated[float, typer.Option("--temperature", metavar="T", help="Of what is drawn.")]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Let stages come in any order.")]
ForceTexts = Annotated[bool, typer.Option("--force", metavar="", help="Start over where OUT holds other texts.")]
Prompts = Annotated[int, typer.Option("--prompts", metavar="N", help="Texts to train on, of all domains together.")]
HeldOutTexts = Annotated[int, typer.Option("--held-out", metavar="N", help="Texts besides, of held-out prompts.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of a prompt.")]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens that are written for each, at most.")]
Seed = Annotated[int, typer.Option("--seed", metavar="S", help="Decides prompts and draws.")]
Ram = Annotated[
    str | None, typer.Option("--ram", metavar="SIZE", help="As `sluice batch` takes it.", show_default=False)
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="As `sluice batch` takes it.", show_default=False)
]


@dataclass(frozen=True)
class RunOptions:
    """How long and how fast; the loop's settings by their names there."""

    steps: Annotated[int, _option("--steps", metavar="N", help="Steps of the run.")] = 1000
    batch: Annotated[int, _option("--batch", metavar="N", help="Rows of a step.")] = 16
    length: Annotated[int, _option("--length", metavar="N", help="Tokens of a row, at most.")] = 256
    lr: Annotated[float, _option("--lr", metavar="X", help="The highest learning rate.")] = 1e-3
    warmup: Annotated[int, _option("--warmup", metavar="N", help="Steps in which it rises to that.")] = 20
    schedule: Annotated[str, _option("--schedule", metavar="NAME", help="cosine, wsd or constant.")] = "cosine"
    weight_decay: Annotated[float, _option("--weight-decay", metavar="X", help="Of matrices.")] = 0.0
    seed: Annotated[int, _option("--seed", metavar="S", help="Decides first weights, order and draws.")] = 0
    held_out: Annotated[
        int, _option("--held-out", metavar="N", help="Held-out rows of each domain, or texts, to measure on.")
    ] = 16
    log_every: Annotated[int, _option("--log-every", metavar="N", help="Steps between lines of metrics.")] = 10
    valid_every: Annotated[int, _option("--valid-every", metavar="N", help="Steps between held-out figures.")] = 100
    save_every: Annotated[int, _option("--save-every", metavar="N", help="Steps between checkpoints.")] = 100

    def train(self, begin: Callable[[Going], dict[str, Any]], *, force: bool, json: bool) -> int:
        """Run a stage, tell how it goes, print what came of it; returns the exit code."""
        from sluice.train.settings import Settings
        from sluice.train.staged import Going

        check_count("--held-out", self.held_out)
        settings = Settings(
            steps=self.steps, batch=self.batch, length=self.length, lr=self.lr, warmup=min(self.warmup, self.steps),
            schedule=self.schedule, weight_decay=self.weight_decay, seed=self.seed, log_every=self.log_every,
            valid_every=self.valid_every, save_every=self.save_every,
        )  # fmt: skip
        return told(
            self.steps,
            lambda progress, report, stop: begin(Going(settings, self.held_out, force, progress, report, stop)),
            _show, json=json,
        )  # fmt: skip


def text(
    model: Gguf, data: Data, out: Out, prompts: Prompts = 1000, held_out: HeldOutTexts = 64,
    prompt_tokens: PromptTokens = 32, tokens: Tokens = 128, temperature: Temperature = 1.0, seed: Seed = 0,
    ram: Ram = None, threads: Threads = None, force: ForceTexts = False, json: Json = False,
) -> int:  # fmt: skip
    """Have a model write the texts that recover and onpolicy train on: it continues prompts out of a data folder.

    `sluice batch` writes, many at a time. A run that was ended goes on where it was when the same command comes again.
    """
    from sluice.train.data import Tokens as OpenData
    from sluice.train.teacher_text import Asked, write_teacher_texts
    from sluice.train.texts import Texts

    asked = Asked(prompts, held_out, prompt_tokens, tokens, temperature, seed)
    opened = OpenData(data)
    options = ["--ctx", str(prompt_tokens + tokens)]
    options += [] if ram is None else ["--ram", ram]
    options += [] if threads is None else ["--threads", str(threads)]
    write_teacher_texts(model, opened, out, asked, library=load_ggml(None), options=options, force=force)
    written = Texts(out)
    facts = {
        "path": str(out), "fingerprint": written.fingerprint, "domains": list(written.meta.domains),
        "splits": {split: {"texts": written.n_texts(split), "tokens": written.n_ids(split)}
                   for split in ("train", "valid")},
    }  # fmt: skip
    if json:
        emit(facts)
    else:
        splits = facts["splits"].items()
        rows = [(split, f"{part['texts']:,} texts, {part['tokens']:,} tokens") for split, part in splits]
        print_facts([("folder", str(out)), *rows])
    return 0


@grouped
def prerouter(
    model: Model, data: Data, run: Run, *, weights: MaybeWeights = None, heads: MaybeHeads = None, hidden: Hidden = 128,
    options: RunOptions, force: Force = False, json: Json = False,
) -> int:  # fmt: skip
    """Stage 1: train heads to say what the next layer's router will say of the next token. The model stays as it is.

    RUN/heads.safetensors is what --prerouter takes, and what recover goes on from: text written with these heads alone
    is expected to be worse than after it.
    """
    from sluice.train import staged

    library = load_ggml(None)
    return options.train(
        lambda going: staged.prerouter(
            model, data, run, going, library, weights=weights, heads=heads, hidden=hidden, seed=options.seed
        ),
        force=force, json=json,
    )  # fmt: skip


@grouped
def recover(
    model: Model, texts: ATexts, run: Run, *, weights: Weights, heads: AHeads, rank: Rank = 8,
    targets: Targets = "attention", kl: Kl = 4.0, heads_lr: HeadsRate = 1.0, options: RunOptions, force: Force = False,
    json: Json = False,
) -> int:  # fmt: skip
    """Stage 2: train heads and an adapter together, on predicted routes and quantised weights, on a teacher's texts.

    RUN/heads.safetensors and RUN/adapter.gguf are what --prerouter and --lora take.
    """
    from sluice.train import staged
    from sluice.train.lora import Lora

    lora = Lora(rank, tuple(dict.fromkeys(name.strip() for name in targets.split(",") if name.strip())))
    library = load_ggml(None)
    return options.train(
        lambda going: staged.recover(
            model, texts, run, going, library, weights=weights, heads=heads, lora=lora, kl_weight=kl,
            heads_lr=heads_lr, seed=options.seed,
        ),
        force=force, json=json,
    )  # fmt: skip


@grouped
def onpolicy(
    model: Model, texts: ATexts, run: Run, *, weights: Weights, heads: AHeads, adapter: AnAdapter,
    generate: Generate = 64, temperature: Temperature = 1.0, heads_lr: HeadsRate = 1.0, options: RunOptions,
    force: Force = False, json: Json = False,
) -> int:  # fmt: skip
    """Stage 3: the student continues the texts' prompts, and learns from what its teacher says of each of its tokens.

    RUN/heads.safetensors and RUN/adapter.gguf are what --prerouter and --lora take.
    """
    from sluice.train import staged

    library = load_ggml(None)
    return options.train(
        lambda going: staged.onpolicy(
            model, texts, run, going, library, weights=weights, heads=heads, adapter=adapter, n_tokens=generate,
            temperature=temperature, heads_lr=heads_lr,
        ),
        force=force, json=json,
    )  # fmt: skip


def _show(result: Mapping[str, Any]) -> None:
    valid = result["valid"]
    facts = [("trained", f"{result['steps']} steps in {result['elapsed_s'] / 60:.1f} min, {result['parameters']:,} "
              "numbers")]  # fmt: skip
    facts += [("held out", ", ".join(f"{name} {value:.4f}" for name, value in valid.items() if "." not in name))]
    if layers := {name.partition(".")[2]: value for name, value in valid.items() if name.startswith("recall.")}:
        facts.append(("recall by layer", ", ".join(f"{layer}: {value:.1%}" for layer, value in layers.items())))
    names = {"heads": "heads", "adapter_gguf": "adapter", "adapter": "to go on from"}
    facts += [(said, result[name]) for name, said in names.items() if result[name] is not None]
    print_facts(facts)
