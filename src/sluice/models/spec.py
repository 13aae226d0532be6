"""What a model is, as frozen values checked against its file; knows metadata and shapes, no graphs."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sluice.errors import ModelFileError
from sluice.ggml.types import WEIGHT_TYPES, GgmlType
from sluice.gguf import ExpertPart, GgufFile, TensorInfo

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding as `ggml_rope_ext` takes it. `freq_scale` is 1 ÷ the scaling factor."""

    n_dims: int
    neox: bool
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    n_ctx_orig: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a layer's attention keeps of a position: `n_head_kv` heads of keys and of values."""

    n_head_kv: int
    head_dim: int
    head_dim_v: int

    @property
    def width_k(self) -> int:
        """Numbers of a token's keys over all heads."""
        return self.head_dim * self.n_head_kv

    @property
    def width_v(self) -> int:
        return self.head_dim_v * self.n_head_kv


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Linear attention by the gated delta rule: heads of `head_dim` for keys and values, a convolution before them."""

    n_k_heads: int
    n_v_heads: int
    head_dim: int
    conv_width: int
    lowest: float = 0.0  # of a step's decay, its logarithm; 0 where that has no bound
    tiled: bool = True  # value head i belongs to key head i % n_k_heads; if not, those of one key head are neighbours

    @property
    def value_dim(self) -> int:
        return self.head_dim * self.n_v_heads

    @property
    def conv_dim(self) -> int:
        """Channels that are convolved: queries, keys, values."""
        return 2 * self.head_dim * self.n_k_heads + self.value_dim

    @property
    def state(self) -> tuple[int, int]:
        """Numbers that a layer keeps of a stream: the convolution's last inputs, and the heads' matrices."""
        return (self.conv_width - 1) * self.conv_dim, self.head_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: `rank` numbers of a position serve all heads, and `n_rope` rotated ones beside them.

    A head's queries and keys have `n_nope` + `n_rope` numbers, its values `n_v`. `scale` multiplies attention's scores.
    """

    rank: int
    q_rank: int  # numbers that queries are compressed to, 0 where they are not
    n_nope: int
    n_rope: int
    n_v: int
    scale: float

    @property
    def n_qk(self) -> int:
        return self.n_nope + self.n_rope


@dataclass(frozen=True, slots=True)
class ScaleSpec:
    """What a family multiplies by where others don't. `scores` of attention: 0 stands for 1 / sqrt(head_dim).

    `cap`: logits are squeezed into ± cap by tanh, 0 where they are not.
    """

    embedding: float = 1.0
    residual: float = 1.0  # what a layer adds, before it is added; of routed experts through `weights_scale`
    scores: float = 0.0
    logits: float = 1.0
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder with routed experts. `moe_layers` are those that have experts, ascending.

    `gating` is what turns router logits into scores: softmax or sigmoid of all, or "chosen", softmax over the chosen.
    With groups, the experts of the best `n_groups_used` of `n_groups` groups are chosen from.
    """

    architecture: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_head: int
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    n_ff: int
    n_ff_expert: int
    n_expert: int
    top_k: int
    moe_layers: tuple[int, ...]
    rms_eps: float
    rope: RopeSpec
    normalise_weights: bool  # routing weights are divided by their sum over the chosen experts
    weights_scale: float
    tied_embeddings: bool
    gating: str = "softmax"
    n_groups: int = 1
    n_groups_used: int = 1
    n_ff_shared: int = 0  # width of the shared experts together, 0 where there are none
    window: int = 0  # positions that the layers of `windowed` look back, their own included
    windowed: tuple[int, ...] = ()
    near_rope: RopeSpec | None = None  # of the layers of `windowed`, where it is another than the others'
    kv_shapes: Mapping[int, KVShape] = field(default_factory=dict)  # of layers whose heads are other than the model's
    values_in_keys: bool = False  # a position's values are the first numbers of its keys: none are kept beside them
    recurrent: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # layer -> numbers of each of its states
    delta: DeltaNetSpec | None = None
    short_conv: int = 0  # positions that `recurrent` layers convolve over, where that is all they do
    scales: ScaleSpec = field(default_factory=ScaleSpec)
    latent: LatentSpec | None = None
    expert_biases: bool = False
    skipped: tuple[str, ...] = ()  # tensors that are left in the file: other modalities, multi-token prediction

    @property
    def attending(self) -> tuple[int, ...]:
        """Layers that keep keys and values."""
        return tuple(i for i in range(self.n_layers) if i not in self.recurrent)

    def kv_shape(self, layer: int) -> KVShape:
        """What the attention of `layer` keeps of a position."""
        return self.kv_shapes.get(layer) or KVShape(self.n_head_kv, self.head_dim, self.head_dim_v)

    def rope_of(self, layer: int) -> RopeSpec:
        return self.near_rope if self.near_rope and layer in self.windowed else self.rope

    @property
    def kv_shapes_used(self) -> set[KVShape]:
        """The shapes of all layers that attend."""
        return {self.kv_shape(layer) for layer in self.attending}

    @property
    def mixer_width(self) -> int:
        """The widest output of a layer's attention, before its projection."""
        attended = self.n_head * max((shape.head_dim_v for shape in self.kv_shapes_used), default=0)
        convolved = self.n_embd if self.short_conv else 0
        return max(attended, self.delta.value_dim if self.delta else 0, convolved)


GATINGS = {1: "softmax", 2: "sigmoid", 3: "chosen"}  # by the numbers that files name them with


class Metadata:
    """Typed access to a file's hyper-parameters, `key` without the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.paths[0]
        self.all: Mapping[str, Any] = file.metadata
        self.architecture = str(file.metadata["general.architecture"])

    def fail(self, key: str, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {self.architecture}.{key} {what}: the file is damaged or badly converted")

    def get(self, key: str, default: Any = None) -> Any:
        return self.all.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "is missing")
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # per-layer arrays that say the same for every layer
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"is {str(value)[:60]!r}, not a whole number from {low} to {high}")
        return value

    def n_layers(self) -> int:
        """The model's own layers; those for multi-token prediction come after them."""
        n = self.integer("block_count", high=4096)
        return n - self.integer("nextn_predict_layers", 0, low=0, high=n - 1)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {str(value)[:60]!r}, neither true nor false")
        return value

    def per_layer(
        self, key: str, n_layers: int, default: int | None = None, *, low: int = 1, high: int = 1 << 24
    ) -> tuple[int, ...]:
        """A whole number for each layer: the file gives one for all, or a list of them."""
        value = self.get(key, default)
        if not isinstance(value, list):
            return (self.integer(key, default, low=low, high=high),) * n_layers
        if len(value) < n_layers:
            raise self.fail(key, f"says something of {len(value)} layers, not of {n_layers}")
        for number in value[:n_layers]:
            if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
                raise self.fail(key, f"holds {str(number)[:60]!r}, not only whole numbers from {low} to {high}")
        return tuple(value[:n_layers])

    def layers_without_keys(self, n_layers: int) -> tuple[int, ...]:
        """The layers that have no KV heads, of a family in which those mix tokens in another way."""
        each = self.per_layer("attention.head_count_kv", n_layers, low=0)
        return tuple(i for i, n in enumerate(each) if n == 0)

    def marked_layers(self, key: str, n_layers: int, what: str) -> tuple[int, ...]:
        """The layers of which the file's list says that `what`."""
        listed = self.get(key)
        if not isinstance(listed, list) or len(listed) < n_layers or not all(isinstance(x, int) for x in listed):
            raise self.fail(key, f"does not say of each layer whether {what}")
        return tuple(i for i in range(n_layers) if listed[i])

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(key, f"is {str(value)[:60]!r}, not a number")
        return float(value)

    def gating(self, default: str | None = None) -> str:
        """What makes scores of router logits, as `ModelSpec.gating` says it. None: the file must name it."""
        kind = self.get("expert_gating_func")
        if kind in (None, 0) and default is not None:
            return default
        if kind not in GATINGS:
            raise self.fail("expert_gating_func", f"is {str(kind)[:60]!r}, not one of {', '.join(map(str, GATINGS))}")
        return GATINGS[kind]

    def groups(self, n_expert: int, top_k: int) -> tuple[int, int]:
        """Groups of experts, and those that are chosen from: (1, 1) where routing is not limited to some."""
        n = self.integer("expert_group_count", 1, low=0, high=n_expert)
        if n <= 1:
            return 1, 1
        used = self.integer("expert_group_used_count", high=n)
        if n_expert % n or n_expert // n < 2:
            raise self.fail("expert_group_count", f"is {n}, which does not cut {n_expert} experts into groups")
        if top_k > used * (n_expert // n):
            raise self.fail("expert_group_used_count", f"is {used}: these groups have fewer than {top_k} experts")
        return (1, 1) if used == n else (n, used)

    def rotated(self, key: str, head_dim: int, default: int | None = None) -> int:
        """How many numbers of a head are rotated."""
        n_dims = self.integer(key, default, high=head_dim)
        if n_dims % 2:
            raise self.fail(key, "is odd")
        return n_dims

    def rope_base(self, key: str) -> float:
        base = self.number(key, 10000.0)
        if base <= 0:
            raise self.fail(key, "is not positive")
        return base

    def rope(self, head_dim: int, n_ctx_train: int, *, neox: bool) -> RopeSpec:
        """Rope parameters with llama.cpp's defaults for what a file leaves out."""
        kind = self.get("rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn"):
            raise self.fail("rope.scaling.type", f"is {str(kind)[:60]!r}, which this family does not use")
        factor = self.number("rope.scaling.factor", 0.0) or self.number("rope.scale_linear", 0.0)
        if factor < 0:
            raise self.fail("rope.scaling.factor", "is negative")
        return RopeSpec(
            n_dims=self.rotated("rope.dimension_count", head_dim, head_dim),
            neox=neox,
            freq_base=self.rope_base("rope.freq_base"),
            freq_scale=1.0 / factor if factor and kind != "none" else 1.0,
            ext_factor=self.number("rope.scaling.yarn_ext_factor", 1.0) if kind == "yarn" else 0.0,
            attn_factor=self.number("rope.scaling.attn_factor", 1.0),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            n_ctx_orig=self.integer("rope.scaling.original_context_length", n_ctx_train, high=1 << 30),
        )


def decoder_spec(
    file: GgufFile, *, neox: bool, normalise_weights: bool, some_without_keys: bool = False,
    apart: Collection[int] = (),
) -> ModelSpec:  # fmt: skip
    """The spec of a plain pre-norm decoder with softmax routing, whose keys all such families share.

    `some_without_keys`: a list of the layers' KV heads may say of some that they have none. `apart`: layers whose heads
    are of another kind, which the caller sees to.
    Raises ModelFileError for a missing, impossible or contradictory hyper-parameter, and for a dense model.
    """
    meta = Metadata(file)
    n_layers = meta.n_layers()
    moe_layers = tuple(i for i in range(n_layers) if file.expert_parts(i) is not None)
    if not moe_layers:
        raise ModelFileError(
            f"{file.paths[0]}: a dense model: Sluice is for Mixture-of-Experts models, run this one with llama.cpp"
        )
    if moe_layers[0] < (leading := meta.integer("leading_dense_block_count", 0, low=0, high=n_layers)):
        raise meta.fail("leading_dense_block_count", f"is {leading}, but layer {moe_layers[0]} has experts")
    n_expert = meta.integer("expert_count", high=4096)
    top_k = meta.integer("expert_used_count", high=n_expert)
    n_groups, n_groups_used = meta.groups(n_expert, top_k)
    n_embd, n_head = meta.integer("embedding_length"), meta.integer("attention.head_count", high=4096)
    low = 0 if some_without_keys else 1
    each = meta.per_layer("attention.head_count_kv", n_layers, n_head, low=low, high=n_head)
    n_head_kv, *others = sorted({n for i, n in enumerate(each) if i not in apart} - {0} or {0})
    if others:
        raise meta.fail("attention.head_count_kv", f"is {n_head_kv} in some layers and {others[0]} in others")
    if not n_head_kv or n_head % n_head_kv:
        raise meta.fail("attention.head_count_kv", f"is {n_head_kv}, which does not divide {n_head} heads")
    head_dim = meta.integer("attention.key_length", n_embd // n_head, high=1024)
    n_ctx_train = meta.integer("context_length", high=1 << 30)
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelFileError(f"{file.paths[0]}: has no token_embd.weight: the file is incomplete")
    first = file.expert_parts(moe_layers[0])
    assert first is not None
    eps = meta.number("attention.layer_norm_rms_epsilon")
    if not 0 <= eps < 1:
        raise meta.fail("attention.layer_norm_rms_epsilon", f"is {eps}")
    return ModelSpec(
        architecture=meta.architecture,
        n_layers=n_layers,
        n_embd=n_embd,
        n_vocab=embeddings.shape[1],
        n_ctx_train=n_ctx_train,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        head_dim_v=meta.integer("attention.value_length", head_dim, high=1024),
        n_ff=meta.integer("feed_forward_length", first[0].n_out),
        n_ff_expert=meta.integer("expert_feed_forward_length", first[0].n_out),
        n_expert=n_expert,
        top_k=top_k,
        moe_layers=moe_layers,
        rms_eps=eps,
        rope=meta.rope(head_dim, n_ctx_train, neox=neox),
        normalise_weights=normalise_weights,
        weights_scale=meta.number("expert_weights_scale", 0.0) or 1.0,
        tied_embeddings="output.weight" not in file.tensors,
        n_groups=n_groups,
        n_groups_used=n_groups_used,
    )


def with_latent_attention(meta: Metadata, spec: ModelSpec) -> ModelSpec:
    """`spec` of a model that attends by latent vectors, and keeps nothing else of a position.

    Raises ModelFileError where the lengths that the file gives don't fit each other.
    """
    rank, n_qk = meta.integer("attention.kv_lora_rank", high=4096), meta.integer("attention.key_length_mla", high=1024)
    n_rope = spec.rope.n_dims
    if n_qk <= n_rope:
        raise meta.fail("attention.key_length_mla", f"is {n_qk}, of which rope.dimension_count rotates {n_rope}")
    if spec.n_head_kv != 1:
        raise meta.fail("attention.head_count_kv", f"is {spec.n_head_kv}, not 1, as latent attention has it")
    if spec.head_dim != rank + n_rope:
        raise meta.fail("attention.key_length", f"is {spec.head_dim}, not {rank} + {n_rope}")
    if spec.head_dim_v != rank:
        raise meta.fail("attention.value_length", f"is {spec.head_dim_v}, not {rank}")
    latent = LatentSpec(
        rank=rank,
        q_rank=meta.integer("attention.q_lora_rank", 0, low=0),
        n_nope=n_qk - n_rope,
        n_rope=n_rope,
        n_v=meta.integer("attention.value_length_mla", high=1024),
        scale=n_qk**-0.5,
    )
    return replace(spec, latent=latent, values_in_keys=True)


# Parts of a file that a text model can do without: vision and audio towers and their projectors.
OTHER_PARTS = ("v.", "mm.", "a.", "resampler.")


def check_tensors(
    file: GgufFile, spec: ModelSpec, wanted: Mapping[str, Shape], optional: Mapping[str, Shape]
) -> ModelSpec:
    """`spec`, with the names of what is `skipped` of the file: multi-token prediction, other modalities.

    Raises ModelFileError unless the file holds exactly `wanted`, maybe some of `optional`, and consistent experts.
    Shapes are in ggml's order. Vectors must be F32, as ggml adds and multiplies only those.
    """
    path = file.paths[0]
    expected = {**wanted, **optional}
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            if name in wanted:
                raise ModelFileError(f"{path}: tensor {name} is missing: the file is incomplete")
            continue
        full = (*shape, *([1] * (4 - len(shape))))
        if info.shape != full:
            raise ModelFileError(
                f"{path}: tensor {name} has the shape {_text(info)}, "
                f"its hyper-parameters say {list(shape)}: the file is damaged"
            )
        vector = (
            len(shape) == 1 or name.endswith((".bias", ".ssm_a")) or ".ssm_conv1d" in name or ".shortconv.conv." in name
        )
        if vector and info.type != GgmlType.F32:
            raise ModelFileError(f"{path}: tensor {name} is {info.type.name}, Sluice needs F32 here: convert it again")
        _check_weight_type(file, info)
    parts = ("gate_exps.weight", "up_exps.weight", "down_exps.weight", "gate_up_exps.weight", "exps.packed")
    experts = {f"blk.{i}.ffn_{part}" for i in spec.moe_layers for part in parts}
    others = sorted(set(file.tensors) - set(expected) - experts)
    n_blocks = Metadata(file).integer("block_count", high=4096)  # with those for multi-token prediction
    skipped = tuple(name for name in others if name.startswith(OTHER_PARTS) or spec.n_layers <= _block(name) < n_blocks)
    unknown = [name for name in others if name not in skipped]
    for layer in {_block(name) for name in skipped} - {-1}:
        if not any(name.startswith(f"blk.{layer}.nextn.") for name in skipped):
            raise ModelFileError(
                f"{path}: layer {layer} is no layer for multi-token prediction, as {spec.architecture}."
                "nextn_predict_layers says: the file is damaged or badly converted"
            )
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ModelFileError(
            f"{path}: unknown tensor {unknown[0]}{more}: this {spec.architecture} variant is not supported"
        )
    for layer in spec.moe_layers:
        _check_experts(file, spec, layer)
    return replace(spec, skipped=skipped)


def _block(name: str) -> int:
    """The layer that a tensor belongs to, -1 for none."""
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


def _check_experts(file: GgufFile, spec: ModelSpec, layer: int) -> None:
    parts = file.expert_parts(layer)
    assert parts is not None
    for part in parts:
        n_in, n_out = (spec.n_ff_expert, spec.n_embd) if part.role == "down" else (spec.n_embd, spec.n_ff_expert)
        if (part.n_in, part.n_out) != (n_in, n_out):
            raise ModelFileError(
                f"{file.paths[0]}: layer {layer}'s {part.role} experts are [{part.n_in}, {part.n_out}], "
                f"its hyper-parameters say [{n_in}, {n_out}]: the file is damaged"
            )
        if part.type not in WEIGHT_TYPES:
            raise ModelFileError(
                f"{file.paths[0]}: layer {layer}'s experts are {part.type.name}: ggml can't multiply that"
            )
    if (count := expert_count(file, parts)) != spec.n_expert:
        raise ModelFileError(
            f"{file.paths[0]}: layer {layer} has {count} experts, "
            f"its hyper-parameters say {spec.n_expert}: the file is damaged"
        )


def expert_count(file: GgufFile, parts: tuple[ExpertPart, ...]) -> int:
    """How many experts the tensor that `parts` lie in holds."""
    for info in file.tensors.values():
        if info.file == parts[0].file and info.offset <= parts[0].offset < info.offset + info.n_bytes:
            return info.n_bytes // parts[0].stride
    raise ModelFileError(f"{file.paths[0]}: an expert lies outside its tensor: the file is damaged")


def _check_weight_type(file: GgufFile, info: TensorInfo) -> None:
    if info.type not in WEIGHT_TYPES:
        raise ModelFileError(f"{file.paths[0]}: tensor {info.name} is {info.type.name}: ggml can't multiply that type")


def _text(info: TensorInfo) -> str:
    shape = list(info.shape)
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return str(shape)
