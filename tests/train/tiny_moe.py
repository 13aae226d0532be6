"""Models of every family that is trained, small enough for tests; knows none of what is trained about them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, WIDTH, EXPERTS, TOP_K = 64, 32, 8, 2
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # so that routes and tokens differ
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 16, "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "qwen2_moe": {
        "num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "norm_topk_prob": False,
    },
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": 16, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 16},
    "qwen3_5_moe": {
        "num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
}  # fmt: skip
FAMILY_NAMES = tuple(_OWN)


def tiny_model(family: str = "qwen3_moe", *, seed: int = 0, **changed: Any) -> nn.Module:
    """A model of the family with random weights, in float32, ready to be run on ids below VOCAB."""
    name = "qwen3_5_moe_text" if family == "qwen3_5_moe" else family
    config = AutoConfig.for_model(name, **{**_COMMON, **_OWN[family], **changed})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Ids for a tiny model."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
