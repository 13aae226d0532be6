"""Tiny models, heads and texts for tests of the three stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_moe import VOCAB, tiny_model
from torch import nn

from sluice.train.heads import Heads
from sluice.train.settings import Settings
from sluice.train.texts import Text, Texts, write_texts

END = 0


def quantised(model: nn.Module, noise: float = 0.02) -> nn.Module:
    """A copy of a tiny qwen3_moe with other weights nearby, routers apart."""
    other = tiny_model()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if not name.endswith("mlp.gate.weight"):
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return other


def settings(**changed: Any) -> Settings:
    return Settings(**({"steps": 30, "batch": 4, "length": 16, "lr": 1e-2, "log_every": 5, "save_every": 15,
                        "valid_every": 15, "dtype": "float32", "weight_decay": 0.0} | changed))  # fmt: skip


def some_texts(seed: int, n: int = 24, n_prompt: int = 4, vocab: int = VOCAB) -> list[Text]:
    """Texts that count upwards by a step which their prompt shows: something to learn. Prompts differ in length."""
    rng = np.random.default_rng(seed)
    texts = []
    for i in range(n):
        first, step, length = rng.integers(1, vocab), rng.integers(1, 4), int(rng.integers(10, 20))
        ids = 1 + (first + step * np.arange(length)) % (vocab - 1)
        texts.append(Text(ids.astype(np.int64), n_prompt + i % 2, i % 2))
    return texts


def text_folder(folder: Path, **more: Any) -> Texts:
    folder.mkdir(exist_ok=True)
    write_texts(folder, {"train": some_texts(1, **more), "valid": some_texts(2, 6, **more)}, n_vocab=VOCAB, end=END,
                tokenizer="t" * 64, domains=["a", "b"], teacher={"model": "m"})  # fmt: skip
    return Texts(folder)


def imitating(model: nn.Module) -> Heads:
    """Heads as stage 1 leaves them, for the test's purpose."""
    heads = Heads.untrained(model, hidden=8)
    heads.info.training["stages"].append("prerouter")
    return heads


class Rows:
    """Batches of rows that count upwards, for stage 1."""

    def __init__(self, batch: int = 4, length: int = 16) -> None:
        self.batch, self.length, self.given = batch, length, 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng(self.given)
        self.given += 1
        first, step = rng.integers(0, VOCAB, (self.batch, 1)), rng.integers(1, 4, (self.batch, 1))
        return torch.from_numpy((first + step * np.arange(self.length)) % VOCAB), torch.zeros(self.batch)

    def state(self) -> dict[str, Any]:
        return {"given": self.given}

    def restore(self, state: Any) -> None:
        self.given = state["given"]
