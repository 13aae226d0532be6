"""Writes small traces for the laboratory's tests, from rows that a test made up; knows no expected values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sluice.trace import TraceInfo, TraceWriter


class Row(NamedTuple):
    """One token in one layer."""

    step: int
    sequence: int
    position: int
    layer: int
    experts: tuple[int, ...]
    domain: str | None = None
    phase: str = "decode"


def info(layers: int, n_expert: int, top_k: int, name: str = "small", fingerprint: str = "") -> TraceInfo:
    moe = tuple(range(layers))
    return TraceInfo(fingerprint, "test", name, layers, moe, n_expert, top_k, (100,) * layers, "a test")


def write_rows(
    path: Path, rows: Sequence[Row], about: TraceInfo, *, block_bytes: int = 1 << 20, scores: bool = False
) -> Path:
    """`rows` ordered by step, then layer; all of one step and layer are one execution."""
    with TraceWriter(path, about, block_bytes=block_bytes, scores=scores) as writer:
        at = 0
        while at < len(rows):
            step = [row for row in rows[at:] if row.step == rows[at].step]
            at += len(step)
            tokens = sorted({(row.sequence, row.position) for row in step})
            writer.domains |= {row.sequence: row.domain for row in step if row.domain is not None}
            writer.begin_step(step[0].step, step[0].phase, *np.array(tokens, np.int32).T)
            for layer in sorted({row.layer for row in step}):
                own = [row for row in step if row.layer == layer]
                columns = np.array([tokens.index((row.sequence, row.position)) for row in own])
                experts = np.array([row.experts for row in own], np.int16)
                given = np.zeros((len(own), about.n_expert), np.float32) if scores else None
                writer.chose(layer, experts, given, columns)
                writer.weighed(np.full(experts.shape, 1 / experts.shape[1], np.float32))
    return path


def random_rows(
    rng: np.random.Generator, *, layers: int = 2, n_expert: int = 6, top_k: int = 2, sequences: int = 3,
    tokens: int = 20, domains: Sequence[str | None] = (None,), skip: float = 0.0,
) -> list[Row]:  # fmt: skip
    """Sequences side by side, a token of each a step. With `skip`, so many of a layer's rows are missing."""
    odds = rng.dirichlet(np.ones(n_expert), layers)
    rows = []
    for step in range(tokens):
        for layer in range(layers):
            for sequence in range(sequences):
                if rng.random() >= skip:
                    chosen = rng.choice(n_expert, top_k, replace=False, p=(odds[layer] + 0.02) / (1 + 0.02 * n_expert))
                    domain = domains[sequence % len(domains)]
                    rows.append(Row(step, sequence, step, layer, tuple(chosen.tolist()), domain))
    return rows
