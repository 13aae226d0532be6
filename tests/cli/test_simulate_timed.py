"""`sluice simulate --predictors`: what it prints is what the replay came to, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import Cli

from sluice.experts.predictors import PREDICTORS
from sluice.lab.synthetic import Shape, write
from sluice.plan.profile import MachineProfile, PromptCost, StepCost, save
from sluice.trace import TraceInfo, TraceWriter

MACHINE = ("--read-rate", "64M", "--layer-ms", "1", "--expert-ms", "0.5")
PROFILE = MachineProfile(
    fingerprint="", machine="a test", threads=1, reader="threads", ggml="", taken="", moe_layers=3, n_expert=8, top_k=2,
    expert_bytes=2654208.0, dense_bytes=1, ram_bytes_per_s=1e10, raw_bytes_per_s=1e9, raw_depth=4, load_a_s=0.0,
    load_b_s=0.002, load_error_s=0.0, read_beside=0.9, compute_beside=0.8, fresh_host_s=0.0,
    fresh_load_s=0.0, host_read_s=1e-5, sampling_s=1e-3, recall=0.9,
    demand=StepCost(0.009, 0.006, 0.003), prefetch=StepCost(0.012, 0.006, 0.003),
    prompts=(PromptCost(8, 0.1, 0.01, 24),),
)  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """40 tokens of 3 layers × 8 experts, top 2."""
    write(tmp_path / "t.parquet", Shape(layers=3, experts=8, top_k=2, topics=2), 40)
    return tmp_path / "t.parquet"


def test_one_result_for_each_capacity_policy_and_predictor(cli: Cli, trace: Path) -> None:
    names = ",".join(PREDICTORS)
    words = ("simulate", trace, "--predictors", names, "--policies", "lru,cyclic", "--capacity", "9,50%", *MACHINE)
    outcome = cli(*words, "--json")
    assert outcome.code == 0, outcome.err
    results = outcome.json["results"]
    assert [(r["capacity_slots"], r["policy"], r["predictor"]) for r in results] == [
        (n, policy, name) for n in (9, 12) for policy in ("lru", "cyclic") for name in PREDICTORS
    ]
    for r in results:
        assert r["demands"] == 240 == r["hits"] + r["late_hits"] + r["misses"]
        assert r["prefetch_issued"] == r["prefetch_used"] + r["prefetch_wasted"] + r["prefetch_unused"]
        assert r["compute_s"] == pytest.approx(40 * 3 * 1e-3 + 240 * 0.5e-3)
        assert r["tok_per_s"] == pytest.approx(40 / (r["compute_s"] + r["wait_s"]))
    first = {r["predictor"]: r for r in results[: len(PREDICTORS)]}
    assert first["perfect"]["tok_per_s"] > first["none"]["tok_per_s"]
    assert (first["next-layer"]["lead_layers"], first["perfect-token"]["lead_layers"]) == ([1, 2], [3])
    plain = cli("simulate", trace, "--policies", "lru", "--capacity", "9", "--json").json["results"][0]
    assert all(first["none"][name] == plain[name] for name in ("hits", "misses", "evictions"))


def test_the_table_names_machine_and_predictors(cli: Cli, trace: Path) -> None:
    outcome = cli("simulate", trace, "--predictors", "none,perfect", "--capacity", "50%", *MACHINE, "--depth", "2")
    assert outcome.code == 0, outcome.err
    assert "reads 64.0M/s, 2 at once; a layer 1 ms, an expert 0.5 ms" in outcome.out
    rows = [line.split() for line in outcome.out.splitlines() if "lru" in line]
    assert [row[3] for row in rows] == ["none", "perfect"] and rows[0][0] == "12"


def test_a_profile_is_the_machine_and_options_replace_it(cli: Cli, trace: Path, tmp_path: Path) -> None:
    save(PROFILE, tmp_path / "p.json")
    words = ("simulate", trace, "--predictors", "none,next-layer", "--capacity", "24", "--profile", tmp_path / "p.json")
    none, ahead = cli(*words, "--json").json["results"]
    assert none["host_s"] == pytest.approx(40 * (1e-3 + 0.003) + none["misses"] * 1e-5)
    least = 40 * (0.009 + 0.006)  # slower while the disk reads, by 0.8 at most
    assert least < none["compute_s"] < least / 0.8
    assert ahead["compute_s"] > 40 * (0.012 + 0.006)  # its guesses are arithmetic
    assert ahead["recall_at_k"] == pytest.approx(0.9, abs=0.08)  # the profile's, of 160 guesses: 3 standard deviations
    faster = cli(*words, "--read-rate", "100G", "--recall", "1", "--json").json["results"]
    assert faster[0]["wait_s"] < none["wait_s"] and faster[1]["recall_at_k"] == 1


def test_a_profile_of_another_model_is_refused(cli: Cli, trace: Path, tmp_path: Path) -> None:
    save(replace(PROFILE, n_expert=16), tmp_path / "p.json")
    outcome = cli("simulate", trace, "--predictors", "none", "--profile", tmp_path / "p.json")
    assert outcome.code == 2 and "has 16 experts a layer, the trace's 8" in outcome.err


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--predictors", "none"), "needs a machine: give --read-rate and --layer-ms and --expert-ms, or --profile"),
        (("--predictors", "none", *MACHINE[:4]), "needs a machine: give --expert-ms, or --profile"),
        (("--predictors", "oracle", *MACHINE), "predictor 'oracle' is unknown: choose from none, previous-token"),
        (("--predictors", "", *MACHINE), "predictor '' is unknown"),
        (("--layer-ms", "1"), "--layer-ms is for reads ahead: name --predictors too"),
        (("--predictors", "none", *MACHINE[:2], "--layer-ms", "nan", "--expert-ms", "1"), "--layer-ms nan is no time"),
        (("--predictors", "none", *MACHINE[:4], "--expert-ms", "-1"), "--expert-ms -1 is no time"),
        (("--predictors", "none", *MACHINE, "--latency-ms", "inf"), "--latency-ms inf is no time"),
        (("--predictors", "none", *MACHINE, "--recall", "1.5"), "--recall 1.5 can't be: give 0 to 1"),
        (("--predictors", "none", *MACHINE, "--recall", "nan"), "--recall nan can't be"),
        (("--predictors", "none", *MACHINE, "--depth", "0"), "--depth 0 is too small"),
        (("--predictors", "none", *MACHINE, "--depth", "99999"), "--depth 99999 is too large"),
        (("--predictors", "none", "--read-rate", "fast", *MACHINE[2:]), "'fast' is not a size"),
        (("--predictors", "none", "--phase", "prefill", *MACHINE), "leave out --phase prefill"),
    ],
)
def test_refusals(cli: Cli, trace: Path, words: tuple[str, ...], cause: str) -> None:
    outcome = cli("simulate", trace, *words)
    assert outcome.code == 2 and outcome.out == ""
    assert cause in outcome.err and len(outcome.err.splitlines()) == 1


def test_a_trace_without_decoding_is_refused(cli: Cli, tmp_path: Path) -> None:
    about = TraceInfo("", "test", "prompt", 1, (0,), 4, 1, (100,), "a test")
    with TraceWriter(tmp_path / "t", about) as writer:
        writer.begin_step(0, "prefill", np.array([0, 0]), np.array([0, 1]))
        writer.chose(0, np.array([[1], [2]], np.int16))
        writer.weighed(np.ones((2, 1), np.float32))
    outcome = cli("simulate", tmp_path / "t", "--predictors", "none", "--capacity", "2", *MACHINE)
    assert outcome.code == 2 and "no decode steps" in outcome.err
