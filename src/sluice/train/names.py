"""Which GGUF tensor each tensor of a Hugging Face model becomes, and how it lies there, both ways. Opens no files.

Most only change their name. Experts, which transformers keep fused (gate above up) in memory and one by one in
checkpoints, become a stack for each role. llama's rotary embedding wants each head's halves interleaved. qwen35moe's
norms hold what is multiplied by, not what is added to 1; its decay is -exp(A_log); and its value heads, neighbours in
transformers if one key head's, take turns of key heads.
Source: gguf-py/gguf/tensor_mapping.py and conversion/ in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sluice.routing.linears import ROLES, expert_name
from sluice.routing.peft_names import in_turns, interleaved
from sluice.train.hf_config import HfConfig

HEAD = "lm_head.weight"
# What a checkpoint may hold beside the decoder: vision, multi-token prediction, tables that are computed.
OTHER_PARTS = ("model.visual.", "visual.", "mtp.", "model.mtp.")
_MIXTRAL_ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_MIXTRAL_EXPERT = re.compile(r"(.*\.mlp\.experts\.\d{1,6})\.(w[123])\.weight")


@dataclass(frozen=True)
class Weight:
    """A GGUF tensor that is one of the model's tensors.

    `shape` is GGUF's, row-major; `source` the name in a state dict of transformers, whose shape is `hf_shape`. `rows`
    and `columns` are the model's, in GGUF's order; None: as they are. `kind`: "plain"; "norm", stored one larger;
    "decay", stored as -exp.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    hf_shape: tuple[int, ...]
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    kind: str = "plain"

    def to_gguf(self, values: np.ndarray) -> np.ndarray:
        """float32 `values` of the model as GGUF has them."""
        values = values.reshape(self.shape)
        if self.rows is not None:
            values = values[self.rows]
        if self.columns is not None:
            values = values[:, self.columns]
        if self.kind == "norm":
            return values + np.float32(1)
        return -_exp(values) if self.kind == "decay" else values

    def to_hf(self, values: np.ndarray) -> np.ndarray:
        """float32 `values` of GGUF as the model has them: numbers that `to_gguf` makes the same ones of again."""
        if self.kind == "norm":
            values = _less_one(values)
        elif self.kind == "decay":
            values = _log(-values)
        if self.rows is not None:
            values = values[np.argsort(self.rows)]
        if self.columns is not None:
            values = values[:, np.argsort(self.columns)]
        return values.reshape(self.hf_shape)


@dataclass(frozen=True)
class Experts:
    """A GGUF tensor [n_expert, n_out, n_in] that stacks one matrix of each expert of `layer`.

    In a state dict it is the rows from `first` of each matrix of `source`.
    """

    name: str
    shape: tuple[int, int, int]
    source: str
    hf_shape: tuple[int, int, int]
    first: int
    layer: int
    role: str

    def apart(self, expert: int) -> str:
        """The name of one expert's matrix in a checkpoint that has them apart."""
        return f"model.layers.{self.layer}.mlp.experts.{expert}.{self.role}_proj.weight"


def canonical(name: str) -> str:
    """A checkpoint's name for a tensor as the state dict of a text model spells it."""
    for old, new in (("model.language_model.", "model."), ("language_model.model.", "model.")):
        if name.startswith(old):
            name = new + name[len(old) :]
    name = name.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp.")
    if match := _MIXTRAL_EXPERT.fullmatch(name):
        name = f"{match[1]}.{_MIXTRAL_ROLES[match[2]]}.weight"
    return name


def left_out(name: str) -> bool:
    """Whether a tensor of a checkpoint, by its canonical name, is no part of the decoder."""
    return name.startswith(OTHER_PARTS) or name.endswith(".rotary_emb.inv_freq")


def weights(c: HfConfig) -> list[Weight | Experts]:
    """All tensors of a model's GGUF file, in their order there. A tied head has none of its own."""
    d, norm = c.n_embd, "norm" if c.model_type == "qwen3_5_moe" else "plain"
    found: list[Weight | Experts] = [_same("token_embd.weight", "model.embed_tokens.weight", c.n_vocab, d)]
    for layer in range(c.n_layers):
        b, there = f"blk.{layer}.", f"model.layers.{layer}."
        found.append(Weight(b + "attn_norm.weight", (d,), there + "input_layernorm.weight", (d,), kind=norm))
        found += _attention(c, b, there + "self_attn.", norm) if c.attends(layer) else _delta(c, b, there)
        before = "post_attention_norm" if norm == "norm" else "ffn_norm"
        found.append(Weight(f"{b}{before}.weight", (d,), there + "post_attention_layernorm.weight", (d,), kind=norm))
        found += _experts(c, layer, b, there + "mlp.")
    found.append(Weight("output_norm.weight", (d,), "model.norm.weight", (d,), kind=norm))
    return found if c.tied else [*found, _same("output.weight", HEAD, c.n_vocab, d)]


def _same(name: str, source: str, *shape: int) -> Weight:
    return Weight(name, shape, source, shape)


def _attention(c: HfConfig, b: str, there: str, norm: str) -> Iterator[Weight]:
    q, kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
    n_query = 2 * q if c.linear else q  # qwen3_5_moe's queries have gates beside them
    for part, n, heads in (("q", n_query, c.n_head), ("k", kv, c.n_head_kv), ("v", kv, 0)):
        rows = interleaved(heads, c.head_dim) if c.architecture == "llama" and heads else None
        shape = (n, c.n_embd)
        yield Weight(f"{b}attn_{part}.weight", shape, f"{there}{part}_proj.weight", shape, rows)
        if c.qkv_bias:
            yield _same(f"{b}attn_{part}.bias", f"{there}{part}_proj.bias", n)
    yield _same(b + "attn_output.weight", there + "o_proj.weight", c.n_embd, q)
    widths = {"qwen3_moe": (c.head_dim, c.head_dim), "qwen3_5_moe": (c.head_dim, c.head_dim), "olmoe": (q, kv)}
    for part, width in zip("qk", widths.get(c.model_type, ()), strict=False):
        yield Weight(f"{b}attn_{part}_norm.weight", (width,), f"{there}{part}_norm.weight", (width,), kind=norm)


def _delta(c: HfConfig, b: str, there: str) -> Iterator[Weight]:
    """The tensors of a layer of linear attention."""
    d, n = c.linear, c.n_embd
    assert d is not None
    there += "linear_attn."
    values, heads = in_turns(d.n_k_heads, d.n_v_heads, d.head_dim), in_turns(d.n_k_heads, d.n_v_heads, 1)
    channels = np.concatenate([np.arange(2 * d.key_dim), 2 * d.key_dim + values])  # queries, keys, values
    for name, source, rows in (
        ("attn_qkv", "in_proj_qkv", channels),
        ("attn_gate", "in_proj_z", values),
        ("ssm_beta", "in_proj_b", heads),
        ("ssm_alpha", "in_proj_a", heads),
    ):
        yield Weight(f"{b}{name}.weight", (len(rows), n), f"{there}{source}.weight", (len(rows), n), rows)
    shape = (d.conv_dim, d.conv_width)
    yield Weight(b + "ssm_conv1d.weight", shape, there + "conv1d.weight", (d.conv_dim, 1, d.conv_width), channels)
    yield Weight(b + "ssm_dt.bias", (d.n_v_heads,), there + "dt_bias", (d.n_v_heads,), heads)
    yield Weight(b + "ssm_a", (d.n_v_heads,), there + "A_log", (d.n_v_heads,), heads, kind="decay")
    yield _same(b + "ssm_norm.weight", there + "norm.weight", d.head_dim)
    shape = (n, d.value_dim)
    yield Weight(b + "ssm_out.weight", shape, there + "out_proj.weight", shape, columns=values)


def _experts(c: HfConfig, layer: int, b: str, there: str) -> Iterator[Weight | Experts]:
    d, ff, n = c.n_embd, c.n_ff_expert, c.n_expert
    yield _same(b + "ffn_gate_inp.weight", there + "gate.weight", n, d)
    for role in ROLES:
        name, first = expert_name(layer, role), ff if role == "up" else 0
        if role == "down":
            yield Experts(name, (n, d, ff), there + "experts.down_proj", (n, d, ff), first, layer, role)
        else:
            yield Experts(name, (n, ff, d), there + "experts.gate_up_proj", (n, 2 * ff, d), first, layer, role)
    if not c.n_ff_shared:
        return
    for role in ROLES:
        shape = (d, c.n_ff_shared) if role == "down" else (c.n_ff_shared, d)
        yield _same(f"{b}ffn_{role}_shexp.weight", f"{there}shared_expert.{role}_proj.weight", *shape)
    yield _same(b + "ffn_gate_inp_shexp.weight", there + "shared_expert_gate.weight", 1, d)


def _exp(values: np.ndarray) -> np.ndarray:
    """The float32 nearest to e to the power of each, whatever the machine's float32 exp would say."""
    return np.exp(values.astype(np.float64)).astype(np.float32)


def _log(values: np.ndarray) -> np.ndarray:
    """float32 numbers whose `_exp` is `values` where there are such, else the nearest to it."""
    return _inverse(values, np.log(values.astype(np.float64)).astype(np.float32), _exp)


def _less_one(values: np.ndarray) -> np.ndarray:
    """float32 numbers that, one added in float32, are `values`."""
    return _inverse(values, values - np.float32(1), lambda x: x + np.float32(1))


def _inverse(values: np.ndarray, guess: np.ndarray, forward: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Of `guess` and its neighbours in float32, what `forward` maps nearest to `values`; `guess` where they tie."""
    best, error = guess, np.abs(forward(guess) - values)
    for limit in (-np.inf, np.inf):
        other = np.nextafter(guess, np.float32(limit))
        missed = np.abs(forward(other) - values)
        best, error = np.where(missed < error, other, best), np.minimum(missed, error)
    return best
