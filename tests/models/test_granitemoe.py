"""Granite MoE: constants that scale embeddings, attention scores, what each layer adds, and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plain_decoder as plain
from family_file import FamilyFile
from family_tests import RefusalTests
from parity import assert_transformers
from plain_decoder import BLOCKS_OF_256, Sizes
from tiny import T


def granitemoe(*, scales: tuple[float, ...] = (0.9, 0.6, 0.15, 0.7), **options: Any) -> tuple[FamilyFile, Sizes]:
    """A file; `scales` of the embeddings, of what a layer adds, of attention's scores (0: none), and the divisor of
    the logits."""
    s = Sizes(**{"n_ff_shared": 64, **options})
    file = plain.begun("granitemoe", s, pre="refact")
    file.metadata({"feed_forward_length": s.n_ff, "expert_shared_feed_forward_length": s.n_ff_shared})
    names = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    file.metadata({name: scale for name, scale in zip(names, scales, strict=True) if scale})
    for layer in range(s.n_layers):
        plain.add_attention(file, f"blk.{layer}.", s)
        plain.add_ffn(file, layer, s)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {
    "all scales": {},
    "one scale, tied, nothing shared": {"scales": (0.0, 0.0, 0.0, 1.5), "tied": True, "n_ff_shared": 0, "n_head_kv": 3},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_ff_shared": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "n_layers": 4},
}  # fmt: skip
OPTIONAL = {"vocab_size", "rope.freq_base", "embedding_scale", "residual_scale", "attention.scale"}


class TestGraniteMoe(RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    GREEDY = FLOAT32["all scales"]

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return granitemoe(**options)[0]

    def small(self) -> FamilyFile:
        return self.make(n_layers=2, n_expert=4, top_k=2)


def halves(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of queries or keys as transformers has them: the halves of a head rotate against each other, not pairs."""
    return w.reshape(-1, head_dim // 2, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = granitemoe()
    model = file.write(tmp_path / "m.gguf")
    weights = dict(model.weights)
    names = {
        "ffn_gate_inp.weight": "block_sparse_moe.router.weight",
        "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
        "shared_in": "shared_mlp.input_linear.weight",
        "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
    }
    for layer in range(s.n_layers):
        block = f"blk.{layer}."
        for part in "qk":
            weights[f"{block}attn_{part}.weight"] = halves(weights[f"{block}attn_{part}.weight"], s.head_dim)
        parts = [weights.pop(f"{block}ffn_{part}_shexp.weight") for part in ("gate", "up")]
        weights[f"{block}shared_in"] = np.concatenate(parts)
    state = plain.transformers_state(weights, s.n_layers, names)
    state = {name.replace("mlp.experts", "block_sparse_moe.experts"): w for name, w in state.items()}
    config = plain.transformers_config(file, s) | {
        "intermediate_size": s.n_ff,
        "shared_intermediate_size": s.n_ff_shared,
        "num_local_experts": s.n_expert,
        "embedding_multiplier": file.keys["embedding_scale"],
        "residual_multiplier": file.keys["residual_scale"],
        "attention_multiplier": file.keys["attention.scale"],
        "logits_scaling": file.keys["logit_scale"],
    }
    assert_transformers(model, "GraniteMoeSharedForCausalLM", config, state)
