"""Token sequences that arms walk: prompts, what follows them, and which steps are measured. Knows no engine.

A walk's file is how one arm's tokens reach another: what a streamed arm sampled (--dump) is what a resident arm is
forced along (--replay). Texts that stay in one subject, or change it, are made up here too; on files of synth.py a
token's cluster is its id modulo CLUSTERS.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

CLUSTERS = 16


@dataclass
class Walk:
    """`prompts[s]` and `tokens[s]` belong to stream s; step i decodes `tokens[s][i]` of every stream at once.

    `spans` are the measured steps, each (first, end). All streams have equally many tokens.
    """

    prompts: list[list[int]]
    tokens: list[list[int]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def n_steps(self) -> int:
        return len(self.tokens[0]) if self.tokens else 0

    @property
    def longest(self) -> int:
        """Positions that the longest stream takes."""
        return max(map(len, self.prompts)) + self.n_steps


def save(path: Path, walks: Sequence[Walk]) -> None:
    path.write_text(json.dumps([asdict(walk) for walk in walks]))


def load(path: Path) -> list[Walk]:
    """The walks of a file that `save` wrote."""
    return [
        Walk(one["prompts"], one["tokens"], [(first, end) for first, end in one["spans"]])
        for one in json.loads(path.read_text())
    ]


def prompt_ids(n: int, stream: int, n_vocab: int) -> list[int]:
    """A stream's made-up prompt, all of one cluster; 16 streams in turn have all 16 clusters."""
    return [(100 + stream + CLUSTERS * i) % n_vocab for i in range(n)]


def subject(cluster: int, n: int, n_vocab: int, rng: np.random.Generator) -> list[int]:
    """`n` random tokens of one cluster."""
    return (rng.integers(n_vocab // CLUSTERS, size=n) * CLUSTERS + cluster % CLUSTERS).tolist()


def changing(n: int, n_vocab: int, rng: np.random.Generator, stay: float = 0.95) -> list[int]:
    """`n` tokens that stay in their cluster with probability `stay` each, as the model itself would write."""
    ids, cluster = [], int(rng.integers(CLUSTERS))
    for _ in range(n):
        if rng.random() > stay:
            cluster = int(rng.integers(CLUSTERS))
        ids += subject(cluster, 1, n_vocab, rng)
    return ids
