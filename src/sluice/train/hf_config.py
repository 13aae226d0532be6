"""What a Hugging Face `config.json` says of a model, checked and with one spelling for all families. Reads no weights.

Families differ in the names of their numbers and in what they leave out. What GGUF's architectures can't say (sliding
windows, biases where they have none, other activations) is refused here, so that nothing is exported as another model.
Source: https://huggingface.co/docs/transformers (configuration classes) and conversion/ in
https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sluice.errors import InputError

# transformers' model_type -> GGUF's architecture
ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "qwen3_5_moe": "qwen35moe",
}
NORMALISES = {"qwen3_moe": True, "qwen2_moe": False, "olmoe": False}  # what GGUF's architecture does with the weights
ROPES = ("default", "linear", "yarn")


@dataclass(frozen=True)
class LinearAttention:
    """Layers that mix tokens by the gated delta rule. Every `interval`-th layer attends instead."""

    n_k_heads: int
    n_v_heads: int
    head_dim: int
    conv_width: int
    interval: int

    @property
    def key_dim(self) -> int:
        return self.n_k_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.n_v_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that are convolved: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True)
class HfConfig:
    """A model's shape. `n_ff` is a dense network's width, 0 where none is said; `n_ff_shared` 0 without shared experts.

    `rope` are transformers' `rope_parameters`, with `rope_type` one of ROPES. `said` is the whole file.
    """

    model_type: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_ff_expert: int
    n_ff_shared: int
    n_expert: int
    top_k: int
    eps: float
    tied: bool
    qkv_bias: bool
    rope: Mapping[str, Any]
    linear: LinearAttention | None = None
    said: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.model_type]

    def attends(self, layer: int) -> bool:
        return self.linear is None or (layer + 1) % self.linear.interval == 0


def read_config(said: Mapping[str, Any], where: str) -> HfConfig:
    """The shape that `said`, a parsed config.json or a configuration's `to_dict()`, describes.

    Raises InputError with `where` before the cause: another family (its choices are listed), a number that is missing
    or impossible, something that GGUF can't say.
    """
    kind = said.get("model_type")
    kind = kind.removesuffix("_text") if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise InputError(
            f"{where}: model_type is {ascii(said.get('model_type'))[:60]}: choices are {', '.join(ARCHITECTURES)}"
        )
    text = said.get("text_config")
    c = _Said({**said, **text} if isinstance(text, Mapping) else said, where)
    _refuse_what_gguf_lacks(c, kind)
    n_embd, n_head = c.integer("hidden_size"), c.integer("num_attention_heads", high=4096)
    n_expert = c.integer("num_experts", "num_local_experts", high=4096)
    apart = kind in ("qwen3_moe", "qwen2_moe", "qwen3_5_moe")  # experts have a width of their own
    head_dim = c.integer("head_dim", default=n_embd // n_head, low=2, high=1024)
    if head_dim % 2:
        c.fail("head_dim", f"is {head_dim}, and pairs are rotated: correct it")
    n_head_kv = c.integer("num_key_value_heads", default=n_head, high=n_head)
    if n_head % n_head_kv:
        c.fail("num_key_value_heads", f"is {n_head_kv}, which does not divide {n_head} heads: correct it")
    return HfConfig(
        model_type=kind,
        n_layers=c.integer("num_hidden_layers", high=4096),
        n_embd=n_embd,
        n_vocab=c.integer("vocab_size"),
        n_ctx=c.integer("max_position_embeddings", high=1 << 30),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff=c.integer("intermediate_size", default=0, low=0),
        n_ff_expert=c.integer("moe_intermediate_size" if apart else "intermediate_size"),
        n_ff_shared=c.integer("shared_expert_intermediate_size") if kind in ("qwen2_moe", "qwen3_5_moe") else 0,
        n_expert=n_expert,
        top_k=c.integer("num_experts_per_tok", high=n_expert),
        eps=c.number("rms_norm_eps"),
        tied=c.flag("tie_word_embeddings", False),
        qkv_bias=c.flag("qkv_bias", True) if kind == "qwen2_moe" else False,
        rope=_rope(c, kind, head_dim),
        linear=_linear(c) if kind == "qwen3_5_moe" else None,
        said=c.all,
    )


class _Said:
    """Typed access to a configuration. Null counts as not said."""

    def __init__(self, said: Mapping[str, Any], where: str) -> None:
        self.all, self.where = said, where

    def fail(self, key: str, what: str) -> NoReturn:
        raise InputError(f"{self.where}: {key} {what}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.all.get(key)
        return default if value is None else value

    def integer(self, *keys: str, default: int | None = None, low: int = 1, high: int = 1 << 24) -> int:
        value = next((self.all[key] for key in keys if self.all.get(key) is not None), default)
        if value is None:
            self.fail(keys[0], "is missing: the configuration is incomplete")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(keys[0], f"is {ascii(value)[:60]}, not a whole number from {low} to {high}: correct it")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            self.fail(key, f"is {ascii(value)[:60]}, not a number of at least 0: correct it")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"is {ascii(value)[:60]}, neither true nor false: correct it")
        return value


def _refuse_what_gguf_lacks(c: _Said, kind: str) -> None:
    can_not = f"which GGUF's {ARCHITECTURES[kind]} can't say: export another model"
    if c.get("hidden_act", "silu") != "silu":
        c.fail("hidden_act", f"is {ascii(c.get('hidden_act'))[:60]}, {can_not}")
    if c.get("attention_bias"):
        c.fail("attention_bias", f"is set, {can_not}")
    if c.get("clip_qkv") is not None:
        c.fail("clip_qkv", f"is {ascii(c.get('clip_qkv'))[:60]}, {can_not}")
    if c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1:
        c.fail("mlp_only_layers or decoder_sparse_step", f"makes layers without experts, {can_not}")
    types = c.get("layer_types", [])
    windowed = isinstance(types, list) and any(t not in ("full_attention", "linear_attention") for t in types)
    if c.get("use_sliding_window") or windowed or (kind == "mixtral" and c.get("sliding_window")):
        c.fail("sliding_window", f"limits attention, {can_not}")
    if kind in NORMALISES and c.flag("norm_topk_prob", False) != NORMALISES[kind]:
        does = "divides routing weights by their sum" if NORMALISES[kind] else "takes routing weights as they are"
        c.fail(
            "norm_topk_prob",
            f"is {str(not NORMALISES[kind]).lower()}, but GGUF's {ARCHITECTURES[kind]} always {does}: "
            f"train the model with norm_topk_prob {str(NORMALISES[kind]).lower()}",
        )


def _rope(c: _Said, kind: str, head_dim: int) -> dict[str, Any]:
    """transformers' `rope_parameters`, also of files that have `rope_theta` and `rope_scaling` instead."""
    given = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        c.fail("rope_parameters", "is no object: correct it")
    rope = dict(given)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is None and c.get(key) is not None:
            rope[key] = c.get(key)
    inner = _Said(rope, f"{c.where}: rope_parameters")
    if rope["rope_type"] not in ROPES:
        inner.fail("rope_type", f"is {ascii(rope['rope_type'])[:60]}: choices are {', '.join(ROPES)}")
    if inner.number("rope_theta") <= 0:
        inner.fail("rope_theta", "is not positive: correct it")
    if rope["rope_type"] != "default" and inner.number("factor") <= 0:
        inner.fail("factor", "is not positive: correct it")
    if rope["rope_type"] == "yarn":
        inner.integer("original_max_position_embeddings", high=1 << 30)
        for key in ("extrapolation_factor", "attention_factor", "beta_fast", "beta_slow"):
            if inner.get(key) is not None:
                inner.number(key)
    factor = inner.number("partial_rotary_factor") if inner.get("partial_rotary_factor") is not None else None
    if kind != "qwen3_5_moe":
        if factor not in (None, 1.0):
            inner.fail("partial_rotary_factor", f"is {factor}, which GGUF's {ARCHITECTURES[kind]} can't say")
        return rope
    rope["n_dims"] = n_dims = int(head_dim * (0.25 if factor is None else factor))
    if n_dims < 2 or n_dims % 2 or n_dims > head_dim:
        inner.fail("partial_rotary_factor", f"rotates {n_dims} of a head's {head_dim} numbers: correct it")
    pairs = n_dims // 2  # pair i belongs to section i % 3, as in the 11, 11, 10 of the published models
    sections = inner.get("mrope_section", [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3])
    if not isinstance(sections, list) or not all(type(n) is int and n >= 0 for n in sections) or len(sections) > 4:
        inner.fail("mrope_section", f"is {ascii(sections)[:60]}, no list of up to 4 whole numbers: correct it")
    if sum(sections) != pairs:
        inner.fail("mrope_section", f"has {sum(sections)} pairs, and {pairs} are rotated: correct it")
    rope["mrope_section"] = [*sections, 0, 0, 0, 0][:4]
    return rope


def _linear(c: _Said) -> LinearAttention:
    n_k, n_v = (c.integer(f"linear_num_{what}_heads", high=4096) for what in ("key", "value"))
    head_dim, values = (c.integer(f"linear_{what}_head_dim", high=1024) for what in ("key", "value"))
    if values != head_dim:
        c.fail("linear_value_head_dim", f"is {values}, and GGUF's qwen35moe has one for keys and values: {head_dim}")
    if n_v % n_k:
        c.fail("linear_num_key_heads", f"is {n_k}, which does not divide {n_v} value heads: correct it")
    n_layers = c.integer("num_hidden_layers", high=4096)
    types = c.get("layer_types")
    interval = c.integer("full_attention_interval", default=4, high=4096)
    if isinstance(types, list) and "full_attention" in types:
        interval = types.index("full_attention") + 1
    expected = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(n_layers)]
    if types is not None and types != expected:
        c.fail("layer_types", "do not repeat from the first full_attention on, which GGUF's qwen35moe needs")
    if "full_attention" not in expected:
        c.fail("layer_types", f"leave none of {n_layers} layers to attend: correct it")
    return LinearAttention(n_k, n_v, head_dim, c.integer("linear_conv_kernel_dim", low=2, high=64), interval)
