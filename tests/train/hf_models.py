"""Random models of every family that is exported, as Hugging Face directories with a tokenizer; knows no GGUF."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sluice.train.tokenizer import save_tokenizer, train_tokenizer

N_TOKENS, N_VOCAB = 300, 320  # tokens, and rows of embeddings
TEXTS = ("def add(a, b):\n    return a + b\n", "The quick brown fox jumps over the lazy dog, 42 times.", "x = 1\n\n\ny")
_COMMON: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_SHARED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 160, "head_dim": 32,
                  "norm_topk_prob": True, "rms_norm_eps": 1e-6},
    "qwen2_moe": {"num_experts": 6, "intermediate_size": 160, **_SHARED},
    "olmoe": {"num_experts": 6, "intermediate_size": 32, "num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 6, "intermediate_size": 32},
    "qwen3_5_moe": {"num_experts": 6, "head_dim": 64, **_SHARED, "num_hidden_layers": 4,
                    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
                    "linear_num_value_heads": 6},
}  # fmt: skip
FAMILY_NAMES = tuple(_OWN)


def random_model(family: str, seed: int = 0, **changed: Any) -> Any:
    """A model in float32 whose every tensor is random: norms around 1, biases and decays too."""
    name = "qwen3_5_moe_text" if family == "qwen3_5_moe" else family
    config = AutoConfig.for_model(name, **{**_COMMON, **_OWN[family], **changed})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, values in model.named_parameters():
            noise = torch.randn(values.shape, generator=draw)
            if values.ndim > 1:
                values.copy_(noise * (0.3 if "embed" in key else 1.5 * values.shape[-1] ** -0.5))
            elif key.endswith("A_log"):
                values.copy_(noise.abs())
            else:  # qwen3_5_moe's norms are added to 1
                centre = 1.0 if "norm" in key and (family != "qwen3_5_moe" or "linear_attn" in key) else 0.0
                values.copy_(noise * 0.2 + centre)
    return model.eval()


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    """A directory with `model` as transformers saves it, and a tokenizer of N_TOKENS."""
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder, **options)
    save_tokenizer(train_tokenizer([text * 3 for text in TEXTS], N_TOKENS), folder)
    return folder


def logits_of(model: Any, ids: list[int]) -> Any:
    """numpy [n_ids, n_vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().numpy()


SPOILT = (None, True, -1, 0, 1, 3, 2.5, 1e300, 10**30, float("nan"), "", "x", [], [1], [None], [[]], {}, {"a": 1})


def spoilt(value: Any, rng: random.Random) -> Any:
    """A copy of parsed JSON of which one to three values, at any depth, are missing or another kind of value."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if places:
            inside, key = rng.choice(places)
            if rng.random() < 0.3:
                del inside[key]
            else:
                inside[key] = copy.deepcopy(rng.choice(SPOILT))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    listed = range(min(len(value), 10)) if isinstance(value, list) else ()
    for key in list(value)[:60] if isinstance(value, dict) else listed:
        yield value, key
        yield from _places(value[key])
