"""A toy model, toy texts and data of toy text, for tests of what is measured."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sluice.train.data import prepare
from sluice.train.passages import Passage

CODE = "def return import for in while if else self class print value index range"
PROSE = "the river moved slowly past a quiet house where she waited all evening"
WORDS = {"code": CODE.split(" "), "prose": PROSE.split(" ")}

MODEL = {  # a recipe's section
    "family": "qwen3_moe", "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": True,
}  # fmt: skip


def toy_model(*, vocab: int = 300, seed: int = 0, layers: int = 3, **more: Any) -> Qwen3MoeForCausalLM:
    """8 experts, 2 a token; weights far enough from 0 that routes differ from token to token."""
    torch.manual_seed(seed)
    numbers: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 256,
        "initializer_range": 0.3, "tie_word_embeddings": True, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(numbers | more))).eval()


def toy_texts(lengths: list[tuple[str, int]], *, vocab: int = 300, seed: int = 0) -> list[Passage]:
    """Passages of random ids."""
    rng = np.random.default_rng(seed)
    return [Passage(domain, "", rng.integers(1, vocab, n)) for domain, n in lengths]


def write_documents(folder: Path, documents: int = 40, words: int = 120) -> dict[str, Path]:
    """A .jsonl file of documents for each domain of WORDS."""
    files: dict[str, Path] = {}
    for domain, vocabulary in WORDS.items():
        draw = random.Random(domain)
        texts = [" ".join(draw.choices(vocabulary, k=words)) for _ in range(documents)]
        files[domain] = folder / f"{domain}.jsonl"
        files[domain].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


def toy_data(folder: Path, **more: Any) -> Path:
    """A data folder of such documents, with a vocabulary of 300."""
    files = write_documents(folder)
    prepare(folder / "data", {name: [path] for name, path in files.items()}, vocab=300, **more)
    return folder / "data"
