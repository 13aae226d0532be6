"""--reroute on the command line: named in results, simulated, compared with what it costs in quality."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import FAST, Cli

LOSSY = "lossy, experts rerouted within 1 (the best 1 kept, nothing read ahead): exact"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "t.txt"
    path.write_text("the old bridge and the water is cold in the morning, and the road is long")
    return path


def test_a_run_names_the_mode_and_the_cache_it_began_with(cli: Cli, tiny_path: Path) -> None:
    words = ("run", tiny_path, "-p", "hello", "-n", 12, "--seed", 3, "--ignore-eos", "--json", *FAST)
    done, exact = cli(*words, "--reroute", "1"), cli(*words).json
    result = done.json
    assert done.code == 0 and LOSSY in done.err
    assert result["mode"]["reroute"] == {"margin": 1.0, "keep": 1, "prefetch": False}
    assert len(result["cache_state"]) == 64 and "cache_state" not in exact
    decode = result["ledger"]["decode"]
    assert decode["substituted"] > 0 and 0 < decode["native_agreement"] < 1 and decode["reroute_kl"] > 0
    assert decode["prefetch_issued"] == 0
    assert cli(*words, "--reroute", "1").json["tokens"] == result["tokens"]
    assert cli(*words, "--reroute", "0:2").json["tokens"] == exact["tokens"]


def test_repeats_have_each_their_cache_and_tokens(cli: Cli, tiny_path: Path) -> None:
    words = ("bench", tiny_path, "--gen", 8, "--prompt-tokens", 6, "--repeat", 3, "--seed", 5, "--json", *FAST)
    first, second, third = cli(*words, "--reroute", "1").json["repeats"]
    assert first["cache_state"] != second["cache_state"]
    assert len(first["tokens"][0]) == len(third["tokens"][0]) == 8
    assert all("tokens" not in one and one["cache_state"] for one in cli(*words, "--reroute", "0").json["repeats"])


def test_compare_with_quality(cli: Cli, tiny_path: Path, text: Path) -> None:
    modes = "exact,reroute:0,reroute:1:0"
    words = ("--gen", 4, "--prompt-tokens", 6, "--repeat", 1, "--compare", modes, "--quality-text", text, *FAST)
    result = cli("bench", tiny_path, *words, "--json").json
    assert list(result["arms"]) == list(result["quality"]) == modes.split(",")
    assert result["same_tokens"] is True
    exact, narrow, wide = result["quality"].values()
    assert "kl" not in exact and exact["mode"].get("reroute") is None
    assert exact["ppl"] == narrow["ppl_reference"] == wide["ppl_reference"]
    assert narrow["kl"]["mean"] < 1e-4 < wide["kl"]["mean"]
    assert narrow["ledger"]["decode"]["substituted"] == 0 < wide["ledger"]["decode"]["substituted"]
    assert wide["mode"]["reroute"] == {"margin": 1.0, "keep": 0, "prefetch": False}
    assert "reroute" not in wide["reference"]["mode"]
    assert result["arms"]["reroute:1:0"]["mode"]["reroute"]["margin"] == 1.0


def test_compare_shows_quality_in_its_table(cli: Cli, tiny_path: Path, text: Path) -> None:
    words = ("--gen", 2, "--prompt-tokens", 4, "--repeat", 1, "--compare", "demand,reroute:0.5", *FAST)
    shown = cli("bench", tiny_path, *words, "--quality-text", text)
    assert shown.code == 0
    [heads] = [line.split() for line in shown.out.splitlines() if "tok/s" in line]
    assert heads[0] == "mode" and heads[-4:] == ["÷", "demand", "ppl", "KL"]
    rows = {row[0]: row for row in map(str.split, shown.out.splitlines()) if row}
    assert rows["demand"][-1] == "–" and float(rows["reroute:0.5"][-1]) > 0
    assert float(rows["demand"][-2]) != float(rows["reroute:0.5"][-2])
    assert "ppl" not in cli("bench", tiny_path, *words).out


def test_simulated_on_a_trace_with_scores(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    trace, bare = tmp_path / "t.parquet", tmp_path / "bare.parquet"
    run = ("run", tiny_path, "-p", "hello", "-n", 40, "--seed", 3, "--ignore-eos", *FAST)
    assert cli(*run, "--no-prefetch", "--trace", trace, "--trace-scores").code == 0
    words = ("simulate", trace, "--reroute", "0,0.05,1:1", "--capacity", "12,50%", "--policies", "lru,lfu")
    results = cli(*words, "--json").json["results"]
    assert [(one["capacity_slots"], one["policy"], one["margin"]) for one in results] == [
        (12, policy, margin) for policy in ("lru", "lfu") for margin in (0.0, 0.05, 1.0)
    ]
    assert all(one["keep"] == 1 for one in results)
    plain = cli("simulate", trace, "--capacity", "12", "--policies", "lru", "--json").json["results"][0]
    assert {name: results[0][name] for name in plain if name in results[0]} == {
        name: plain[name] for name in plain if name in results[0]
    }
    assert results[2]["misses"] < results[0]["misses"] and results[2]["substituted"] > 0
    assert "agreement" in cli(*words).out
    assert cli("simulate", trace, "--reroute", "0.1", "--json").json["results"][0]["policy"] == "lru"

    assert cli(*run, "--trace", bare).code == 0
    for wrong, said in (
        (("simulate", bare, "--reroute", "0.1"), "no scores of all experts"),
        (("simulate", trace, "--reroute", "x"), "'x' is no margin"),
        (("simulate", trace, "--reroute", "0.1", "--policies", "belady"), "belady can't be rerouted"),
        (("simulate", trace, "--reroute", "0.1", "--predictors", "none"), "without time"),
        (("simulate", trace, "--reroute", ",".join(f"0.{i:03}1" for i in range(65))), "at most 64"),
    ):
        refused = cli(*wrong)
        assert (refused.code, refused.out) == (2, "") and said in refused.err and refused.err.count("\n") == 1
