"""Opens models that transformers saved, refused by name where they can't be trained or measured. Knows no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from sluice.errors import InputError
from sluice.train.families import family_of


def open_model(path: Path) -> nn.Module:
    """The model in a folder, float32, on the CPU, in evaluation mode; its files are safetensors, and no code is run.

    Raises InputError for what is no such folder, a family that isn't known, and weights that are missing or not finite.
    """
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: no model's folder (it has no config.json): name one that transformers saved")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: its config.json can't be used ({_line(error)}): save the model again") from None
    family_of(config)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
                use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(f"{path}: its weights can't be read ({_line(error)}): save the model again") from None
    model, report = loaded
    if missing := report["missing_keys"]:
        raise InputError(f"{path}: its files lack {min(missing)}: the model is incomplete, save it again")
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise InputError(f"{path}: {name} has numbers that are not finite: its training diverged, use another")
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from reporting on stderr what is said as an error here, and from its progress bars."""
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
