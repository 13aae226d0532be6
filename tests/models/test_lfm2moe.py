"""LFM2 MoE: short convolutions beside attention, dense layers first, a bias that moves the choice of experts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import plain_decoder as plain
from family_file import FamilyFile
from family_tests import LongContextTests, Options, RefusalTests
from parity import assert_transformers
from plain_decoder import BLOCKS_OF_256, Sizes
from tiny import T


def lfm2moe(*, convolves: str = "CCAC", kernel: int = 3, **options: Any) -> tuple[FamilyFile, Sizes]:
    """A file with a layer for each letter of `convolves`: a C convolves, an A attends."""
    s = Sizes(**{"n_layers": len(convolves), "n_dense": 1, "eps": 1e-5, "tied": True, **options})
    file = plain.begun("lfm2moe", s, pre="lfm2")
    file.stored["token_embd_norm.weight"] = file.stored.pop("output_norm.weight")
    file.metadata(
        {
            "attention.head_count_kv": [s.n_head_kv * (kind == "A") for kind in convolves],
            "shortconv.l_cache": kernel,
            "expert_feed_forward_length": s.n_ff,
            "expert_gating_func": 2,
            "leading_dense_block_count": s.n_dense,
        }
    )
    for layer, kind in enumerate(convolves):
        block = f"blk.{layer}."
        if kind == "A":
            plain.add_attention(file, block, s, norms="head")
        else:
            file.norm(f"{block}attn_norm", s.n_embd)
            file.matrix(f"{block}shortconv.in_proj", s.dense_type, 3 * s.n_embd, s.n_embd)
            # [channels, taps]: each tap counts, the newest no more than the others
            file.vector(f"{block}shortconv.conv.weight", 0.7 * file.rng.standard_normal((s.n_embd, kernel)))
            file.matrix(f"{block}shortconv.out_proj", s.dense_type, s.n_embd, s.n_embd)
        plain.add_ffn(file, layer, s, selection_bias=True)
    return file, s


FLOAT32: dict[str, dict[str, Any]] = {
    "one layer attends": {},
    "experts in every layer, a head of its own": {"n_dense": 0, "tied": False, "convolves": "AC"},
    "kernel of 4, attention last": {"kernel": 4, "convolves": "CACCA", "n_dense": 2, "n_head_kv": 3},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "Q4_K": {**BLOCKS_OF_256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
             "expert_type": T.Q4_K, "down_type": T.Q6_K, "dense_type": T.Q8_0},
    "Q8_0": {"expert_type": T.Q8_0, "dense_type": T.Q8_0, "router_type": T.BF16},
    "MXFP4": {"expert_type": T.MXFP4, "dense_type": T.F16, "convolves": "CCACA"},
}  # fmt: skip
OPTIONAL = {
    "vocab_size", "rope.freq_base", "expert_feed_forward_length", "leading_dense_block_count"
}  # fmt: skip


class TestLfm2Moe(LongContextTests, RefusalTests):
    FLOAT32, QUANTISED = FLOAT32, QUANTISED
    OPTIONAL = OPTIONAL
    GREEDY = FLOAT32["one layer attends"]
    LONG: ClassVar[Options] = {"convolves": "CA"}

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        return lfm2moe(**options)[0]

    def small(self) -> FamilyFile:
        return self.make(convolves="CA", n_expert=4, top_k=2, tied=False)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    file, s = lfm2moe()
    model = file.write(tmp_path / "m.gguf")
    there = {"gate": "w1", "up": "w3", "down": "w2"}
    names = {
        "attn_norm.weight": "operator_norm.weight",
        "attn_output.weight": "self_attn.out_proj.weight",
        **{f"attn_{part}_norm.weight": f"self_attn.{part}_layernorm.weight" for part in "qk"},
        **{f"shortconv.{part}.weight": f"conv.{part}.weight" for part in ("conv", "in_proj", "out_proj")},
        "ffn_norm.weight": "ffn_norm.weight",
        **{f"ffn_{part}.weight": f"feed_forward.{name}.weight" for part, name in there.items()},
        "exp_probs_b.bias": "mlp.expert_bias",
    }
    weights = {name: w[:, None] if name.endswith("conv.weight") else w for name, w in model.weights.items()}
    weights["output_norm.weight"] = weights.pop("token_embd_norm.weight")
    state = plain.transformers_state(weights, s.n_layers, names)
    state["model.embedding_norm.weight"] = state.pop("model.norm.weight")
    state = {name.replace(".mlp.", ".feed_forward."): w for name, w in state.items()}
    kinds = ["full_attention" if n else "conv" for n in file.keys["attention.head_count_kv"]]
    config = plain.transformers_config(file, s) | {
        "layer_types": kinds,
        "norm_eps": s.eps,
        "conv_L_cache": file.keys["shortconv.l_cache"],
        "num_experts": s.n_expert,
        "num_dense_layers": s.n_dense,
        "moe_intermediate_size": s.n_ff,
    }
    assert_transformers(model, "Lfm2MoeForCausalLM", config, state)
