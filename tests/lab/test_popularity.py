"""Concentration, entropy, domains and co-activation against their definitions."""

from __future__ import annotations

from itertools import combinations
from math import log2
from pathlib import Path

import numpy as np
import pytest
from small_traces import Row, info, random_rows, write_rows

from sluice.lab.popularity import (
    HALF_TOKENS,
    HOT_SHARE,
    LEAST_TOGETHER,
    DomainCounts,
    Domains,
    coactivation,
    concentration,
    counts,
    entropy_bits,
    joint_counts,
    strongest_pairs,
)
from sluice.lab.routes import Joined, LayerRows, load
from sluice.trace import TraceReader


def layers_of(path: Path) -> tuple[list[LayerRows], tuple[str, ...]]:
    with TraceReader(path) as reader:
        routes = load(Joined([reader]))
    return list(routes.by_layer()), routes.domains


def domains_of(path: Path) -> Domains | None:
    layers, names = layers_of(path)
    n = np.zeros(len(names), np.int64)
    for rows in layers:
        n += np.bincount(rows.domain[rows.domain >= 0], minlength=len(names))
    counter = DomainCounts(names, n)
    for rows in layers:
        counter.add(rows)
    return counter.finish()


def test_concentration_ranks_all_experts_together() -> None:
    curve = concentration(np.array([[60, 0, 20], [10, 10, 0]]))
    assert curve.experts.tolist() == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert curve.traffic.tolist() == pytest.approx([0, 0.6, 0.8, 0.9, 1, 1, 1])
    assert curve.experts_for(0.8) == pytest.approx(2 / 6)
    assert curve.experts_for(0.81) == pytest.approx(3 / 6)
    assert curve.experts_for(1) == pytest.approx(4 / 6)
    assert curve.traffic_of(0.5) == pytest.approx(0.9)
    assert curve.traffic_of(0.49) == pytest.approx(0.8)  # two whole experts


@pytest.mark.parametrize("seed", range(3))
def test_counts_and_entropy(seed: int, tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(seed), layers=2, n_expert=5, top_k=2)
    layers, _ = layers_of(write_rows(tmp_path / "t", rows, info(2, 5, 2)))
    for layer in layers:
        used = counts(layer)
        chosen = [e for row in rows if row.layer == layer.layer for e in row.experts]
        assert used.tolist() == [chosen.count(e) for e in range(5)]
        shares = [chosen.count(e) / len(chosen) for e in range(5)]
        [bits] = entropy_bits(used[None])
        assert bits == pytest.approx(-sum(p * log2(p) for p in shares if p))
    assert entropy_bits(np.array([[3, 3, 3, 3], [0, 9, 0, 0]])).tolist() == [2, 0]


@pytest.mark.parametrize("seed", range(3))
def test_domains_are_compared_layer_by_layer(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, layers=2, n_expert=9, sequences=4, tokens=2 * HALF_TOKENS + 9, domains=("x", "y", None))
    found = domains_of(write_rows(tmp_path / "t", rows, info(2, 9, 2)))
    assert found is not None and found.names == ("x", "y")
    assert found.tokens == (2 * (2 * HALF_TOKENS + 9), 2 * HALF_TOKENS + 9)

    def shares(layer: int, name: str, odd: int | None = None) -> list[float]:
        chosen = [
            e for row in rows if row.layer == layer and row.domain == name
            and (odd is None or row.position // HALF_TOKENS % 2 == odd) for e in row.experts
        ]  # fmt: skip
        return [chosen.count(e) / len(chosen) for e in range(9)]

    def hot(values: list[float]) -> set[int]:
        ranked = sorted(range(9), key=lambda e: (-values[e], e))
        n = next(n for n in range(10) if sum(values[e] for e in ranked[:n]) >= HOT_SHARE - 1e-12)
        return set(ranked[:n])

    def common(one: list[float], other: list[float]) -> float:
        return sum(map(min, one, other))

    for i, a in enumerate("xy"):
        halves = [common(shares(layer, a, 0), shares(layer, a, 1)) for layer in range(2)]
        assert found.overlap[i, i] == pytest.approx(np.mean(halves))
        assert found.hot[i, i] == 1
    both = [(shares(layer, "x"), shares(layer, "y")) for layer in range(2)]
    assert found.overlap[0, 1] == found.overlap[1, 0] == pytest.approx(np.mean([common(*pair) for pair in both]))
    sets = [(hot(a), hot(b)) for a, b in both]
    assert found.hot[0, 1] == found.hot[1, 0] == pytest.approx(np.mean([len(a & b) / len(a | b) for a, b in sets]))


def test_a_short_domain_has_no_halves_and_no_domains_no_comparison(tmp_path: Path) -> None:
    rows = [Row(i, i % 2, i // 2, 0, (i % 3, 3), "ab"[i % 2]) for i in range(8)]
    found = domains_of(write_rows(tmp_path / "t", rows, info(1, 4, 2)))
    assert found is not None
    assert np.isnan(np.diag(found.overlap)).all() and found.overlap[0, 1] > 0
    assert domains_of(write_rows(tmp_path / "u", [r._replace(domain=None) for r in rows], info(1, 4, 2))) is None


@pytest.mark.parametrize("seed", range(3))
def test_coactivation_is_the_correlation_of_choices(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    groups = [(0, 1, 2), (0, 1, 3), (2, 4, 5), (3, 4, 5), (1, 3, 5)]
    rows = [Row(i, 0, i, 0, groups[g]) for i, g in enumerate(rng.choice(5, 120, p=(0.3, 0.3, 0.3, 0.05, 0.05)))]
    [layer], _ = layers_of(write_rows(tmp_path / "t", rows, info(1, 6, 3)))
    chosen = np.array([[e in row.experts for e in range(6)] for row in rows], float)
    both = joint_counts(layer)
    assert both.tolist() == (chosen.T @ chosen).tolist()
    phi = coactivation(both, len(layer))
    expected = np.corrcoef(chosen.T)
    np.fill_diagonal(expected, 0)
    assert phi == pytest.approx(expected)
    ranked = sorted(combinations(range(6), 2), key=lambda pair: -phi[pair])
    ranked = [pair for pair in ranked if both[pair] >= LEAST_TOGETHER and phi[pair] > 0]
    pairs = strongest_pairs(0, phi, both)
    assert [(pair.a, pair.b) for pair in pairs] == ranked and pairs
    assert [pair.n for pair in pairs] == [both[pair] for pair in ranked]


def test_experts_of_every_token_or_of_none_correlate_with_nothing(tmp_path: Path) -> None:
    rows = [Row(i, 0, i, 0, (0, 1 + i % 2)) for i in range(30)]
    [layer], _ = layers_of(write_rows(tmp_path / "t", rows, info(1, 4, 2)))
    phi = coactivation(joint_counts(layer), len(layer))
    assert phi[0].tolist() == phi[3].tolist() == [0, 0, 0, 0]
    assert phi[1, 2] == pytest.approx(-1)
