"""`sluice plan`: predictions with and without a trace, profiles reused and refused, and predictions in `bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Cli

KEYS = {"budget_bytes", "slots", "share", "mode", "hit_rate", "tok_per_s", "prefill_tok_per_s", "bottleneck", "decode",
        "prefill", "would_help"}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain reading and memory are measured shortly, and at once."""
    monkeypatch.setattr("sluice.plan.measure.SETTLE_S", 0)
    monkeypatch.setattr("sluice.plan.probe.RAW_S", 0.05)
    monkeypatch.setattr("sluice.plan.probe.RAM_S", 0.05)


@pytest.fixture(scope="module")
def trace(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sluice.engine import Engine

    path = tmp_path_factory.mktemp("plan") / "routes.trace"
    with Engine.open(tiny_path, threads=1, expert_slots=12, ctx=64, trace=path) as engine:
        for _ in engine.generate(list(range(20)), 12, temperature=1.0, seed=1, ignore_eos=True):
            pass
    return path


def test_without_a_trace_the_assumption_is_named(cli: Cli, tiny_path: Path) -> None:
    done = cli("plan", tiny_path, "--threads", 1, "--ctx", 256, "--json")
    assert done.code == 0
    result = done.json
    assert "assumed" in result["workload"]
    assert len(result["results"]) > 1
    for one in result["results"]:
        assert set(one) == KEYS
        assert one["tok_per_s"] > 0 and one["prefill_tok_per_s"] > 0
        assert one["bottleneck"] in ("disk", "memory", "arithmetic", "Python", "fresh memory")
        assert all(times >= 0.999 for times in one["would_help"].values())
    slots = [one["slots"] for one in result["results"]]
    hits = [one["hit_rate"] for one in result["results"]]
    assert slots == sorted(slots) and hits == sorted(hits)
    assert result["profile"]["threads"] == 1


def test_a_profile_is_saved_reused_and_refused(cli: Cli, tiny_path: Path, trace: Path, tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    words = ("plan", tiny_path, "--ctx", 64, "--profile", profile, "--ram", "20G,30G", "--trace", trace)
    first = cli(*words, "--threads", 1, "--json")
    assert first.code == 0 and "measuring" in first.err
    assert json.loads(profile.read_text()) == first.json["profile"]
    assert str(trace) in first.json["workload"]
    assert [one["budget_bytes"] for one in first.json["results"]] == [20 << 30, 30 << 30]
    again = cli(*words, "--threads", 1, "--json")
    assert again.code == 0 and "measuring" not in again.err
    assert again.json["profile"] == first.json["profile"]
    assert again.json["disk_now"] > 0
    assert cli(*words, "--threads", 1, "--no-prefetch", "--json").json["results"][0]["mode"] == "demand"

    other = cli(*words, "--threads", 2)
    assert other.code == 2 and "another thread count (1, now 2)" in other.err

    table = cli(*words, "--threads", 1)
    assert table.code == 0
    assert all(name in table.out for name in ("bottleneck", "an expert load", "into fresh memory"))

    profile.write_text(profile.read_text()[:-20])
    damaged = cli(*words, "--threads", 1)
    assert damaged.code == 2 and "no whole machine profile" in damaged.err
    assert cli(*words, "--threads", 1, "--force", "--json").code == 0  # measured anew


def test_bench_predicts_beside_measuring(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    assert cli("plan", tiny_path, "--threads", 1, "--ctx", 64, "--profile", profile, "--json").code == 0
    words = ("bench", tiny_path, "--threads", 1, "--expert-slots", 12, "--gen", 4, "--repeat", 2)
    result = cli(*words, "--profile", profile, "--json").json
    assert result["predicted"]["tok_per_s"] > 0
    assert result["predicted"] in [one["predicted"] for one in result["repeats"]]
    assert cli(*words, "--json").json["predicted"] is None
    assert cli(*words, "--streams", 2, "--profile", profile, "--json").json["predicted"] is None
    table = cli(*words, "--profile", profile)
    assert table.code == 0 and "predicted" in table.out
    refused = cli("bench", tiny_path, "--threads", 2, "--gen", 2, "--profile", profile)
    assert refused.code == 2 and "another thread count" in refused.err
    compared = cli(*words, "--profile", profile, "--compare", "demand,exact", "--json").json
    assert all(arm["predicted"]["tok_per_s"] > 0 for arm in compared["arms"].values())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--ram", "4X"), "'4X' is not a size"),
        (("--ram", "1M"), "too little for this model"),
        (("--trace", "no.trace"), "no.trace"),
        (("--out", "x.plan"), "--out needs --trace and one --ram"),
        (("--policy", "none"), "policy 'none' is unknown"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, tiny_path: Path, words: tuple[str, ...], complaint: str) -> None:
    done = cli("plan", tiny_path, *words)
    assert done.code == 2 and complaint in done.err
    assert "measuring" not in done.err  # found before half a minute has passed


def test_the_demo_model(cli: Cli, demo_model: Path, tmp_path: Path) -> None:
    profile, routes = tmp_path / "p.json", tmp_path / "routes.trace"
    small = ("--threads", 1, "--ctx", 64)
    least = cli("inspect", demo_model, "--ctx", 64, "--json").json["smallest_budget_bytes"] >> 20
    budgets = f"{least + 150}M,{least + 300}M"  # by what this process holds already
    words = ("plan", demo_model, *small, "--profile", profile, "--ram", budgets, "--json")
    first = cli(*words)
    assert first.code == 0 and "assumed" in first.json["workload"]
    bench = ("bench", demo_model, *small, "--gen", 8, "--repeat", 1)
    assert cli(*bench, "--trace", routes, "--json").code == 0
    low, high = cli(*words, "--trace", routes).json["results"]
    assert low["slots"] < high["slots"] and low["hit_rate"] < high["hit_rate"]
    assert low["tok_per_s"] > 0 and high["tok_per_s"] > 0
