"""Parts of a pre-norm decoder that many families have, for their tests: sizes, tensors, transformers' names of both.

Which parts a family has, and what is special about it, its own test says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from family_file import FamilyFile
from tiny import T

ROPE_BASE = 10000.0


@dataclass(frozen=True)
class Sizes:
    """The shape of a tiny model. `n_dense`: layers before the first with experts; `n_more`: blocks that are skipped."""

    n_layers: int = 3
    n_dense: int = 0
    n_more: int = 0
    n_embd: int = 96
    n_head: int = 3
    n_head_kv: int = 1
    head_dim: int = 32
    n_rot: int = 32
    n_expert: int = 7
    top_k: int = 3
    n_ff: int = 32
    n_ff_dense: int = 64
    n_ff_shared: int = 0
    eps: float = 1e-6
    expert_type: T = T.F32
    down_type: T | None = None
    dense_type: T = T.F32
    router_type: T = T.F32
    fused: bool = False
    tied: bool = False
    seed: int = 0

    @property
    def n_blocks(self) -> int:
        return self.n_layers + self.n_more

    def is_moe(self, layer: int) -> bool:
        return layer >= self.n_dense


BLOCKS_OF_256: dict[str, Any] = {"n_embd": 256, "n_ff": 256, "n_ff_dense": 256}


def begun(arch: str, s: Sizes, *, pre: str) -> FamilyFile:
    """A file with the metadata that all have, the embeddings, and every block's two norms left to the caller."""
    file = FamilyFile(arch, pre=pre, seed=s.seed)
    file.metadata(
        {
            "block_count": s.n_blocks,
            "embedding_length": s.n_embd,
            "feed_forward_length": s.n_ff_dense,
            "attention.head_count": s.n_head,
            "attention.head_count_kv": s.n_head_kv,
            "attention.layer_norm_rms_epsilon": s.eps,
            "rope.freq_base": ROPE_BASE,
            "expert_count": s.n_expert,
            "expert_used_count": s.top_k,
        }
    )
    file.embeddings(s.dense_type, s.n_embd, tied=s.tied)
    return file


def add_attention(
    file: FamilyFile, block: str, s: Sizes, *, norms: str | None = None, biases: bool = False, n_head_kv: int = 0
) -> None:
    """A block's attention and the norm before it; `norms` of q and k are of each "head", or of the whole "width"."""
    n_head_kv = n_head_kv or s.n_head_kv
    widths = {"q": s.n_head * s.head_dim, "k": n_head_kv * s.head_dim, "v": n_head_kv * s.head_dim}
    file.norm(f"{block}attn_norm", s.n_embd)
    for part, width in widths.items():
        file.matrix(f"{block}attn_{part}", s.dense_type, width, s.n_embd, gain=1.0 if part == "v" else 1.5)
        if biases:
            file.bias(f"{block}attn_{part}", width)
        if norms and part != "v":
            file.norm(f"{block}attn_{part}_norm", s.head_dim if norms == "head" else width)
    file.matrix(f"{block}attn_output", s.dense_type, s.n_embd, s.n_head * s.head_dim, gain=2.0)


def add_ffn(
    file: FamilyFile, layer: int, s: Sizes, *, norm: str = "ffn_norm", selection_bias: bool = False,
    shared_gate: bool = False,
) -> None:  # fmt: skip
    """A block's router, experts and shared expert, or its dense network, and the norm before it."""
    block, t = f"blk.{layer}.", s.dense_type
    file.norm(block + norm, s.n_embd)
    if not s.is_moe(layer):
        add_swiglu(file, block + "ffn_{}", t, s.n_ff_dense, s.n_embd)
        return
    file.matrix(f"{block}ffn_gate_inp", s.router_type, s.n_expert, s.n_embd, gain=2.0)
    file.experts(block, s.expert_type, s.n_expert, s.n_ff, s.n_embd, down=s.down_type, fused=s.fused)
    if selection_bias:
        file.bias(f"{block}exp_probs_b", s.n_expert)
    if s.n_ff_shared:
        add_swiglu(file, block + "ffn_{}_shexp", t, s.n_ff_shared, s.n_embd)
    if shared_gate:
        values = file.rng.standard_normal(s.n_embd) * 2 * s.n_embd**-0.5
        file.vector(f"{block}ffn_gate_inp_shexp.weight", values)


def add_swiglu(file: FamilyFile, name: str, t: T, n_ff: int, n_embd: int) -> None:
    """A dense network; `name` has a place for gate, up, down."""
    file.matrix(name.format("gate"), t, n_ff, n_embd)
    file.matrix(name.format("up"), t, n_ff, n_embd)
    file.matrix(name.format("down"), t, n_embd, n_ff, gain=2.0)


def add_next_token_parts(file: FamilyFile, block: str, s: Sizes) -> None:
    """What a block for multi-token prediction has beside a layer's parts."""
    file.matrix(f"{block}nextn.eh_proj", s.dense_type, s.n_embd, 2 * s.n_embd)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        file.norm(f"{block}nextn.{name}", s.n_embd)


# --- transformers


def transformers_config(file: FamilyFile, s: Sizes) -> dict[str, Any]:
    """The metadata that all have, by transformers' names."""
    return {
        "vocab_size": file.n_vocab,
        "hidden_size": s.n_embd,
        "intermediate_size": s.n_ff_dense,
        "num_hidden_layers": s.n_layers,
        "num_attention_heads": s.n_head,
        "num_key_value_heads": s.n_head_kv,
        "num_experts_per_tok": s.top_k,
        "rms_norm_eps": s.eps,
        "max_position_embeddings": file.keys["context_length"],
        "tie_word_embeddings": s.tied,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": ROPE_BASE, "partial_rotary_factor": s.n_rot / s.head_dim
        },
    }  # fmt: skip


NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    **{f"attn_{part}.{kind}": f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}


def transformers_state(
    weights: dict[str, np.ndarray], n_layers: int, names: dict[str, str] | None = None
) -> dict[str, np.ndarray]:
    """The weights by transformers' names; `names` of parts of a layer beside NAMES, or other ones."""
    known = NAMES | (names or {})
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    if "output.weight" in weights:
        state["lm_head.weight"] = weights["output.weight"]
    gate_up = {"ffn_gate_exps.weight", "ffn_up_exps.weight"}
    for layer in range(n_layers):
        block, there = f"blk.{layer}.", f"model.layers.{layer}."
        w = {name.removeprefix(block): values for name, values in weights.items() if name.startswith(block)}
        if gate_up <= set(w):
            stacked = np.concatenate([w["ffn_gate_exps.weight"], w["ffn_up_exps.weight"]], axis=1)
            state[f"{there}mlp.experts.gate_up_proj"] = stacked
        state |= {there + known[name]: values for name, values in w.items() if name not in gate_up}
    return state
