"""Makes traces with the routing that is published of Qwen3-30B-A3B, of any length. Knows no model file.

Each token's score for expert e of layer l is a·u[l, e] + b·m[l, topic, e] + c·own, of unit variance each, with
a² + b² + c² = 1, and its experts are the top_k highest. u makes some experts popular, m makes tokens of one topic
alike, and `own` is drawn anew for each token. A token stays in its topic with probability `stay`, else it draws one. m
and own are normal; u is ±|normal|^tail. With a tail of 1 traffic would either be less concentrated at the head or
shorter at the tail than what is published.

docs/laboratory.md has the figures that the default parameters were fitted to, and those they reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sluice.errors import InputError
from sluice.trace import TraceInfo, TraceWriter

Array = np.ndarray[Any, Any]

EXPERT_BYTES = 3 * 2048 * 768 * 144 // 256  # one of Qwen3-30B-A3B's in Q4_K: 144 bytes for 256 weights
MAX_SCORES = 1 << 22  # layers × experts, and times the topics
_GAIN = 2.0  # of scores, before the softmax that gives weights
_SCORES = 1 << 19  # drawn at once
_LAYERS_A, _TOPICS, _TOKENS = range(3)  # independent random streams of one seed


@dataclass(frozen=True)
class Shape:
    """What a synthetic router is like. The defaults are fitted to the figures published of Qwen3-30B-A3B."""

    layers: int = 48
    experts: int = 128
    top_k: int = 8
    topics: int = 24
    popularity: float = 0.614  # a
    tail: float = 1.2
    topicality: float = 0.638  # b
    stay: float = 0.83
    sequence_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.experts, self.top_k, self.topics, self.sequence_tokens) < 1:
            raise InputError("layers, experts, top-k, topics and tokens of a sequence are whole numbers from 1 on")
        if self.top_k > self.experts:
            raise InputError(f"top-k {self.top_k} is more than the {self.experts} experts: give less")
        if self.layers * self.experts * self.topics > MAX_SCORES:
            raise InputError(f"layers × experts × topics is more than {MAX_SCORES}: give less")
        if min(self.popularity, self.topicality) < 0 or self.popularity**2 + self.topicality**2 > 1:
            raise InputError("popularity and topicality are at least 0, and their squares at most 1 together")
        if not 0.1 <= self.tail <= 10:
            raise InputError("tail is a number from 0.1 to 10")
        if not 0 <= self.stay <= 1 or self.seed < 0:
            raise InputError("stay is a probability, and seed a whole number from 0 on")


class Tokens(NamedTuple):
    """Consecutive tokens: each is one step of decoding."""

    sequence: Array  # [n] int32
    position: Array  # [n] int32
    experts: Array  # [n, layers, top_k] int16, highest score first
    weights: Array  # [n, layers, top_k] float32, softmax over the chosen


def tokens(shape: Shape, n_tokens: int) -> Iterator[Tokens]:
    """`n_tokens` tokens in blocks. One seed gives the same tokens always, and a longer trace begins with a shorter."""
    fixed, topics, own = (np.random.default_rng((shape.seed, part)) for part in (_LAYERS_A, _TOPICS, _TOKENS))
    a, b = shape.popularity, shape.topicality
    c = np.float32(max(0.0, 1 - a**2 - b**2) ** 0.5)
    normal = fixed.standard_normal((shape.layers, shape.experts))
    popular = np.sign(normal) * np.abs(normal) ** shape.tail
    popular *= a / np.sqrt(np.mean(popular**2))
    of_topic = b * fixed.standard_normal((shape.topics, shape.layers, shape.experts))
    common = (popular + of_topic).astype(np.float32)  # [topics, layers, experts]
    size = max(1, _SCORES // (shape.layers * shape.experts))
    topic = 0
    for first in range(0, n_tokens, size):
        index = np.arange(first, min(first + size, n_tokens))
        sequence, position = np.divmod(index, shape.sequence_tokens)
        block = np.empty(len(index), np.int64)
        for i, (moved, new) in enumerate(topics.random((len(index), 2))):
            if position[i] == 0 or moved >= shape.stay:
                topic = int(new * shape.topics)
            block[i] = topic
        scores = own.standard_normal((len(index), shape.layers, shape.experts), np.float32)
        scores *= c
        scores += common[block]
        chosen = np.argpartition(-scores, shape.top_k - 1, axis=-1)[..., : shape.top_k]
        value = np.take_along_axis(scores, chosen, -1)
        rank = np.argsort(-value, axis=-1, kind="stable")
        chosen, value = np.take_along_axis(chosen, rank, -1), np.take_along_axis(value, rank, -1)
        weights = np.exp(_GAIN * (value - value[..., :1]))
        weights /= weights.sum(axis=-1, keepdims=True)
        yield Tokens(sequence.astype(np.int32), position.astype(np.int32), chosen.astype(np.int16), weights)


def info(shape: Shape) -> TraceInfo:
    """What a synthetic trace says of its model."""
    layers = tuple(range(shape.layers))
    return TraceInfo(
        fingerprint="", architecture="synthetic", name=f"synthetic {shape.layers} × {shape.experts}, top {shape.top_k}",
        n_layers=shape.layers, moe_layers=layers, n_expert=shape.experts, top_k=shape.top_k,
        expert_bytes=(EXPERT_BYTES,) * shape.layers, source=f"sluice trace synth ({shape})",
    )  # fmt: skip


def write(path: str | Path, shape: Shape, n_tokens: int, *, force: bool = False) -> None:
    """Write a trace to PATH, in bounded memory. Raises InputError if PATH exists and not `force`."""
    if n_tokens < 1:
        raise InputError("a trace has at least one token: give more")
    step = 0
    with TraceWriter(path, info(shape), force=force) as writer:
        for block in tokens(shape, n_tokens):
            for i in range(len(block.sequence)):
                one = slice(i, i + 1)
                writer.begin_step(step, "decode", block.sequence[one], block.position[one])
                for layer in range(shape.layers):
                    writer.chose(layer, block.experts[one, layer])
                    writer.weighed(block.weights[one, layer])
                step += 1
