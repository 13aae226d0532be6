"""Runs of the three stages: opens models, heads, adapters and text, builds the objective, hands it to the loop.

Knows no loss and no gradient. A run's folder gets the heads, and from stage 2 on the adapter, as PEFT keeps it and as
GGUF for the engine. The model's folder is the teacher; `weights` is the GGUF file, made from it, that is served.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from sluice.errors import InputError
from sluice.ggml import Library
from sluice.models import family_of as served_family
from sluice.models.fingerprint import fingerprint as served_fingerprint
from sluice.routing.prerouter_file import PrerouterInfo
from sluice.routing.prerouter_init import HIDDEN
from sluice.train import processes
from sluice.train.adapter_out import export_adapter
from sluice.train.data import Batches, Tokens
from sluice.train.experts import use_fast_experts
from sluice.train.heads import Heads
from sluice.train.loop import Progress, Report, Stop, fit
from sluice.train.lora import Lora, add_lora, digest, open_lora
from sluice.train.objective import Objective
from sluice.train.onpolicy import OnPolicy
from sluice.train.opening import dequantise, open_model
from sluice.train.prerouter import ImitateRouters
from sluice.train.pretrain import held_out as held_out_rows
from sluice.train.pretrain import identity, opened
from sluice.train.recover import Recover, Served
from sluice.train.settings import Settings
from sluice.train.sharding import placed
from sluice.train.shards import sha256
from sluice.train.stages import ADAPTER, ADAPTER_GGUF, HEADS, check_order
from sluice.train.texts import TextBatches, Texts, held_out
from sluice.train.tokenizer import fingerprint, open_tokenizer


@dataclass(frozen=True)
class Going:
    """How a run goes, and what it tells while it does: its settings, how much is held out, the loop's callbacks.

    `held_out` are rows of each domain (stage 1) or texts (2 and 3). `force` lets stages come in any order.
    """

    settings: Settings
    held_out: int = 16
    force: bool = False
    progress: Progress | None = None
    report: Report | None = None
    stop: Stop = lambda: False


def prerouter(
    model: Path, data: Path, out: Path, going: Going, library: Library, *, weights: Path | None = None,
    heads: Path | None = None, hidden: int = HIDDEN, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Stage 1 on a data folder, from the heads in a file or from untrained ones of width `hidden`.

    With `weights` heads learn on that file's hidden states, which are what they will be served on. Returns what `fit`
    does, with the files that were written. Raises InputError for what doesn't belong together.
    """
    here, settings = processes.place(), going.settings
    tokens = Tokens(data, check=here.first)
    whole = opened(model, tokens)
    if heads is not None:
        learning = Heads.open(heads)
        learning.check_model(whole, str(model))
        check_order("prerouter", learning, heads, force=going.force)
    else:
        learning = Heads.untrained(whole, hidden=hidden, seed=seed, name=model.resolve().name)
    if weights is not None:
        learning.info = _quantise(whole, model, weights, library, learning)
    recipe = {
        "stage": "prerouter", "train": asdict(settings), "model": identity(model), "data": tokens.fingerprint,
        "weights": _hash_of(weights, library), "heads": None if heads is None else sha256(heads), "hidden": hidden,
        "heads_seed": seed,
    }  # fmt: skip
    batches = Batches(tokens, "train", settings.batch, settings.length, settings.seed, rank=here.rank, world=here.world)
    whole = placed(whole.requires_grad_(False))
    use_fast_experts(whole)
    objective = ImitateRouters(
        whole, learning.to(here.device), held_out_rows(tokens, settings.length, going.held_out), recipe
    )  # fmt: skip
    return _fit(objective, batches, out, going, recipe)


def recover(
    model: Path, texts: Path, out: Path, going: Going, library: Library, *, weights: Path, heads: Path, lora: Lora,
    kl_weight: float = 0.0, heads_lr: float = 1.0, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Stage 2 on a folder of a teacher's texts, with heads of stage 1 and a new adapter. As `prerouter` otherwise."""
    opening = _Opening("recover", model, texts, weights, heads, going, library)
    add_lora(opening.base, lora, seed)
    recipe = {**opening.recipe, "lora": asdict(lora), "kl_weight": kl_weight, "heads_lr": heads_lr, "seed": seed}
    objective = Recover(opening.served(heads_lr, recipe), kl_weight)
    return _fit(objective, opening.batches(), out, going, recipe)


def onpolicy(
    model: Path, texts: Path, out: Path, going: Going, library: Library, *, weights: Path, heads: Path, adapter: Path,
    n_tokens: int, temperature: float = 1.0, heads_lr: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Stage 3 on the prompts of a folder of texts, with the heads and adapter of stage 2. As `prerouter` otherwise."""
    if processes.place().split:
        raise InputError("onpolicy can't split weights, as its processes write texts of different lengths: start it "
                         "without --use_fsdp")  # fmt: skip
    opening = _Opening("onpolicy", model, texts, weights, heads, going, library)
    _, factors = open_lora(opening.base, adapter)
    said = opening.heads.info.training.get("recover")
    wanted = said.get("adapter") if isinstance(said, dict) else None
    if wanted != digest(factors) and not going.force:
        raise InputError(f"{adapter}: is not the adapter that the heads in {heads} were trained beside: name the one "
                         "in the same run's folder, or --force")  # fmt: skip
    recipe = {
        **opening.recipe, "adapter": digest(factors), "n_tokens": n_tokens, "temperature": temperature,
        "heads_lr": heads_lr,
    }  # fmt: skip
    objective = OnPolicy(
        opening.served(heads_lr, recipe), n_tokens, opening.texts.meta.end, temperature=temperature,
        seed=going.settings.seed,
    )  # fmt: skip
    return _fit(objective, opening.batches(), out, going, recipe)


class _Opening:
    """What stages 2 and 3 open alike, each thing checked against the others."""

    def __init__(
        self, stage: str, model: Path, texts: Path, weights: Path, heads: Path, going: Going, library: Library
    ) -> None:
        self.settings, self.going, self.weights, self.library = going.settings, going, weights, library
        self.texts = Texts(texts)
        if fingerprint(open_tokenizer(model)) != self.texts.meta.tokenizer:
            raise InputError(f"{texts}: its texts are of another tokenizer than {model} has: have this model's teacher "
                             "write them")  # fmt: skip
        self.heads = Heads.open(heads)
        check_order(stage, self.heads, heads, force=going.force)
        self.teacher = open_model(model)
        self.heads.check_model(self.teacher, str(model))
        self.base = open_model(model)
        self.heads.info = _quantise(self.base, model, weights, library, self.heads)
        self.teacher = placed(self.teacher.requires_grad_(False))
        use_fast_experts(self.teacher)
        self.recipe: dict[str, Any] = {
            "stage": stage, "train": asdict(going.settings), "model": identity(model), "texts": self.texts.fingerprint,
            "weights": _hash_of(weights, library), "heads": sha256(heads),
        }  # fmt: skip

    def served(self, heads_lr: float, facts: Mapping[str, Any]) -> Served:
        """What the objective takes, once the adapter is put in."""
        here, settings = processes.place(), self.settings

        def export(adapted: nn.Module, folder: Path) -> None:
            export_adapter(adapted, self.weights, folder / ADAPTER_GGUF, self.library, force=True)

        batch = max(1, settings.batch // here.world)
        base = placed(self.base, [one for one in self.base.parameters() if one.requires_grad])
        use_fast_experts(base)
        return Served(
            model=base, heads=self.heads.to(here.device), teacher=self.teacher,
            held_out=held_out(self.texts, self.going.held_out, batch, settings.length), heads_lr=heads_lr, facts=facts,
            export=export,
        )  # fmt: skip

    def batches(self) -> TextBatches:
        here, settings = processes.place(), self.settings
        return TextBatches(
            self.texts, "train", settings.batch, settings.length, settings.seed, rank=here.rank, world=here.world
        )  # fmt: skip


def _quantise(whole: nn.Module, model: Path, weights: Path, library: Library, heads: Heads) -> PrerouterInfo:
    """Give `whole`, the model in `model`, the numbers that `weights` dequantise to.

    Returns what `heads`, which are for it, then say of themselves: the file's own fingerprint, by which the engine
    knows them. Raises InputError for another model's file.
    """
    stored = dequantise(whole, model, weights, library)
    spec = served_family(stored.file).read_spec(stored.file)
    name = stored.file.metadata.get("general.name")
    return replace(
        heads.info, fingerprint=served_fingerprint(stored.file, spec), name=name if isinstance(name, str) else ""
    )  # fmt: skip


def _hash_of(weights: Path | None, library: Library) -> str | None:
    """A sha256 of all of a GGUF file's shards."""
    if weights is None:
        return None
    from sluice.gguf import open_gguf

    digests = [sha256(path) for path in open_gguf(weights, library).paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _fit(objective: Objective, batches: Any, out: Path, going: Going, recipe: Mapping[str, Any]) -> dict[str, Any]:
    result = fit(
        objective, batches, going.settings, out, recipe=recipe, progress=going.progress, report=going.report,
        stop=going.stop,
    )  # fmt: skip
    files = {"heads": out / HEADS, "adapter": out / ADAPTER, "adapter_gguf": out / ADAPTER_GGUF}
    return {**result, **{name: str(path) if path.exists() else None for name, path in files.items()}}
