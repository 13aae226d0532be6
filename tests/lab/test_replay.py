from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_demands import demands_of, reader_of, runs, small_runs
from small_traces import Row, info, write_rows

from sluice.errors import InputError
from sluice.lab.replay import Demands, Execution, executions
from sluice.trace import TraceInfo, TraceReader
from sluice.types import ExpertKey


def plain(rows: list[Row], about: TraceInfo) -> list[Execution]:
    """By the definitions, one row after the other."""
    found: list[Execution] = []
    for step, of_step in groupby(rows, lambda row: row.step):
        n_tokens = n_sequences = 0
        for i, (layer, of_layer) in enumerate(groupby(of_step, lambda row: row.layer)):
            own = list(of_layer)
            if i == 0:
                n_tokens, n_sequences = len(own), len({row.sequence for row in own})
            keys = [ExpertKey(layer, e) for e in sorted({e for row in own for e in row.experts})]
            demands = sum(len(row.experts) for row in own)
            tick = step * about.n_layers + layer
            found.append(Execution(step, own[0].phase, layer, tick, keys, len(own), n_tokens, n_sequences, demands))
    return found


@settings(deadline=None, max_examples=60)
@given(run=small_runs(prefill=True), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_executions_whatever_row_groups_cut(run: tuple[list[Row], TraceInfo], cuts: list[int]) -> None:
    rows, about = run
    reader = reader_of(rows, about, [cut for cut in cuts if cut < len(rows)])
    expected = plain(rows, about)
    assert list(executions(reader)) == expected
    assert list(Demands.of(reader)) == expected


def test_from_a_file(tmp_path: Path) -> None:
    rows = runs(np.random.default_rng(1), layers=3, n_expert=8, top_k=2, steps=200, streams=2, prefill=0.2)
    path = write_rows(tmp_path / "trace", rows, info(3, 8, 2), block_bytes=1)
    with TraceReader(path) as reader:
        assert list(executions(reader)) == plain(rows, info(3, 8, 2)) == list(Demands.of(reader))


def test_what_is_a_sweep() -> None:
    rows = [
        *(Row(0, 0, i, layer, (i,), None, "prefill") for layer, n in ((0, 3), (1, 1)) for i in range(n)),
        Row(1, 1, 0, 0, (0,), None, "prefill"),  # a prompt of one token
        *(Row(2, s, 5, 0, (s,)) for s in range(2)),
    ]
    demands = demands_of(rows, info(2, 4, 1))
    assert [one.scan for one in demands] == demands.scan.tolist() == [True, True, False, False]
    assert demands.tokens() == 3 + 1 + 2
    assert (demands.tokens("prefill"), demands.tokens("decode")) == (4, 2)


def test_keys_are_one_object_throughout() -> None:
    rows = runs(np.random.default_rng(0), layers=2, n_expert=3, top_k=2, steps=9, streams=1)
    for each in (executions(reader_of(rows, info(2, 3, 2), [5, 9])), demands_of(rows, info(2, 3, 2))):
        keys = [key for one in each for key in one.keys]
        assert len({id(key) for key in keys}) == len(set(keys))


def test_by_step_and_head() -> None:
    rows = [Row(4, 0, 0, 0, (0, 1)), Row(4, 0, 0, 1, (1, 2)), Row(7, 0, 1, 1, (0, 2))]
    demands = demands_of(rows, info(2, 3, 2))
    assert demands.by_step(np.array([5, 6, 7]), "decode").tolist() == [[5, 6], [0, 7]]
    assert demands.by_step(np.array([5, 6, 7]), "prefill").shape == (0, 2)
    assert list(demands.head(5)) == list(demands)[:2]
    assert list(demands.head(1)) == list(demands)[:1]
    assert list(demands.keys()) == [key for one in demands for key in one.keys]


def test_a_trace_without_rows_is_refused() -> None:
    with pytest.raises(InputError, match=r"made\.parquet.*no rows"):
        demands_of([], info(1, 2, 1))
