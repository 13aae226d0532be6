"""Adjacent reuse and working sets against their definitions, token by token."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from small_traces import Row, info, random_rows, write_rows

from sluice.lab.locality import Reuse, ReuseCounter, working_set
from sluice.lab.routes import Joined, Routes, load
from sluice.trace import TraceReader


def routes_of(path: Path) -> Routes:
    with TraceReader(path) as reader:
        return load(Joined([reader]))


def reuse_of(routes: Routes) -> Reuse:
    counter = ReuseCounter(routes.n_tokens)
    for rows in routes.by_layer():
        counter.add(rows)
    return counter.finish()


def runs_of(rows: list[Row], layer: int) -> list[list[set[int]]]:
    """The experts of each run of consecutive tokens of one sequence."""
    runs: list[list[set[int]]] = []
    for sequence in sorted({row.sequence for row in rows}):
        last = None
        for row in rows:
            if (row.sequence, row.layer) == (sequence, layer):
                if last is None or row.position != last + 1:
                    runs.append([])
                runs[-1].append(set(row.experts))
                last = row.position
    return runs


@pytest.mark.parametrize("seed", range(4))
def test_reuse_is_the_share_of_a_tokens_experts_that_the_token_before_chose(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, layers=3, n_expert=7, top_k=3, sequences=2, tokens=25, skip=0.2)
    found = reuse_of(routes_of(write_rows(tmp_path / "t.parquet", rows, info(3, 7, 3), block_bytes=4096)))

    for layer in range(3):
        pairs = [(a, b) for run in runs_of(rows, layer) for a, b in pairwise(run)]
        assert found.pairs[layer] == len(pairs) > 0
        assert found.measured[layer] == pytest.approx(np.mean([len(a & b) / 3 for a, b in pairs]))
        tokens = [row.experts for row in rows if row.layer == layer]
        q = [sum(e in chosen for chosen in tokens) / len(tokens) for e in range(7)]
        assert sum(q) == pytest.approx(3)
        assert found.chance[layer] == pytest.approx(sum(x * x for x in q) / 3)
    assert found.uniform == pytest.approx(3 / 7)
    assert found.mean == pytest.approx(found.measured.mean())
    assert found.mean_chance == pytest.approx(found.chance.mean())


def test_chance_is_what_shuffled_tokens_share(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rows = random_rows(rng, layers=1, n_expert=9, top_k=3, sequences=1, tokens=4000)
    found = reuse_of(routes_of(write_rows(tmp_path / "t.parquet", rows, info(1, 9, 3))))
    assert found.mean == pytest.approx(found.mean_chance, abs=0.02)  # independent draws
    assert found.mean_chance > found.mean_uniform + 0.02  # of uneven odds
    assert found.mean_low < found.mean < found.mean_high
    assert found.low[0] == found.mean_low


def test_intervals_hold_the_true_value_about_as_often_as_they_say(tmp_path: Path) -> None:
    """Tokens that keep their experts with probability 0.7, else draw both anew of 8: reuse 0.7 + 0.3 × 2 ÷ 8."""
    held = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        chosen, rows = (0, 1), []
        for step in range(320):
            if rng.random() >= 0.7:
                chosen = tuple(rng.choice(8, 2, replace=False).tolist())
            rows.append(Row(step, 0, step, 0, chosen))
        path = write_rows(tmp_path / f"{seed}.parquet", rows, info(1, 8, 2))
        found = reuse_of(routes_of(path))
        held += bool(found.low[0] <= 0.775 <= found.high[0])
    assert 80 <= held <= 99


def test_without_consecutive_tokens_there_is_no_reuse(tmp_path: Path) -> None:
    rows = [Row(i, 0, 2 * i, 0, (i % 4, 4)) for i in range(6)] + [Row(9, 1, 0, 0, (1, 2))]
    found = reuse_of(routes_of(write_rows(tmp_path / "t.parquet", rows, info(1, 5, 2))))
    assert found.pairs[0] == 0
    assert np.isnan([found.measured[0], found.low[0], found.mean, found.mean_low]).all()
    assert found.chance[0] > 0


def test_a_sequence_that_is_taken_back_has_no_pair_across_the_cut(tmp_path: Path) -> None:
    rows = [Row(i, 0, p, 0, (i, 9)) for i, p in enumerate([0, 1, 2, 1, 2])]
    found = reuse_of(routes_of(write_rows(tmp_path / "t.parquet", rows, info(1, 10, 2))))
    assert found.pairs[0] == 3


@pytest.mark.parametrize("seed", range(4))
def test_a_working_set_is_the_mean_of_distinct_experts_over_all_windows(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, layers=2, n_expert=8, top_k=2, sequences=3, tokens=17, skip=0.1 * seed)
    routes = routes_of(write_rows(tmp_path / "t.parquet", rows, info(2, 8, 2)))
    windows = [1, 2, 3, 5, 17, 18]
    for layer in routes.by_layer():
        found = working_set(layer, windows)
        for w, mean in zip(windows, found, strict=True):
            distinct = [
                len(set().union(*run[i : i + w])) for run in runs_of(rows, layer.layer) for i in range(len(run) - w + 1)
            ]
            if distinct:
                assert mean == pytest.approx(np.mean(distinct))
            else:
                assert np.isnan(mean)
        assert found[0] == pytest.approx(2)


def test_joined_traces_are_sequences_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = random_rows(rng, sequences=2, tokens=9, domains=["b", None])
    other = [row._replace(domain="a" if row.domain is None else None) for row in rows]
    paths = [write_rows(tmp_path / f"{i}", part, info(2, 6, 2)) for i, part in enumerate((rows, other))]
    with TraceReader(paths[0]) as first, TraceReader(paths[1]) as second:
        both = load(Joined([first, second]))
    assert (both.n_sequences, both.n_steps, len(both)) == (4, 18, 2 * len(rows))
    assert set(both.domains) == {"a", "b"}
    labels = [None if d < 0 else both.domains[d] for d in both.domain]
    assert labels == [row.domain for row in rows] + [row.domain for row in other]
    assert reuse_of(both).measured == pytest.approx(reuse_of(routes_of(paths[0])).measured)
    assert (reuse_of(both).pairs == 2 * reuse_of(routes_of(paths[0])).pairs).all()


def test_blocks_of_a_file_make_no_difference(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(3), layers=3, tokens=300)
    one, many = (
        routes_of(write_rows(tmp_path / str(size), rows, info(3, 6, 2), block_bytes=size)) for size in (1 << 20, 1)
    )
    assert (one.experts == many.experts).all() and one.n_steps == many.n_steps == 300
    for a, b in zip(reuse_of(one).__dict__.values(), reuse_of(many).__dict__.values(), strict=True):
        np.testing.assert_array_equal(a, b)
