"""Rerouting live: exact without a margin, what the pure rule says with one, the same for the same cache state.

The simulator drives the same cache by the same rule, so on the scores that a live run saw it must count what that did.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import (
    EVERY_SLOT,
    Prompt,
    assert_same_bits,
    hear_the_routers,
    opened,
    ordered,
    prompt,
    resident,
    run,
    run_together,
    simulated,
)
from test_simulated import mixed
from tiny import T, write_tiny

from sluice.config import EngineConfig, parse_reroute
from sluice.engine.report import mode_text
from sluice.errors import InputError
from sluice.experts.rerouting import Rerouting
from sluice.lab.replay import Demands
from sluice.lab.rerouting import simulate_rerouting
from sluice.trace import TraceReader

SMALL: dict[str, Any] = {"n_layers": 4, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 32}
K, N_EXPERT = 3, 12
WIDE = 1.0  # of softmax scores, every other is within it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rerouting") / "m.gguf"
    return write_tiny(path, expert_type=T.Q8_0, n_expert=N_EXPERT, top_k=K, **SMALL).path


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    rng = np.random.default_rng(1)
    return [prompt(rng, n, 12) for n in (1, 5, 20)]


@pytest.mark.parametrize("n_slots", [K, 7, 17, EVERY_SLOT])
def test_without_a_margin_every_bit_is_exact(model: Path, prompts: list[Prompt], n_slots: int) -> None:
    with resident(model) as engine:
        expected = [run(engine, it) for it in prompts]
    with opened(model, ordered(2), expert_slots=n_slots, reroute=0.0, reroute_keep=0) as engine:
        for it, rows in zip(prompts, expected, strict=True):
            assert_same_bits(run(engine, it), rows, f"{len(it.ids)} tokens of prompt")
        decode = engine.stats()["decode"]
    assert (decode["substituted"], decode["native_agreement"], decode["reroute_kl"]) == (0, 1.0, 0.0)
    with opened(model, ordered(3), expert_slots=n_slots, reroute=0.0, streams=3) as engine:
        found = run_together(engine, prompts, random.Random(4))
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other, "beside others")


def test_where_everything_is_resident_nothing_is_replaced(model: Path, prompts: list[Prompt]) -> None:
    with resident(model) as engine:
        expected = run(engine, prompts[2])
    with opened(model, expert_slots=EVERY_SLOT, reroute=WIDE, reroute_keep=0) as engine:
        with engine.session() as session:  # a prompt whose every layer is run for every token, but the last
            session.feed(np.random.default_rng(2).integers(0, 400, 200).tolist())
        for token in range(200):
            with engine.session() as session:
                session.feed([token])
        assert engine.store.n_slots == len(list(engine.store.cache.keys_resident())) == 4 * N_EXPERT
        assert_same_bits(run(engine, prompts[2]), expected, "with all experts in memory")
        assert engine.stats()["decode"]["substituted"] == 0


def by_hand(trace: Path, keep: int) -> tuple[int, float, int]:
    """Of decode rows: how many ids aren't the router's, the mean KL of weights, and rows. The family takes the best
    K scores."""
    n = swapped = 0
    total = 0.0
    with TraceReader(trace) as reader:
        for batch in reader.batches(weights=True, scores=True):
            assert batch.weights is not None and batch.scores is not None
            final, weights = batch.experts.reshape(-1, K), batch.weights.reshape(-1, K)
            native = np.argsort(-batch.scores, axis=1, kind="stable")[:, :K]
            p, q = (np.take_along_axis(batch.scores, ids.astype(np.int64), 1).astype(float) for ids in (native, final))
            p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
            np.testing.assert_allclose(weights, q, rtol=1e-5)  # normalised anew over the final ids
            assert (native == final)[~batch.decode].all(), "prompts keep their routes"
            assert (native == final)[:, :keep].all()
            n += int(batch.decode.sum())
            swapped += int((native != final).sum())
            total += float((p * np.log(p / q)).sum())
    return swapped, total / n, n


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_wide_margin_replaces_and_the_ledger_says_how_much(model: Path, tmp_path: Path, keep: int) -> None:
    trace, it = tmp_path / "t.parquet", prompt(np.random.default_rng(3), 9, 30)
    options: dict[str, Any] = {"expert_slots": 16, "trace": trace, "trace_scores": True, "reroute_keep": keep}
    with opened(model, ordered(4), reroute=WIDE, **options) as engine:
        found = run(engine, it)
        decode, prefill = engine.stats()["decode"], engine.stats()["prefill"]
    swapped, divergence, rows = by_hand(trace, keep)
    assert decode["substituted"] == swapped > 0
    assert decode["native_agreement"] == 1 - swapped / (rows * K) == 1 - swapped / decode["token_demands"]
    assert decode["reroute_kl"] == pytest.approx(divergence) and divergence > 0
    assert (prefill["substituted"], prefill["native_agreement"], prefill["reroute_kl"]) == (0, None, None)
    assert decode["prefetch_issued"] == 0
    if keep == 0:
        assert decode["misses"] <= 4 * K  # once each layer has some in the 16 slots, nothing needs to be read
    with opened(model, expert_slots=16, prefetch=False) as engine:
        exact = run(engine, it)
        assert engine.stats()["decode"]["misses"] > decode["misses"]
        assert engine.stats()["decode"]["native_agreement"] is None
    assert_same_bits(found[:1], exact[:1], "after the prompt")
    assert not np.array_equal(found[-1], exact[-1])


@pytest.mark.parametrize("policy", ["lru", "arc", "cyclic"])
@pytest.mark.parametrize(("n_slots", "margin", "keep"), [(K, 0.05, 0), (7, WIDE, 1), (17, 0.02, 1), (30, WIDE, 0)])
def test_the_simulator_counts_the_same(
    model: Path, tmp_path: Path, policy: str, n_slots: int, margin: float, keep: int
) -> None:
    trace = tmp_path / "t.parquet"
    options: dict[str, Any] = {"expert_slots": n_slots, "policy": policy, "streams": 3, "trace": trace}
    with opened(
        model, ordered(n_slots), trace_scores=True, reroute=margin, reroute_keep=keep, **options
    ) as engine:  # fmt: skip
        hear_the_routers(engine)
        mixed(engine, seed=n_slots)
        live = engine.stats()
    rule = Rerouting(margin, keep)
    with TraceReader(trace) as reader, pytest.raises(InputError, match="of a rerouted run"):
        simulate_rerouting(reader, Demands.of(reader), [policy], [n_slots], [rule])
    parts = [simulated(trace, rule, policy=policy, slots=n_slots, phase=phase) for phase in ("prefill", "decode")]
    for name, found in zip(("prefill", "decode"), parts, strict=True):
        for key in ("demands", "hits", "misses", "evictions"):
            assert getattr(found, key) == live[name][key], (name, key)
    assert parts[1].substituted == live["decode"]["substituted"] > 0
    assert parts[1].native_agreement == live["decode"]["native_agreement"]
    assert parts[1].reroute_kl == pytest.approx(live["decode"]["reroute_kl"], rel=1e-9)


def test_the_same_cache_state_gives_the_same_output(model: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    """However reads end; and from a pool that another process filled, experts in the same order."""
    options: dict[str, Any] = {"expert_slots": 16, "policy": "lru", "reroute": WIDE}
    told: list[list[Any]] = []
    residents = tmp_path / "residents.json"
    for seed in (1, 2):
        with opened(model, ordered(seed), **options) as engine:
            outcome: list[Any] = []
            for it in prompts:
                outcome += [engine.cache_state, run(engine, it)]
            engine.save_residents(residents, force=True)
            outcome += [engine.cache_state, run(engine, prompts[1])]
        told.append(outcome)
    states = told[0][::2]
    assert states == told[1][::2] and len(set(states)) == 4
    for one, other in zip(told[0][1::2], told[1][1::2], strict=True):
        assert_same_bits(one, other, "with reads that end otherwise")
    assert not np.array_equal(told[0][3], told[0][7])  # the same prompt, another cache
    options.pop("policy")
    with opened(model, plan=residents, **options) as engine:
        assert engine.cache_state == states[3]
        assert_same_bits(run(engine, prompts[1]), told[0][7], "from the saved pool")


def test_texts_are_scored_as_they_would_be_generated(model: Path, prompts: list[Prompt]) -> None:
    ids = prompts[2].ids
    options: dict[str, Any] = {"expert_slots": 16, "reroute": WIDE}
    with opened(model, **options) as engine:
        expected = run(engine, Prompt(ids[:1], ids[1:]))
        assert engine.stats()["decode"]["substituted"] > 0
    with opened(model, **options) as engine:
        assert_same_bits(engine.logits(ids), expected, "token by token")


def test_the_mode_is_named(model: Path) -> None:
    with opened(model, expert_slots=8, reroute=0.05, reroute_keep=2) as engine:
        assert engine.mode["reroute"] == {"margin": 0.05, "keep": 2, "prefetch": False}
        assert not engine.prefetching and not engine.config.prefetch
        assert mode_text(engine.mode).startswith(
            "lossy, experts rerouted within 0.05 (the best 2 kept, nothing read ahead): exact"
        )
        assert len(engine.cache_state or "") == 64
    with opened(model, expert_slots=8, reroute=0) as engine:
        assert mode_text(engine.mode).startswith("exact") and engine.mode["reroute"]["margin"] == 0.0
    with opened(model, expert_slots=8) as engine:
        assert "reroute" not in engine.mode and engine.cache_state is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reroute": 0.1, "routing": "prerouted", "prerouter": "h"}, "leave out reroute, or the routing"),
        ({"reroute": 0.1, "routing": "prerouted", "routes": "t"}, "leave out reroute, or the routing"),
        ({"reroute": 0.1, "prerouter": "h"}, "leave out one of them"),
        ({"reroute": -0.1}, "can't be"),
        ({"reroute": float("nan")}, "can't be"),
        ({"reroute": "wide"}, "give a number"),
        ({"reroute": 0.1, "reroute_keep": -1}, "can't be"),
        ({"reroute": 0.1, "reroute_keep": 0.5}, "whole number"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EngineConfig(**options)


def test_more_are_kept_than_there_are(model: Path) -> None:
    with pytest.raises(InputError, match=f"keeps {K + 1} experts of {K}"):
        opened(model, expert_slots=8, reroute=0.1, reroute_keep=K + 1)


def test_how_it_is_written() -> None:
    assert parse_reroute("0.05") == (0.05, 1) and parse_reroute("1:0") == (1.0, 0)
