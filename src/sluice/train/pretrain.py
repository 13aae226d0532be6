"""Runs that train a whole model, from a recipe: opens data and models, builds the objective, hands it to the loop.

Knows no loss and no gradient.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from sluice.config import format_size
from sluice.errors import InputError, words_of
from sluice.memory import free_bytes
from sluice.train import processes
from sluice.train.checkpoint import step_of
from sluice.train.data import Batches, Tokens
from sluice.train.experts import use_fast_experts
from sluice.train.families import FAMILIES, config_of, family_of
from sluice.train.hf_config import NORMALISES, read_config
from sluice.train.language import LanguageModel, n_experts
from sluice.train.locality import terms
from sluice.train.loop import Progress, Report, Stop, fit
from sluice.train.opening import open_model, without_bars
from sluice.train.recipe import Recipe
from sluice.train.sharding import joined_state, placed
from sluice.train.tokenizer import open_tokenizer

VALID_SEED = 0  # held-out rows are the same ones for every run on the same data
VALID_BATCH = 8
MAX_LAYERS = 4096
BYTES_A_PARAMETER = 16  # its weight, its gradient and two of AdamW's numbers, float32
UNDECLARED = ("head_dim",)  # what models read of a configuration that its class does not declare
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def pretrain(
    data: Path, out: Path, recipe: Recipe, *, start: Path | None = None, teacher: Path | None = None,
    branch: Path | None = None, progress: Progress | None = None, report: Report | None = None,
    stop: Stop = lambda: False,
) -> dict[str, Any]:  # fmt: skip
    """Train a model on the data folder `data`, from the one in `start` or from scratch, into the run's folder `out`.

    `branch` is a checkpoint of another run on the same data, batches and model: its weights, optimizer and place in the
    text are gone on from, by this recipe, whatever that run's was. Where both do the same until then, the run has the
    weights of one that was not branched off, bit for bit.

    Returns what `fit` does, with the model's folder as `model`. Goes on where an interrupted run of the same recipe and
    data stopped. Raises InputError for what doesn't go together, DivergedError, Stopped.
    """
    here, settings = processes.place(), recipe.train
    if branch is not None:
        step_of(branch)
        if start is not None:
            raise InputError("a model to start from and a checkpoint to branch off are given: leave out one of them")
    if recipe.locality.learns == "routers" and here.split:
        raise InputError('locality.learns is "routers", which split weights can\'t have: use one process, or "all"')
    tokens = Tokens(data, check=here.first)
    batches = Batches(
        tokens, "train", settings.batch, settings.length, settings.seed, weights=dict(recipe.data.weights) or None,
        rank=here.rank, world=here.world,
    )  # fmt: skip
    if start is not None and recipe.model:
        raise InputError("a model is given to start from and the recipe has a [model]: leave out one of them")
    model = fresh(recipe.model, tokens, settings.seed) if start is None else opened(start, tokens)
    model = placed(model)
    use_fast_experts(model)
    guide = None if teacher is None else placed(opened(teacher, tokens))
    if guide is not None:
        use_fast_experts(guide)
        if config_of(guide).vocab_size != config_of(model).vocab_size:
            raise InputError(f"{teacher}: has another vocabulary than the model: give a teacher of the same tokenizer")
    more = terms(recipe, n_experts(model), len(tokens.domains), guide)
    objective = LanguageModel(
        model, recipe.balance, held_out(tokens, settings.length, recipe.data.valid_rows), tokens.domains,
        saver(tokens.folder if start is None else start), more,
    )  # fmt: skip
    if recipe.locality.reroute and recipe.locality.keep >= objective.top_k:
        raise InputError(f"locality.keep is {recipe.locality.keep} and a token takes {objective.top_k} experts, so "
                         "nothing would be rerouted: give fewer, or leave reroute out")  # fmt: skip
    asked = {
        **recipe.as_dict(),
        "data_fingerprint": tokens.fingerprint,
        "start": None if start is None else identity(start),
        "teacher": None if teacher is None else identity(teacher),
        **({} if branch is None else {"branch": {"step": step_of(branch), "weights": identity(branch)}}),
    }
    result = fit(
        objective, batches, settings, out, recipe=asked, branch=branch, progress=progress, report=report, stop=stop
    )
    return {**result, "model": str(out / "model")}


def fresh(asked: Mapping[str, Any], tokens: Tokens, seed: int) -> nn.Module:
    """An untrained model of a recipe's [model], float32, for the data's tokens. Raises InputError.

    A model that could not be exported is refused before it is trained, and routing weights are by default normalised
    where GGUF's architecture does that.
    """
    numbers = dict(asked)
    name = numbers.pop("family", None)
    if name not in FAMILIES:
        said = "missing" if name is None else f"{name!r}, which is unknown"
        raise InputError(f"model.family is {said}: choose from {', '.join(FAMILIES)}, or give a model to start from")
    kind = "qwen3_5_moe_text" if name == "qwen3_5_moe" else name
    known = AutoConfig.for_model(kind)
    own = {"vocab_size": tokens.n_vocab, "bos_token_id": tokens.end, "eos_token_id": tokens.end, "pad_token_id": None}
    for key in numbers:
        if key in own:
            raise InputError(f"model.{key} is the data's to say: leave it out")
        if not (hasattr(known, key) or key in UNDECLARED) or key.startswith("_"):
            raise InputError(f"model.{key} is unknown: {type(known).__name__} has no such number")
    if isinstance(n_layers := numbers.get("num_hidden_layers"), int) and n_layers > MAX_LAYERS:
        raise InputError(f"model.num_hidden_layers is {n_layers}: give at most {MAX_LAYERS}")
    if name in NORMALISES:
        numbers.setdefault("norm_topk_prob", NORMALISES[name])
    torch.manual_seed(seed)
    try:
        config = AutoConfig.for_model(kind, **numbers, **own)
        _check_size(config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        n, k = n_experts(model), family_of(model).top_k(config_of(model))
        if not 1 <= k <= n:
            raise InputError(f"[model] gives a token {k} of {n} experts: give at least 1, and no more than there are")
        with torch.no_grad():  # some numbers that don't go together are first missed in a pass
            logits = model.eval()(input_ids=torch.full((1, 2), tokens.end), use_cache=False).logits
        if not torch.isfinite(logits).all():
            raise InputError("[model] can't be trained (its first numbers are not finite): correct its numbers")
        read_config(config.to_dict(), "[model]")
    except InputError:
        raise
    except Exception as error:  # transformers checks some numbers by exceptions of its own, and others not at all
        raise InputError(f"[model] can't be built ({words_of(error)}): correct its numbers") from None
    return model


def _check_size(config: Any) -> None:
    """Raise InputError for a configuration whose training would not fit in this machine's free memory."""
    with torch.device("meta"):
        n = sum(one.numel() for one in AutoModelForCausalLM.from_config(config, dtype=torch.float32).parameters())
    free = free_bytes()
    if (takes := n * BYTES_A_PARAMETER) > free:
        raise InputError(f"[model] has {n:,} parameters, whose training takes {format_size(takes)}, and "
                         f"{format_size(free)} of memory are free: give it fewer")  # fmt: skip


def opened(path: Path, tokens: Tokens) -> nn.Module:
    """The model in a folder, whose tokenizer must be the data's. Raises InputError."""
    tokens.check_tokenizer(open_tokenizer(path), str(path))
    return open_model(path)


def held_out(tokens: Tokens, length: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Batches (ids [B, length + 1], domain [B]) of held-out text: `rows` rows of each domain, or as many as it has."""
    found: list[tuple[Tensor, Tensor]] = []
    for domain in tokens.domains:
        n = min(rows, max(1, (tokens.shard(domain, "valid").tokens - 1) // length))
        batches = Batches(tokens, "valid", 1, length, VALID_SEED, domains=[domain])
        some = [batches.next() for _ in range(n)]
        for first in range(0, n, VALID_BATCH):
            ids, whose = zip(*some[first : first + VALID_BATCH], strict=True)
            found.append((torch.cat([torch.from_numpy(one) for one in ids]), torch.tensor([int(d[0]) for d in whose])))
    return found


def saver(tokenizer: Path) -> Callable[[nn.Module, Path], None]:
    """Writes a model's folder, with the tokenizer's files of another. All processes call it, and the first writes."""

    def save(model: nn.Module, folder: Path) -> None:
        numbers = joined_state(model)
        if not processes.place().first:
            return
        with without_bars():
            model.save_pretrained(folder, state_dict=numbers)  # type: ignore[operator]  # transformers' models have it
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)

    return save


def identity(folder: Path) -> str:
    """A hash that says which model a folder holds: of its configuration and weights. Raises InputError for no model."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    if not files:
        raise InputError(f"{folder}: is no model's folder: name one that holds config.json and model.safetensors")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as one:
            digest.update(hashlib.file_digest(one, "sha256").digest())
    return digest.hexdigest()
