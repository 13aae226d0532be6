"""Opens models that transformers saved, refused by name where they can't be trained or measured. Knows no data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from sluice.errors import InputError, words_of
from sluice.ggml import Library
from sluice.train.families import family_of
from sluice.train.gguf_in import GgufWeights


def open_model(path: Path) -> nn.Module:
    """The model in a folder, float32, on the CPU, in evaluation mode; its files are safetensors, and no code is run.

    Raises InputError for what is no such folder, a family that isn't known, and weights that are missing or not finite.
    """
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: no model's folder (it has no config.json): name one that transformers saved")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: its config.json can't be used ({words_of(error)}): save the model again") from None
    family_of(config)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
                use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(f"{path}: its weights can't be read ({words_of(error)}): save the model again") from None
    model, report = loaded
    if missing := report["missing_keys"]:
        raise InputError(f"{path}: its files lack {min(missing)}: the model is incomplete, save it again")
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise InputError(f"{path}: {name} has numbers that are not finite: its training diverged, use another")
    return model.eval()


def dequantise(model: nn.Module, folder: Path, weights: Path, library: Library) -> GgufWeights:
    """Give `model`, which `folder` holds, the numbers that `weights`, a GGUF file made from it, dequantise to.

    Raises InputError for another model's file, also where that has the same shape: its routers tell.
    """
    stored = GgufWeights(weights, json.loads((folder / "config.json").read_bytes()), library)
    before = router_weights(model)
    stored.load_into(model)
    check_routers(model, before, weights)
    return stored


def router_weights(model: nn.Module) -> dict[int, Tensor]:
    """Copies of the routers' weights by layer, to hold another file's against."""
    routers = family_of(model).routers(model)
    return {layer: router.weight.detach().float().clone() for layer, router in routers.items()}  # type: ignore[union-attr]


def check_routers(model: nn.Module, before: Mapping[int, Tensor], path: str | Path) -> None:
    """Raise InputError unless the routers of `model`, now as `path` has them, are those of `before`, rounded or not."""
    for layer, weight in router_weights(model).items():
        whole = before[layer]
        rounded = (whole.to(dtype).float() for dtype in (torch.float32, torch.bfloat16, torch.float16))
        if not any(torch.equal(weight, each) for each in rounded):
            raise InputError(f"{path}: holds another model of the same shape: layer {layer}'s router has other "
                             "weights: name a file that was made from this model")  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from reporting on stderr what is said as an error here, and from its progress bars."""
    level = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        with without_bars():
            yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def without_bars() -> Iterator[None]:
    """Keeps transformers from showing progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
