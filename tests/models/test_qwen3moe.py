"""Qwen3 MoE: norms of each head of queries and keys, weights normalised over the chosen.

More of it (yarn, tied embeddings, dense layers, mixed types, budgets) is in tests/engine, whose model it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import plain_decoder as plain
from family_file import FamilyFile
from family_tests import Options, RefusalTests
from parity import assert_transformers
from plain_decoder import BLOCKS_OF_256, Sizes
from tiny import T


def qwen3moe(**options: Any) -> tuple[FamilyFile, Sizes]:
    s = Sizes(**options)
    file = plain.begun("qwen3moe", s, pre="qwen2")
    file.metadata({"attention.key_length": s.head_dim, "attention.value_length": s.head_dim})
    file.metadata({"expert_feed_forward_length": s.n_ff})
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s, norms="head")
        plain.add_ffn(file, layer, s)
    return file, s


QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.Q8_0, "router_type": T.BF16},
}


class TestQwen3Moe(RefusalTests):
    QUANTISED = QUANTISED
    FLOAT32: ClassVar[dict[str, Options]] = {"one head of keys": {}}
    AFRESH = "MXFP4"
    OPTIONAL = frozenset(
        {
            "vocab_size", "rope.freq_base", "feed_forward_length", "expert_feed_forward_length",
            "attention.key_length", "attention.value_length",
        }
    )  # fmt: skip

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return qwen3moe(**options)[0]

    def small(self) -> FamilyFile:
        return self.make(n_layers=2, n_expert=4, top_k=2)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = qwen3moe()
    model = file.write(tmp_path / "m.gguf")
    config = plain.transformers_config(file, s) | {
        "head_dim": s.head_dim, "num_experts": s.n_expert, "moe_intermediate_size": s.n_ff, "norm_topk_prob": True
    }  # fmt: skip
    state = plain.transformers_state(model.weights, s.n_layers)
    assert_transformers(model, "Qwen3MoeForCausalLM", config, state)
