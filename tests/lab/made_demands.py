"""Makes demands of rows without writing a file, and random rows of prompts and streams; knows no expected values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from hypothesis import strategies as st
from small_traces import Row, info

from sluice.lab.replay import Demands
from sluice.trace import TraceBatch, TraceInfo, TraceReader


class RowReader:
    """What a TraceReader gives of `rows`, in batches that end at `cuts`."""

    path = Path("made.parquet")

    def __init__(self, rows: Sequence[Row], about: TraceInfo, cuts: Sequence[int] = ()) -> None:
        self.info = about
        self._rows = rows
        self._cuts = sorted({0, len(rows), *cuts})

    def batches(self) -> Iterator[TraceBatch]:
        for first, last in zip(self._cuts, self._cuts[1:], strict=False):
            rows = self._rows[first:last]
            yield TraceBatch(
                step=np.array([row.step for row in rows], np.int64),
                sequence=np.array([row.sequence for row in rows], np.int32),
                position=np.array([row.position for row in rows], np.int32),
                decode=np.array([row.phase == "decode" for row in rows]),
                layer=np.array([row.layer for row in rows], np.int16),
                offsets=np.cumsum([0, *(len(row.experts) for row in rows)]),
                experts=np.array([e for row in rows for e in row.experts], np.int16),
                weights=None,
                scores=None,
                domain=np.full(len(rows), -1, np.int32),
            )


def reader_of(rows: Sequence[Row], about: TraceInfo, cuts: Sequence[int] = ()) -> TraceReader:
    return cast(TraceReader, RowReader(rows, about, cuts))


def demands_of(rows: Sequence[Row], about: TraceInfo) -> Demands:
    return Demands.of(reader_of(rows, about))


def runs(
    rng: np.random.Generator, *, layers: int, n_expert: int, top_k: int, steps: int, streams: int, prefill: float = 0.0
) -> list[Row]:  # fmt: skip
    """Steps of `streams` tokens, or with probability `prefill` of up to 9 tokens of some streams; popular experts."""
    odds = rng.dirichlet(np.full(n_expert, 0.5), layers) + 0.01
    odds /= odds.sum(axis=1, keepdims=True)
    at = [0] * streams
    rows: list[Row] = []
    for step in range(steps):
        prompt = rng.random() < prefill
        fed: list[tuple[int, int]] = []  # stream, tokens
        for s in range(streams):
            if not prompt:
                fed.append((s, 1))
            elif rng.random() < 0.7:
                fed.append((s, int(rng.integers(1, 10))))
        for layer in range(layers):
            for s, n in fed:
                kept = 1 if layer == layers - 1 else n  # of the last layer only what logits are wanted of
                for i in range(n - kept, n):
                    experts = rng.choice(n_expert, top_k, replace=False, p=odds[layer])
                    phase = "prefill" if prompt else "decode"
                    rows.append(Row(step, s, at[s] + i, layer, tuple(experts.tolist()), None, phase))
        for s, n in fed:
            at[s] += n
    return rows


@st.composite
def small_runs(draw: st.DrawFn, *, prefill: bool) -> tuple[list[Row], TraceInfo]:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    layers, n_expert = draw(st.integers(2, 4)), draw(st.integers(2, 9))
    top_k = draw(st.integers(1, min(3, n_expert)))
    rows = runs(
        rng, layers=layers, n_expert=n_expert, top_k=top_k, steps=draw(st.integers(1, 25)),
        streams=draw(st.integers(1, 3)), prefill=0.3 if prefill else 0.0,
    )  # fmt: skip
    return rows or [Row(0, 0, 0, 0, (0,))], info(layers, n_expert, top_k)
