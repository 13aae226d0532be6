"""Simulated rerouting: without a margin the plain simulator, by hand on a few tokens, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_traces import info, random_rows, write_rows

from sluice.errors import InputError
from sluice.experts.policies import POLICIES
from sluice.experts.rerouting import Rerouting, divergence
from sluice.lab.replay import Demands
from sluice.lab.rerouting import simulate_rerouting
from sluice.lab.simulate import simulate
from sluice.trace import REROUTED, TraceInfo, TraceReader, TraceWriter

LAYERS, N_EXPERT, K = 2, 8, 2


def scored(path: Path, scores: np.ndarray, about: TraceInfo, phases: str = "d") -> Path:
    """A trace of one token a step [n_steps, layers, n_expert] that takes the best; phases: d or p of each step."""
    with TraceWriter(path, about, scores=True) as writer:
        for step, (row, phase) in enumerate(zip(scores, phases * len(scores), strict=False)):
            at = np.array([step], np.int32)
            writer.begin_step(step, "decode" if phase == "d" else "prefill", np.zeros(1, np.int32), at)
            for layer, of_layer in enumerate(row):
                best = np.argsort(-of_layer, kind="stable")[None, : about.top_k].astype(np.int16)
                writer.chose(layer, best, of_layer[None])
                writer.weighed(np.full(best.shape, 0.5, np.float32))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    scores = np.random.default_rng(0).dirichlet(np.full(N_EXPERT, 0.8), (80, LAYERS)).astype(np.float32)
    return scored(tmp_path / "t.parquet", scores, info(LAYERS, N_EXPERT, K), phases="dddp")


def test_without_a_margin_it_is_the_plain_simulator(trace: Path) -> None:
    with TraceReader(trace) as reader:
        demands = Demands.of(reader)
        for phase in ("all", "prefill", "decode"):
            found = simulate_rerouting(reader, demands, list(POLICIES), [2, 5, 9], [Rerouting(0.0, 0)], phase=phase)
            for one in found:
                plain = simulate(demands, one.policy, one.capacity_slots, phase=phase)
                assert (one.demands, one.hits, one.misses, one.evictions, one.hit_rate, one.reads_per_token) == (
                    plain.demands, plain.hits, plain.misses, plain.evictions, plain.hit_rate, plain.reads_per_token
                )  # fmt: skip
                assert (one.substituted, one.native_agreement, one.reroute_kl) == (0, 1.0, 0.0)
    assert [(one.capacity_slots, one.policy) for one in found] == [(n, name) for n in (2, 5, 9) for name in POLICIES]


def test_margins_trade_reads_for_agreement(trace: Path) -> None:
    rules = [Rerouting(0.0), Rerouting(0.02), Rerouting(0.2), Rerouting(1.0), Rerouting(1.0, 0), Rerouting(1.0, K)]
    with TraceReader(trace) as reader:
        found = simulate_rerouting(reader, Demands.of(reader), ["lru"], [8], rules, phase="decode")
    misses = [one.misses for one in found]
    agreement = [one.native_agreement or 0.0 for one in found]
    divergences = [one.reroute_kl or 0.0 for one in found]
    assert misses[0] > misses[1] > misses[2] >= misses[3] > misses[4]
    assert 1.0 == agreement[0] > agreement[1] > agreement[2] >= agreement[3] > agreement[4]
    assert (misses[5], agreement[5]) == (misses[0], 1.0)  # all are kept
    assert all(one.margin == rule.margin and one.keep == rule.keep for one, rule in zip(found, rules, strict=True))
    assert 0 < divergences[1] < divergences[2] < divergences[4]
    tokens = 60  # of decode steps
    for one in found:
        assert one.native_agreement == 1 - one.substituted / (tokens * LAYERS * K)
        assert one.reads_per_token == one.misses / tokens


@pytest.mark.parametrize("logits", [False, True])
def test_by_hand(tmp_path: Path, logits: bool) -> None:
    """Two tokens of a layer. The second wants 2 and 3, of which 3 is within 0.15 of 1, which is there."""
    shares = np.array([[[0.4, 0.3, 0.2, 0.1]], [[0.1, 0.15, 0.45, 0.3]]], np.float32)
    scores = np.log(shares) if logits else shares
    rules = [Rerouting(0.1), Rerouting(0.16 if not logits else 0.7)]
    with TraceReader(scored(tmp_path / "t.parquet", scores, info(1, 4, 2))) as reader:
        narrow, wide = simulate_rerouting(reader, Demands.of(reader), ["lru"], [4], rules)
    assert (narrow.demands, narrow.misses, narrow.substituted) == (4, 4, 0)
    assert (wide.demands, wide.misses, wide.hits, wide.substituted, wide.native_agreement) == (4, 3, 1, 1, 0.75)
    expected = divergence(scores[1, 0].tolist(), [2, 3], [2, 1], logits=logits) / 2
    assert wide.reroute_kl == pytest.approx(expected)
    p, q = np.array([0.6, 0.4]), np.array([0.75, 0.25])
    assert expected == pytest.approx(float((p * np.log(p / q)).sum()) / 2, rel=1e-6)


def test_refusals(trace: Path, tmp_path: Path) -> None:
    about = info(LAYERS, N_EXPERT, K)
    bare = write_rows(tmp_path / "bare.parquet", random_rows(np.random.default_rng(1)), info(2, 6, 2))
    again = scored(
        tmp_path / "again.parquet", np.full((2, LAYERS, N_EXPERT), 0.1, np.float32),
        replace(about, source=f"sluice{REROUTED}0.1 but for the best 1"),
    )  # fmt: skip
    for path, policy, message in (
        (bare, "lru", "no scores of all experts: record it with --trace-scores"),
        (again, "lru", "lacks the routers' own choice"),
        (trace, "belady", "belady can't be rerouted"),
        (trace, "mru", "unknown cache policy"),
    ):
        with TraceReader(path) as reader, pytest.raises(InputError, match=message):
            simulate_rerouting(reader, Demands.of(reader), [policy], [4], [Rerouting(0.1)])
