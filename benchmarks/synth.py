"""Writes a synthetic qwen3moe GGUF of any size, to measure with: valid K-quants, routing of a chosen locality.

    python benchmarks/synth.py OUT.gguf                                  # Qwen3-30B-A3B's shape: 18.2 GB, a minute
    python benchmarks/synth.py OUT.gguf --layers 8                       # 3.1 GB
    python benchmarks/synth.py OUT.gguf --layers 4 --experts 16          # 318 MB

Theory. Plain random weights route nearly every token to the same experts, which flatters any cache. Here the residual
stream is dominated by the token's embedding, a·u + b·m[cluster] + c·noise[token] with a² + b² + c² = 1 and all of unit
variance: u is common to all tokens (some experts are popular), m is shared by the 1/16 of the vocabulary whose ids are
equal modulo 16 (temporal locality), the noise is the token's own. The output head makes the next sampled token stay in
its cluster with probability --stay, if sampled at temperature 1 with nothing cut off. Attention and experts add little
to the residual, so the next layer's router is nearly perfectly predictable on these files, which a real model's is not.
--a 0 --b 0 gives uniform, independent routing.

The defaults come close to what is published of Qwen3-30B-A3B's routing: an LRU over 13.4 % of the experts hits about
65 %, pinning the hottest 58 %, 95 % of the traffic goes to half of the experts, and adjacent tokens share 0.42 of
theirs. The last line is JSON: these statistics of a simulated walk. llama.cpp loads the file too.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from common import emit, log, run_main
from walks import CLUSTERS

from sluice.errors import InputError
from sluice.ggml import Library, load_library

T = gguf.GGMLQuantizationType
HEAD_DIM = 128
SUPER_BLOCK = 256  # weights in a block of a K-quantisation: rows are whole blocks
# Distinct random matrices that the experts are drawn from: what is read and computed must be real, not unique.
N_UP, N_DOWN = 24, 12
WALK_STEPS = 600
CACHED_SHARE = 0.134  # of all experts, for the statistics
WARM_UP_SHARE = 0.2  # of the walk, not counted for the LRU


class Planned(NamedTuple):
    """A tensor to write: its numpy shape (of bytes where quantised), and what makes it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    type: T
    make: Callable[[], np.ndarray]


class Synthesis:
    """A model's random parts, drawn from one seed in a fixed order, and the plan of its file."""

    def __init__(self, args: argparse.Namespace, library: Library) -> None:
        self.args = args
        self.library = library
        self.rng = rng = np.random.default_rng(args.seed)
        dim, vocab = args.dim, args.vocab
        cluster = np.arange(vocab) % CLUSTERS
        means = rng.standard_normal((CLUSTERS, dim)).astype(np.float32)
        own = max(0.0, 1 - args.a**2 - args.b**2) ** 0.5
        common = args.a * rng.standard_normal(dim) + args.b * means[cluster]
        self.embedding = (common + own * rng.standard_normal((vocab, dim))).astype(np.float32)  # [n_vocab, dim]
        # a cluster's own logits stand above the others' by ln(stay / (1 - stay) × (CLUSTERS - 1))
        lift = np.log(args.stay / (1 - args.stay) * (CLUSTERS - 1)) / args.b if args.b else 0.0
        head = lift / dim * means[cluster] + self._normal(vocab, dim, 1e-3 * dim**-0.5)
        self.stored_embedding, self.stored_head = (self._quantise(w, T.Q6_K) for w in (self.embedding, head))
        q_dim, kv_dim = args.heads * HEAD_DIM, args.kv_heads * HEAD_DIM
        self.attention = {  # one of each, shared by all layers
            "attn_q": (self._quantise(self._normal(q_dim, dim), T.Q4_K), T.Q4_K),
            "attn_k": (self._quantise(self._normal(kv_dim, dim), T.Q4_K), T.Q4_K),
            "attn_v": (self._quantise(self._normal(kv_dim, dim), T.Q6_K), T.Q6_K),
            "attn_output": (self._quantise(self._normal(dim, q_dim, 0.02 * q_dim**-0.5), T.Q4_K), T.Q4_K),
        }
        down_scale = 0.05 * args.ff**-0.5
        self.up = [self._quantise(self._normal(args.ff, dim), T.Q4_K) for _ in range(N_UP)]
        self.down = {
            t: [self._quantise(self._normal(dim, args.ff, down_scale), t) for _ in range(N_DOWN)]
            for t in (T.Q4_K, T.Q6_K)
        }
        self.routers = [self._normal(args.experts, dim, 2.0 * dim**-0.5) for _ in range(args.layers)]

    def _normal(self, rows: int, columns: int, scale: float | None = None) -> np.ndarray:
        values = self.rng.standard_normal((rows, columns)) * (columns**-0.5 if scale is None else scale)
        return values.astype(np.float32)

    def _quantise(self, weights: np.ndarray, t: T) -> np.ndarray:
        """Blocks of `weights` [rows, columns], as bytes [rows, bytes per row]."""
        rows, columns = weights.shape
        block, size = gguf.GGML_QUANT_SIZES[t]
        raw = np.empty((rows, columns // block * size), np.uint8)
        source = np.ascontiguousarray(weights, np.float32)
        written = self.library.ggml_quantize_chunk(int(t), source.ctypes.data, raw.ctypes.data, 0, rows, columns, None)
        assert written == raw.nbytes
        return raw

    def plan(self) -> Iterator[Planned]:
        """Every tensor, in the file's order."""

        def whole(name: str, data: np.ndarray, t: T = T.F32) -> Planned:
            return Planned(f"{name}.weight", data.shape, t, lambda: data)

        args = self.args
        ones = np.ones(args.dim, np.float32), np.ones(HEAD_DIM, np.float32)
        yield whole("token_embd", self.stored_embedding, T.Q6_K)
        yield whole("output", self.stored_head, T.Q6_K)
        yield whole("output_norm", ones[0])
        for layer, router in enumerate(self.routers):
            at = f"blk.{layer}."
            yield whole(at + "attn_norm", ones[0])
            yield whole(at + "ffn_norm", ones[0])
            for name, (data, t) in self.attention.items():
                yield whole(at + name, data, t)
            yield whole(at + "attn_q_norm", ones[1])
            yield whole(at + "attn_k_norm", ones[1])
            yield whole(at + "ffn_gate_inp", router)
            down = T.Q6_K if layer % 2 == 0 else T.Q4_K
            yield self._stack(at + "ffn_gate_exps", self.up, T.Q4_K, layer * 7)
            yield self._stack(at + "ffn_up_exps", self.up, T.Q4_K, layer * 7 + 1)
            yield self._stack(at + "ffn_down_exps", self.down[down], down, layer * 7 + 2)

    def _stack(self, name: str, choices: list[np.ndarray], t: T, salt: int) -> Planned:
        n = self.args.experts

        def make() -> np.ndarray:
            picked = np.random.default_rng(salt).integers(0, len(choices), n)
            return np.stack([choices[i] for i in picked])

        return Planned(f"{name}.weight", (n, *choices[0].shape), t, make)

    # --- statistics

    def statistics(self) -> dict[str, float]:
        """How a walk of sampled tokens is routed, by the embeddings alone."""
        args, rng = self.args, self.rng
        walk = [0]
        for _ in range(WALK_STEPS - 1):
            if not args.b:
                walk.append(int(rng.integers(args.vocab)))
                continue
            cluster = walk[-1] % CLUSTERS if rng.random() < args.stay else int(rng.integers(CLUSTERS))
            walk.append(int(rng.integers(args.vocab // CLUSTERS)) * CLUSTERS + cluster)
        x = self.embedding[walk]
        x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True))
        k = args.top_k
        chosen = [np.argpartition(-(x @ router.T), k - 1, axis=1)[:, :k] for router in self.routers]
        routes = np.stack(chosen, axis=1)  # [n_steps, n_layers, top_k]
        counts = np.stack([np.bincount(routes[:, i].ravel(), minlength=args.experts) for i in range(args.layers)])
        share = counts / counts.sum(axis=1, keepdims=True) * k  # of the layer's tokens that chose the expert
        shared = (routes[1:, :, :, None] == routes[:-1, :, None, :]).any(axis=3).mean()
        ranked = np.cumsum(np.sort(counts.ravel())[::-1]) / counts.sum()
        capacity = max(1, int(CACHED_SHARE * counts.size))
        return {
            "adjacent": float(shared),
            "adjacent_over_chance": float(shared / np.mean((share**2).sum(axis=1) / k)),
            "share_of_experts_for_95": float((np.searchsorted(ranked, 0.95) + 1) / counts.size),
            "pinned_hit_at_13.4": float(ranked[capacity - 1]),
            "lru_hit_at_13.4": _lru_hit_rate(routes, capacity),
        }


def _lru_hit_rate(routes: np.ndarray, capacity: int) -> float:
    """Share of demands that an LRU of `capacity` experts over all layers holds, once warm."""
    cached: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = demands = 0
    for step, layers in enumerate(routes.tolist()):
        warm = step >= WARM_UP_SHARE * len(routes)
        for key in ((layer, expert) for layer, experts in enumerate(layers) for expert in experts):
            demands += warm
            if key in cached:
                cached.move_to_end(key)
                hits += warm
                continue
            if len(cached) >= capacity:
                cached.popitem(last=False)
            cached[key] = None
    return hits / demands


def write(synthesis: Synthesis, out: Path) -> None:
    """Write the whole file; nothing is left of it if that fails."""
    args = synthesis.args
    writer = gguf.GGUFWriter(out, "qwen3moe")
    writer.add_name("synthetic-qwen3moe")
    writer.add_context_length(32768)
    writer.add_embedding_length(args.dim)
    writer.add_block_count(args.layers)
    writer.add_feed_forward_length(args.ff * 8)
    writer.add_head_count(args.heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(args.experts)
    writer.add_expert_used_count(args.top_k)
    writer.add_expert_feed_forward_length(args.ff)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    end = args.vocab - 1
    writer.add_token_list(byte_tokens() + [f"tok{i}" for i in range(args.vocab - 257)] + ["<|end|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * end + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["t o"])
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_add_bos_token(False)
    plan = list(synthesis.plan())
    for tensor in plan:
        dtype = np.dtype(np.float32 if tensor.type == T.F32 else np.uint8)
        n_bytes = int(np.prod(tensor.shape)) * dtype.itemsize
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, n_bytes, raw_dtype=tensor.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in plan:
            writer.write_tensor_data(tensor.make())
            if "ffn_down" in tensor.name:
                log(f"layer {tensor.name.split('.')[1]} of {args.layers}")
        writer.close()
    except BaseException:
        with suppress(OSError):
            writer.close()
        out.unlink(missing_ok=True)
        raise


def byte_tokens() -> list[str]:
    """GPT-2's spelling of the 256 bytes: printable ones as they are, the others from U+0100 on."""
    printable = {*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    shape = {"layers": 48, "experts": 128, "ff": 768, "dim": 2048, "top-k": 8, "heads": 32, "kv-heads": 4}
    for name, default in (shape | {"vocab": 32000, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("a", 0.6), ("b", 0.6), ("stay", 0.95)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    args = parser.parse_args()
    if min(args.layers, args.experts, args.top_k, args.kv_heads) < 1 or args.top_k > args.experts:
        parser.error("layers, experts, top-k and kv-heads must be at least 1, and top-k no more than experts")
    if args.heads % args.kv_heads or args.dim % SUPER_BLOCK or args.ff % SUPER_BLOCK or not (args.dim and args.ff):
        parser.error(f"dim and ff must be multiples of {SUPER_BLOCK}, and heads of kv-heads")
    if args.vocab < 257 or not 0 < args.stay < 1 or args.a**2 + args.b**2 > 1 or min(args.a, args.b) < 0:
        parser.error("vocab must be at least 257, stay between 0 and 1, a and b at least 0 with a² + b² at most 1")
    if args.out.exists() and not args.force:
        raise InputError(f"{args.out} exists: give another name, or --force to overwrite it")
    log("drawing weights")
    synthesis = Synthesis(args, load_library())
    write(synthesis, args.out)
    figures = {name: round(value, 3) for name, value in synthesis.statistics().items()}
    emit({"path": str(args.out), "bytes": args.out.stat().st_size, **figures})


if __name__ == "__main__":
    run_main(main)
