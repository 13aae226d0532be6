"""SRP and SCH against routers and caches that are tried out one by one."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from small_traces import Row, info, random_rows, write_rows

from sluice.lab.routes import Joined, LayerRows, load
from sluice.lab.segments import sch, segments, srp
from sluice.trace import TraceReader


def layers_of(path: Path) -> list[LayerRows]:
    with TraceReader(path) as reader:
        return list(load(Joined([reader])).by_layer())


def runs_of(rows: LayerRows) -> list[list[list[int]]]:
    bounds = rows.runs.tolist()
    return [rows.experts[a:b].tolist() for a, b in pairwise(bounds)]


@pytest.mark.parametrize("seed, m", list(product(range(3), (1, 2, 4, 7))))
def test_segments_are_counted_at_every_position_of_a_run(seed: int, m: int, tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(seed), layers=2, n_expert=5, sequences=3, tokens=14, skip=0.1 * seed)
    for layer in layers_of(write_rows(tmp_path / "t", rows, info(2, 5, 2))):
        uses, n = [0] * (m + 1), 0
        for run in runs_of(layer):
            for i in range(len(run) - m + 1):
                n += 1
                for e in range(5):
                    uses[sum(e in chosen for chosen in run[i : i + m])] += 1
        found = segments(layer, m)
        assert (found.uses.tolist(), found.n) == (uses, n)


@pytest.mark.parametrize("m", [255, 256, 300])
def test_long_segments_count_as_far_as_they_are_long(m: int, tmp_path: Path) -> None:
    rows = [Row(i, 0, i, 0, (0, 1 + i % 2)) for i in range(601)]
    [layer] = layers_of(write_rows(tmp_path / "t", rows, info(1, 3, 2)))
    found = segments(layer, m)
    assert found.n == 602 - m and found.uses[m] == found.n  # of expert 0
    assert found.uses[m // 2] + found.uses[(m + 1) // 2] == 2 * found.n * (2 if m % 2 == 0 else 1)
    assert found.uses.sum() == 3 * found.n


@pytest.mark.parametrize("seed", range(3))
def test_srp_is_the_best_f1_of_all_segment_routers(seed: int, tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(seed), layers=1, n_expert=3, top_k=1, sequences=1, tokens=7)
    [layer] = layers_of(write_rows(tmp_path / "t", rows, info(1, 3, 1)))
    m, [run] = 4, runs_of(layer)
    uses = [sum([e] == chosen for chosen in run[i : i + m]) for i in range(4) for e in range(3)]
    best, size = 0.0, 0.0
    for router in product((0, 1), repeat=len(uses)):  # every decision for every segment and expert
        f1 = 2 * sum(r * f for r, f in zip(router, uses, strict=True)) / (m * sum(router) + sum(uses))
        if f1 > best + 1e-12:
            best, size = f1, sum(router) / (sum(uses) / m)
    value, ratio = srp(segments(layer, m))
    assert value == pytest.approx(best)
    assert ratio == pytest.approx(size) or value == pytest.approx(best)  # several routers may be best


def test_srp_of_constant_and_of_alternating_routes(tmp_path: Path) -> None:
    rows = [Row(i, 0, i, layer, ((0, 1), (2 * (i % 2), 2 * (i % 2) + 1))[layer]) for i in range(20) for layer in (0, 1)]
    constant, alternating = layers_of(write_rows(tmp_path / "t", rows, info(2, 4, 2)))
    assert srp(segments(constant, 8)) == (1, 1)
    assert srp(segments(alternating, 8)) == (pytest.approx(2 / 3), 2)  # all four always: precision ½, recall 1
    both = segments(constant, 8) + segments(alternating, 8)
    assert both.n == 26 and srp(both)[0] == pytest.approx(0.8)
    value, ratio = srp(segments(constant, 21))
    assert np.isnan(value) and np.isnan(ratio)


def cache_hit_rate(runs: list[list[list[int]]], room: int, future: int) -> float:
    """A cache that knows how often each expert is chosen in the next `future` tokens."""
    misses = n = 0
    for run in runs:
        held: dict[int, int] = {}  # expert: last use
        for t, chosen in enumerate(run):
            n += len(chosen)
            held |= dict.fromkeys(chosen, t)
            coming = [e for later in run[t + 1 : t + 1 + future] for e in later]
            while len(held) > room:
                misses += 1
                del held[min((e for e in held if e not in chosen), key=lambda e: (coming.count(e), held[e], e))]
    return 1 - misses / n


@pytest.mark.parametrize("seed, future", list(product(range(4), (1, 3, 50))))
def test_sch_is_a_caches_hit_rate(seed: int, future: int, tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(seed), layers=2, n_expert=9, sequences=3, tokens=30, skip=0.05 * seed)
    for layer in layers_of(write_rows(tmp_path / "t", rows, info(2, 9, 2))):
        found = sch(layer, (1, 2, 3, 5), 2, future)
        expected = [cache_hit_rate(runs_of(layer), ratio * 2, future) for ratio in (1, 2, 3)]
        assert found[:3].tolist() == pytest.approx(expected)
        assert found[3] == 1  # room for all
        assert (np.diff(found) >= 0).all()
