"""Writes a synthetic GGUF with the shape of a real model, to measure with: valid blocks, routing of a chosen locality.

    python benchmarks/synth.py OUT.gguf                                  # Qwen3-30B-A3B's shape: 18.2 GB, a minute
    python benchmarks/synth.py OUT.gguf --model qwen3.6-35b              # 21.2 GB; ling-3.0-tiny 4.8, gpt-oss-20b 12.1,
                                                                         # qwen3-235b (12 of its layers) 18.9
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
theirs. The other models' a and b are chosen for about the same hit rate of that LRU, nothing being published of theirs.
The last line is JSON: these statistics of a simulated walk. llama.cpp loads the files too.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from common import emit, log, run_main
from synth_models import MODELS, Metadata, Model, Role, Shape, Tensor
from walks import CLUSTERS

from sluice.errors import InputError
from sluice.ggml import Library, load_library

T = gguf.GGMLQuantizationType
# Distinct random matrices that the experts are drawn from: what is read and computed must be real, not unique.
POOLS = {Role.UP: 24, Role.DOWN: 12}
CHUNK_ROWS = 8192  # of the vocabulary: drawn and quantised at once
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

    def __init__(self, model: Model, args: argparse.Namespace, library: Library) -> None:
        self.model, self.args, self.library = model, args, library
        self.shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
        self.layers = [list(model.layer(self.shape, layer)) for layer in range(self.shape.layers)]
        for tensor in (tensor for layer in self.layers for tensor in layer):
            _check(tensor.name, tensor.shape[-1], tensor.type)
        for name, t in (("token_embd", model.embedding), ("output", model.head)):
            _check(name, self.shape.dim, t)
        self.rng = np.random.default_rng(args.seed)
        self.embedding, self.head = self._vocabulary()
        # One draw, or one pool, for all layers that have the same tensor
        self.shared = {self._key(t): self._stored(t) for t in self._first_of_each(Role.SHARED)}
        self.pools = {
            self._key(t): [self._stored(t, t.shape[1:]) for _ in range(n)]
            for role, n in POOLS.items()
            for t in sorted(self._first_of_each(role), key=lambda t: t.type)
        }
        # One of each per layer that has experts
        self.routers = {i: self._draw(t, t.shape) for i, t in self._of_layers(Role.ROUTER)}
        self.biases = {i: self._draw(t, t.shape) for i, t in self._of_layers(Role.ROUTER_BIAS)}

    # --- drawing

    def _vocabulary(self) -> tuple[np.ndarray, np.ndarray]:
        """The stored embedding and output head, [n_vocab, bytes per row]."""
        args, rng, dim = self.args, self.rng, self.shape.dim
        means = rng.standard_normal((CLUSTERS, dim)).astype(np.float32)
        own = max(0.0, 1 - args.a**2 - args.b**2) ** 0.5
        common = args.a * rng.standard_normal(dim)
        # a cluster's own logits stand above the others' by ln(stay / (1 - stay) × (CLUSTERS - 1))
        lift = np.log(args.stay / (1 - args.stay) * (CLUSTERS - 1)) / args.b if args.b else 0.0

        def embedded(ids: np.ndarray) -> np.ndarray:
            return common + args.b * means[ids % CLUSTERS] + own * rng.standard_normal((len(ids), dim))

        def heads(ids: np.ndarray) -> np.ndarray:
            noise = rng.standard_normal((len(ids), dim)) * (1e-3 * dim**-0.5)
            return lift / dim * means[ids % CLUSTERS] + noise.astype(np.float32)

        chunks = np.split(np.arange(args.vocab), range(CHUNK_ROWS, args.vocab, CHUNK_ROWS))
        embedding = np.concatenate([self._quantise(embedded(ids), self.model.embedding) for ids in chunks])
        return embedding, np.concatenate([self._quantise(heads(ids), self.model.head) for ids in chunks])

    def _of_layers(self, role: Role) -> Iterator[tuple[int, Tensor]]:
        return ((i, tensor) for i, layer in enumerate(self.layers) for tensor in layer if tensor.role is role)

    def _first_of_each(self, role: Role) -> list[Tensor]:
        """One of all tensors of a role that share their draw, or their pool."""
        return list({self._key(tensor): tensor for _, tensor in self._of_layers(role)}.values())

    @staticmethod
    def _key(tensor: Tensor) -> Tensor:
        """What decides the drawn values: gate and up matrices come from one pool."""
        return tensor._replace(name="") if tensor.role in POOLS else tensor

    def _draw(self, tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
        if not tensor.scale:
            return np.full(shape, tensor.mean, np.float32)
        return (self.rng.standard_normal(shape) * tensor.scale + tensor.mean).astype(np.float32)

    def _stored(self, tensor: Tensor, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A tensor as it is stored, or one of its stack."""
        values = self._draw(tensor, tensor.shape if shape is None else shape)
        return values if tensor.type == T.F32 else self._quantise(values, tensor.type)

    def _quantise(self, weights: np.ndarray, t: T) -> np.ndarray:
        """Blocks of `weights` [..., columns], as bytes [..., bytes per row]."""
        *rows, columns = weights.shape
        block, size = gguf.GGML_QUANT_SIZES[t]
        raw = np.empty((*rows, columns // block * size), np.uint8)
        source = np.ascontiguousarray(weights, np.float32)
        n_rows = int(np.prod(rows))
        written = self.library.ggml_quantize_chunk(
            int(t), source.ctypes.data, raw.ctypes.data, 0, n_rows, columns, None
        )
        assert written == raw.nbytes
        return raw

    # --- the file

    def plan(self) -> Iterator[Planned]:
        """Every tensor, in the file's order."""

        def whole(name: str, data: np.ndarray, t: T = T.F32) -> Planned:
            return Planned(name, data.shape, t, lambda: data)

        yield whole("token_embd.weight", self.embedding, self.model.embedding)
        yield whole("output.weight", self.head, self.model.head)
        yield whole("output_norm.weight", np.ones(self.shape.dim, np.float32))
        for i, layer in enumerate(self.layers):
            salt = i * 7
            for tensor in layer:
                name = f"blk.{i}.{tensor.name}"
                if tensor.role is Role.ROUTER:
                    yield whole(name, self.routers[i])
                elif tensor.role is Role.ROUTER_BIAS:
                    yield whole(name, self.biases[i])
                elif tensor.role is Role.SHARED:
                    yield whole(name, self.shared[tensor], tensor.type)
                else:
                    yield self._stack(name, self.pools[self._key(tensor)], tensor, salt)
                    salt += 1

    def _stack(self, name: str, pool: list[np.ndarray], tensor: Tensor, salt: int) -> Planned:
        n = self.shape.experts

        def make() -> np.ndarray:
            picked = np.random.default_rng(salt).integers(0, len(pool), n)
            return np.stack([pool[i] for i in picked])

        return Planned(name, (n, *pool[0].shape), tensor.type, make)

    # --- statistics

    def statistics(self) -> dict[str, float]:
        """How a walk of sampled tokens is routed, by the embeddings alone."""
        args, rng, shape = self.args, self.rng, self.shape
        walk = [0]
        for _ in range(WALK_STEPS - 1):
            if not args.b:
                walk.append(int(rng.integers(args.vocab)))
                continue
            cluster = walk[-1] % CLUSTERS if rng.random() < args.stay else int(rng.integers(CLUSTERS))
            walk.append(int(rng.integers(args.vocab // CLUSTERS)) * CLUSTERS + cluster)
        x = gguf.quants.dequantize(self.embedding[walk], self.model.embedding)
        x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True))
        k, none = shape.top_k, np.zeros(shape.experts, np.float32)
        scores = [self.model.scores(x @ router.T, self.biases.get(i, none)) for i, router in self.routers.items()]
        chosen = [np.argpartition(-one, k - 1, axis=1)[:, :k] for one in scores]
        routes = np.stack(chosen, axis=1)  # [n_steps, layers with experts, top_k]
        counts = np.stack([np.bincount(one.ravel(), minlength=shape.experts) for one in chosen])
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


def _check(name: str, columns: int, t: T) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[t]
    if columns % block:
        raise InputError(
            f"{name} has rows of {columns} weights, no multiple of {t.name}'s {block}: choose another shape"
        )


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
    model, shape = synthesis.model, synthesis.shape
    writer = gguf.GGUFWriter(out, model.arch)
    writer.add_name(f"synthetic-{model.arch}")
    _add_metadata(writer, {f"{model.arch}.{key}": value for key, value in model.metadata(shape).items()})
    writer.add_file_type(model.file_type)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(model.pre)
    end = shape.vocab - 1
    writer.add_token_list(byte_tokens() + [f"tok{i}" for i in range(shape.vocab - 257)] + ["<|end|>"])
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
            if "ffn_down_exps.weight" in tensor.name:
                log(f"layer {tensor.name.split('.')[1]} of {shape.layers}")
        writer.close()
    except BaseException:
        with suppress(OSError):
            writer.close()
        out.unlink(missing_ok=True)
        raise


def _add_metadata(writer: gguf.GGUFWriter, metadata: Metadata) -> None:
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)


def byte_tokens() -> list[str]:
    """GPT-2's spelling of the 256 bytes: printable ones as they are, the others from U+0100 on."""
    printable = {*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b", help="whose shape (default: %(default)s)")
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help="default: the model's")
    for name in ("a", "b"):
        parser.add_argument(f"--{name}", type=float, help="default: the model's")
    parser.add_argument("--stay", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    args = parser.parse_args()
    model = MODELS[args.model]
    for name, value in {"a": model.a, "b": model.b, **vars(model.shape)}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(getattr(args, field.name) for field in fields(Shape)) < 1 or args.heads % args.kv_heads:
        parser.error("layers, experts, ff and so on must be at least 1, and heads a multiple of kv-heads")
    if args.layers < model.least_layers:
        parser.error(f"{args.model} needs at least {model.least_layers} layers, to have one of every kind")
    if model.groups > 1 and (args.experts % model.groups or args.experts < 2 * model.groups):
        parser.error(f"experts must be a multiple of {model.groups}, and at least {2 * model.groups}")
    if args.top_k > args.experts // model.groups * model.groups_used:
        of_groups = f" of {model.groups_used} groups" if model.groups > 1 else ""
        parser.error(f"top-k must be no more than the experts{of_groups}")
    if args.vocab < 257 or not 0 < args.stay < 1 or args.a**2 + args.b**2 > 1 or min(args.a, args.b) < 0:
        parser.error("vocab must be at least 257, stay between 0 and 1, a and b at least 0 with a² + b² at most 1")
    if args.out.exists() and not args.force:
        raise InputError(f"{args.out} exists: give another name, or --force to overwrite it")
    log("drawing weights")
    synthesis = Synthesis(model, args, load_library())
    write(synthesis, args.out)
    figures = {name: round(value, 3) for name, value in synthesis.statistics().items()}
    emit({"path": str(args.out), "bytes": args.out.stat().st_size, **figures})


if __name__ == "__main__":
    run_main(main)
