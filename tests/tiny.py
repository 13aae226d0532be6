"""Writes tiny random MoE GGUF files in a fraction of a second; knows nothing of Sluice.

The routers are scaled so that different tokens choose different experts, the norms and attention so that every weight
matters to the logits, and the head so that the logits are not flat. What a quantised file computes with is
`TinyModel.weights`: the stored blocks dequantised to float32, which is what the oracles in float32 are built from.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np

T = gguf.GGMLQuantizationType

EOS = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", EOS)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
N_MERGES = 141
CORPUS = (
    "the river runs under the old bridge and the water is cold in the morning but when the sun stands over the hills "
    "there are people on the banks who wait for the boats that come from the other side with letters and bread and "
    "wine they sing while they work and in the evening they return to their houses where the fires are burning "
    "nothing here has changed for a hundred years except that the young have learned to read and now want to know "
    "what lies behind the mountains def return import for while if else class self None True print range len"
)


@dataclass(frozen=True)
class TinyConfig:
    """The hyperparameters of a tiny model, by the names that ggml's own loaders use."""

    arch: str
    n_layers: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff_exp: int
    n_ff_dense: int
    n_expert: int
    top_k: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    rms_eps: float
    dense_layers: tuple[int, ...]
    tied: bool
    fused: bool
    rope_scaling: Mapping[str, Any] | None


@dataclass(frozen=True)
class StoredModel:
    """A written file: its shards in order, and the stored form of every tensor."""

    paths: tuple[Path, ...]
    stored: dict[str, tuple[np.ndarray, T]]

    @property
    def path(self) -> Path:
        """The file, or the first shard."""
        return self.paths[0]

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """Every tensor as the file holds it, in float32, shaped [..., rows, columns]; a column is contiguous."""
        return {name: gguf.quants.dequantize(raw, t).astype(np.float32) for name, (raw, t) in self.stored.items()}


@dataclass(frozen=True)
class TinyModel(StoredModel):
    """A file of `write_tiny`, with its configuration."""

    config: TinyConfig


@cache
def _quantize_chunk() -> Any:
    spec = importlib.util.find_spec("libggml")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    library = next(p for pattern in ("lib*/libggml-base.*", "**/ggml-base.dll") for p in sorted(root.glob(pattern)))
    chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    i64, ptr = ctypes.c_int64, ctypes.c_void_p
    chunk.argtypes = [ctypes.c_int, ptr, ptr, i64, i64, i64, ptr]
    return chunk


def quantize(weights: np.ndarray, t: T) -> np.ndarray:
    """Stores float32 `weights` [..., rows, columns] as `t`: raw bytes [..., rows, bytes per row], or plain floats.

    Types that need an importance matrix (IQ1, IQ2_XXS, IQ2_XS) are not for this.
    """
    if t in (T.F32, T.F16):
        return weights.astype(np.float32 if t == T.F32 else np.float16)
    block, size = gguf.GGML_QUANT_SIZES[t]
    columns = weights.shape[-1]
    assert columns % block == 0, f"{t.name} needs rows of a multiple of {block}, not {columns}"
    source = np.ascontiguousarray(weights, np.float32)
    raw = np.empty((*weights.shape[:-1], columns // block * size), np.uint8)
    rows = source.size // columns
    written = _quantize_chunk()(int(t), source.ctypes.data, raw.ctypes.data, 0, rows, columns, None)
    assert written == raw.nbytes
    return raw


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 byte values."""
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    stand_in = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [stand_in[b] for b in range(256)]


@cache
def vocabulary(n_vocab: int | None = None) -> tuple[list[str], list[int], list[str]]:
    """A byte-level BPE vocabulary: (tokens, token types, merges); the last used ids are SPECIAL_TOKENS.

    The merges are trained on a few sentences. Ids past those 400 are filler marked unused.
    """
    alphabet = _byte_alphabet()
    space = alphabet[32]
    words = [(list(space + word), count) for word, count in Counter(CORPUS.split()).items()]
    tokens, merges = list(alphabet), []
    for _ in range(N_MERGES):
        pairs: Counter[tuple[str, str]] = Counter()
        for pieces, count in words:
            for pair in pairwise(pieces):
                pairs[pair] += count
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(f"{left} {right}")
        tokens.append(left + right)
        for pieces, _count in words:
            at = 0
            while at < len(pieces) - 1:
                if (pieces[at], pieces[at + 1]) == (left, right):
                    pieces[at : at + 2] = [left + right]
                at += 1
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    tokens += SPECIAL_TOKENS
    filler = max(0, (n_vocab or 0) - len(tokens))
    tokens += [f"[filler{i}]" for i in range(filler)]
    kinds += [gguf.TokenType.UNUSED] * filler
    assert n_vocab is None or n_vocab == len(tokens), f"n_vocab can't be less than {len(tokens) - filler}"
    return tokens, [int(kind) for kind in kinds], merges


def _pick(choice: T | Sequence[T], layer: int) -> T:
    """One type for every layer, or a sequence of types that the layers take in turn."""
    return choice if isinstance(choice, T) else choice[layer % len(choice)]


def write_tiny(
    path: Path,
    *,
    arch: str = "qwen3moe",
    n_layers: int = 3,
    n_embd: int = 256,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 64,
    n_ff_exp: int = 256,
    n_expert: int = 8,
    top_k: int = 2,
    n_vocab: int | None = None,
    n_ctx: int = 2048,
    expert_type: T | Sequence[T] = T.Q4_K,
    down_type: T | Sequence[T] | None = None,
    dense_type: T | Sequence[T] = T.Q8_0,
    head_type: T | None = None,
    router_type: T = T.F32,
    dense_layers: Sequence[int] = (),
    tied: bool = False,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_freqs: bool = False,
    split: int = 1,
    empty_first_shard: bool = False,
    alignment: int = 32,
    shuffled: bool = False,
    fused: bool = False,
    pre: str = "qwen2",
    chat_template: str | None = CHATML,
    seed: int = 0,
) -> TinyModel:
    """Writes a random model to `path` (with `split` > 1: to its shards, named as gguf-split names them).

    `arch` is "qwen3moe" or "llama" (Mixtral's layout). Types given as a sequence are taken by the layers in turn;
    `down_type` is `expert_type` unless given, `head_type` (embeddings and head) the first dense type. `dense_layers`
    have one plain FFN instead of experts. `fused` stores the same gate above the same up as one `ffn_gate_up_exps`
    [E, 2 ff, d].
    `rope_scaling` is {"type": "linear" | "yarn", "factor": f, "original_context_length": n}; `rope_freqs` adds the
    per-frequency divisors of llama 3. `shuffled` writes the tensors in a random order. llama.cpp b11549 reads
    neither `fused` nor `dense_layers` in these architectures.
    """
    assert arch in ("qwen3moe", "llama")
    rng = np.random.default_rng(seed)
    config = TinyConfig(
        arch=arch,
        n_layers=n_layers,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff_exp=n_ff_exp,
        # the llama architecture has one length for both
        n_ff_dense=2 * n_ff_exp if arch == "qwen3moe" else n_ff_exp,
        n_expert=n_expert,
        top_k=top_k,
        n_vocab=len(vocabulary(n_vocab)[0]),
        n_ctx=n_ctx,
        rope_base=10000.0,
        rms_eps=1e-6 if arch == "qwen3moe" else 1e-5,
        dense_layers=tuple(dense_layers),
        tied=tied,
        fused=fused,
        rope_scaling=rope_scaling,
    )
    head_type = head_type or _pick(dense_type, 0)
    stored: dict[str, tuple[np.ndarray, T]] = {}

    def matrix(name: str, t: T, *shape: int, gain: float = 1.0) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(gain * shape[-1] ** -0.5)
        stored[f"{name}.weight"] = (quantize(values, t), t)

    def norm(name: str, width: int) -> None:
        values = 1 + 0.1 * rng.standard_normal(width, dtype=np.float32)
        stored[f"{name}.weight"] = (values.astype(np.float32), T.F32)

    # Unit variance, so that the first layers' contributions stand beside the embedding; tied, the head reads it.
    matrix("token_embd", head_type, config.n_vocab, n_embd, gain=n_embd**0.5 * (0.2 if tied else 1.0))
    if rope_freqs:
        factors = np.geomspace(1.0, 8.0, head_dim // 2, dtype=np.float32)
        stored["rope_freqs.weight"] = (factors, T.F32)
    for layer in range(n_layers):
        block = f"blk.{layer}."
        dense, expert = _pick(dense_type, layer), _pick(expert_type, layer)
        down = expert if down_type is None else _pick(down_type, layer)
        norm(block + "attn_norm", n_embd)
        matrix(block + "attn_q", dense, n_head * head_dim, n_embd, gain=1.5)
        matrix(block + "attn_k", dense, n_head_kv * head_dim, n_embd, gain=1.5)
        matrix(block + "attn_v", dense, n_head_kv * head_dim, n_embd)
        matrix(block + "attn_output", dense, n_embd, n_head * head_dim)
        if arch == "qwen3moe":
            norm(block + "attn_q_norm", head_dim)
            norm(block + "attn_k_norm", head_dim)
        norm(block + "ffn_norm", n_embd)
        if layer in config.dense_layers:
            matrix(block + "ffn_gate", dense, config.n_ff_dense, n_embd)
            matrix(block + "ffn_up", dense, config.n_ff_dense, n_embd)
            matrix(block + "ffn_down", dense, n_embd, config.n_ff_dense, gain=2.0)
            continue
        matrix(block + "ffn_gate_inp", router_type, n_expert, n_embd, gain=2.0)
        matrix(block + "ffn_gate_exps", expert, n_expert, n_ff_exp, n_embd)
        matrix(block + "ffn_up_exps", expert, n_expert, n_ff_exp, n_embd)
        if fused:  # every type quantises within a row, so rows can be stacked after quantising
            parts = [stored.pop(f"{block}ffn_{part}_exps.weight")[0] for part in ("gate", "up")]
            stored[block + "ffn_gate_up_exps.weight"] = (np.concatenate(parts, axis=1), expert)
        matrix(block + "ffn_down_exps", down, n_expert, n_embd, n_ff_exp, gain=2.0)
    norm("output_norm", n_embd)
    if not tied:
        matrix("output", head_type, config.n_vocab, n_embd, gain=2.0)

    names = list(stored)
    if shuffled:
        names = [names[i] for i in rng.permutation(len(names))]
    per_shard = -(-len(names) // (split - empty_first_shard)) if split > 1 else 0
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=per_shard, small_first_shard=empty_first_shard)
    _metadata(writer, config, alignment, rope_scaling)
    add_tokenizer(writer, n_vocab, pre, chat_template)
    return TinyModel(write_tensors(writer, path, {name: stored[name] for name in names}, split), stored, config)


def write_tensors(
    writer: gguf.GGUFWriter, path: Path, stored: Mapping[str, tuple[np.ndarray, T]], split: int
) -> tuple[Path, ...]:
    """Finishes a file with its tensors in the order given; the paths of its `split` shards."""
    for name, (raw, t) in stored.items():
        writer.add_tensor(name, raw, raw_dtype=t)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shard_name = f"{path.with_suffix('')}-{{:05d}}-of-{split:05d}.gguf"
    paths = (path,) if split == 1 else tuple(Path(shard_name.format(i + 1)) for i in range(split))
    assert all(p.exists() for p in paths), f"{len(stored)} tensors don't fill {split} shards evenly"
    return paths


def _metadata(
    writer: gguf.GGUFWriter, config: TinyConfig, alignment: int, rope_scaling: Mapping[str, Any] | None
) -> None:
    writer.add_name(f"tiny-{config.arch}")
    writer.add_custom_alignment(alignment)
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.n_ff_dense)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head_kv)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_expert_count(config.n_expert)
    writer.add_expert_used_count(config.top_k)
    writer.add_vocab_size(config.n_vocab)
    if config.arch == "qwen3moe":
        writer.add_expert_feed_forward_length(config.n_ff_exp)
    if rope_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_scaling["type"]))
        writer.add_rope_scaling_factor(rope_scaling["factor"])
        if "original_context_length" in rope_scaling:
            writer.add_rope_scaling_orig_ctx_len(rope_scaling["original_context_length"])


def add_tokenizer(writer: gguf.GGUFWriter, n_vocab: int | None, pre: str, chat_template: str | None) -> None:
    """Adds the metadata of `vocabulary(n_vocab)`'s tokenizer."""
    tokens, kinds, merges = vocabulary(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(SPECIAL_TOKENS[0]))
    writer.add_eos_token_id(tokens.index(EOS))
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
