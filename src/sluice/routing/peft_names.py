"""Which GGUF matrices a module of transformers' model became, and in what order their rows and columns lie there.

Converting to GGUF renames modules, cuts some in two, and for some families reorders rows: what it does to a matrix
W has to be done to the rows of B and the columns of A where W's update is B A. It knows no files.
Source: gguf-py/gguf/tensor_mapping.py and conversion/ in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import partial

import numpy as np

from sluice.models.spec import DeltaNetSpec, ModelSpec
from sluice.routing.linears import expert_name

_BEFORE = ("", "model.", "model.language_model.", "language_model.model.", "language_model.")
_LAYER = re.compile(r"([a-z_.]*)layers\.(0|[1-9][0-9]{0,4})\.([A-Za-z0-9_.]{1,200})")
_EXPERT = re.compile(r"(?:[a-z_]+\.)?experts\.(0|[1-9][0-9]{0,5})\.([a-z0-9_]+)")
_FUSED = re.compile(r"(?:[a-z_]+\.)?experts(?:\.base_layer){0,3}")
_ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}

# By the end of a module's name behind `layers.N.`; other families' names for the same are made these first.
_SAME = {
    **{f"self_attn.{m}_proj": f"attn_{m}" for m in ("q", "k", "v", "q_a", "q_b")},
    "self_attn.o_proj": "attn_output",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.query_key_value": "attn_qkv",
    "self_attn.f_proj": "ssm_f_a",
    "self_attn.b_proj": "ssm_beta",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.out_proj": "ssm_out",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{m}_proj": f"ffn_{m}" for m in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{m}_proj": f"ffn_{m}_shexp" for m in ("gate", "up", "down")},
}
_RENAMED = (
    ("attention.dense", "self_attn.o_proj"),
    ("attention.", "self_attn."),
    ("self_attn.out_proj", "self_attn.o_proj"),
    ("self_attn.forget_gate.", "self_attn."),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.", "mlp."),
    ("block_sparse_moe.", "mlp."),
    ("router.proj", "mlp.gate"),
    ("mlp.router.layer", "mlp.gate"),
    ("mlp.router", "mlp.gate"),
    ("mlp.gate.wg", "mlp.gate"),
    ("mlp.shared_expert.", "mlp.shared_experts."),
    ("mlp.shared_mlp.", "mlp.shared_experts."),
    ("shared_mlp.output_linear", "mlp.shared_experts.down_proj"),
    ("shared_mlp.", "mlp.shared_experts."),
)
_ROTATED_IN_PAIRS = ("llama", "granitemoe")  # converting interleaves the halves of each head of q and k


@dataclass(frozen=True)
class Piece:
    """What of a module's matrix became the GGUF matrix `target`, or number `index` of that stack.

    `rows` and `columns` are the module's, in GGUF's order; None: all, as they are. Two-dimensional `rows`
    [n_stack, n_out] make a stack of one. `transposed`: GGUF's matrix maps the other way.
    """

    target: str
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    index: int | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Fused:
    """All experts of `layer` in one parameter, gate above up or down: shapes tell which.

    `interleaved`: gate's and up's rows take turns.
    """

    layer: int
    interleaved: bool


def pieces(module: str, spec: ModelSpec, known: Container[str]) -> list[Piece] | Fused | None:
    """What the module became; None where nothing is known of such a one."""
    if module == "lm_head":
        return [Piece("output.weight")]
    match = _LAYER.fullmatch(module)
    if match is None or match[1] not in _BEFORE:
        return None
    layer, rest = int(match[2]), match[3]
    if expert := _EXPERT.fullmatch(rest):
        role = _ROLES.get(expert[2])
        return None if role is None else [Piece(expert_name(layer, role), index=int(expert[1]))]
    if _FUSED.fullmatch(rest):
        return Fused(layer, spec.architecture == "gpt-oss")
    for old, new in _RENAMED:
        if rest == old or (old.endswith(".") and rest.startswith(old)):
            rest = new + rest[len(old) :]
    return _of_layer(rest, layer, spec, known)


def _of_layer(rest: str, layer: int, spec: ModelSpec, known: Container[str]) -> list[Piece] | None:
    b = f"blk.{layer}."
    if rest == "self_attn.g_proj":
        return [Piece(b + ("ssm_g_a.weight" if layer in spec.recurrent else "attn_gate.weight"))]
    if rest == "self_attn.kv_b_proj" and spec.latent is not None and spec.values_in_keys:
        return _latent_pieces(b, spec)
    if rest == "self_attn.kv_b_proj":
        return [Piece(b + "attn_kv_b.weight")]
    if rest in ("self_attn.q_proj", "self_attn.k_proj") and spec.architecture in _ROTATED_IN_PAIRS:
        m, n_head = ("q", spec.n_head) if rest == "self_attn.q_proj" else ("k", spec.n_head_kv)
        return [Piece(f"{b}attn_{m}.weight", interleaved(n_head, spec.head_dim))]
    if rest == "mlp.shared_experts.input_linear":
        n = spec.n_ff_shared
        return [Piece(f"{b}ffn_{m}_shexp.weight", np.arange(n) + i * n) for i, m in enumerate(("gate", "up"))]
    if rest == "linear_attn.in_proj_qkvz" and spec.delta is not None:
        return _by_head_pieces(b, spec.delta, known)
    name = _SAME.get(rest)
    if name is None:
        return None
    target = f"{b}{name}.weight"
    if rest.startswith("linear_attn.") and spec.delta is not None and spec.delta.tiled:
        return [Piece(target, *_tiled(rest, spec.delta))]
    return [Piece(target)]


def interleaved(n_head: int, head_dim: int) -> np.ndarray:
    """The rows of a query or key projection with each head's halves interleaved."""
    return np.arange(n_head * head_dim).reshape(n_head, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)


def in_turns(n_k_heads: int, n_v_heads: int, width: int) -> np.ndarray:
    """The rows of value heads, `width` each and neighbours if one key head's, where they take turns of key heads.

    So value head i belongs to key head i % n_k_heads.
    """
    each = n_v_heads // n_k_heads
    return np.arange(n_v_heads * width).reshape(n_k_heads, each, width).swapaxes(0, 1).reshape(-1)


def _latent_pieces(b: str, spec: ModelSpec) -> list[Piece]:
    """The matrix that makes heads' keys and values of latent vectors: here two stacks, the keys' transposed."""
    d = spec.latent
    assert d is not None
    rows = np.arange(spec.n_head * (d.n_nope + d.n_v)).reshape(spec.n_head, d.n_nope + d.n_v)
    return [
        Piece(b + "attn_k_b.weight", rows[:, : d.n_nope], transposed=True),
        Piece(b + "attn_v_b.weight", rows[:, d.n_nope :]),
    ]


def _tiled(rest: str, d: DeltaNetSpec) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Rows and columns where value heads, neighbours in transformers if one key head's, take turns of key heads."""
    order = partial(in_turns, d.n_k_heads, d.n_v_heads)
    if rest == "linear_attn.in_proj_qkv":
        n_before = 2 * d.n_k_heads * d.head_dim
        return np.concatenate([np.arange(n_before), n_before + order(d.head_dim)]), None
    if rest == "linear_attn.in_proj_z":
        return order(d.head_dim), None
    if rest in ("linear_attn.in_proj_a", "linear_attn.in_proj_b"):
        return order(1), None
    return (None, order(d.head_dim)) if rest == "linear_attn.out_proj" else (None, None)


def _by_head_pieces(b: str, d: DeltaNetSpec, known: Container[str]) -> list[Piece]:
    """Queries, keys, values and gates, all of one key head beside each other; older files keep them so."""
    if b + "ssm_in.weight" in known:
        return [Piece(b + "ssm_in.weight")]
    n_values = d.value_dim // d.n_k_heads
    rows = np.arange(d.n_k_heads * (2 * d.head_dim + 2 * n_values)).reshape(d.n_k_heads, -1)
    q, k, v, z = np.split(rows, np.cumsum([d.head_dim, d.head_dim, n_values]), axis=1)
    return [
        Piece(b + "attn_qkv.weight", np.concatenate([part.reshape(-1) for part in (q, k, v)])),
        Piece(b + "attn_gate.weight", z.reshape(-1)),
    ]
