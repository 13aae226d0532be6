"""Heads and recorded routes from the command line: what they change, and what results say of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import FAST, Cli
from test_run import KEYS

MADE_UP = ("--gen", 6, "--prompt-tokens", 5, "--repeat", 1, "--seed", 3)


@pytest.fixture(scope="module")
def heads(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sluice.ggml import load_library
    from sluice.routing import init_prerouter

    out = tmp_path_factory.mktemp("heads") / "init.safetensors"
    init_prerouter(tiny_path, out, load_library(), hidden=8)
    return out


def test_a_prerouted_run_names_its_mode(cli: Cli, tiny_path: Path, heads: Path) -> None:
    words = ("run", tiny_path, "-p", "hello", "-n", 8, "--seed", 1, "--ignore-eos", "--json", *FAST)
    exact = cli(*words)
    hinted = cli(*words, "--prerouter", heads)
    prerouted = cli(*words, "--prerouter", heads, "--routing", "prerouted")
    assert exact.json["tokens"] == hinted.json["tokens"] != prerouted.json["tokens"]
    assert set(prerouted.json) == KEYS
    assert prerouted.json["mode"]["routing"] == "prerouted" and exact.json["mode"]["routing"] == "exact"
    assert prerouted.json["mode"]["prerouter"] == heads.name and "prerouter" not in hinted.json["mode"]
    assert f"lossy, routes predicted by {heads.name}: prerouted" in prerouted.err
    assert "lossy" not in hinted.err
    assert hinted.json["ledger"]["decode"]["prerouter_agreement"] is not None
    assert exact.json["ledger"]["decode"]["prerouter_agreement"] is None


def test_recorded_routes_give_the_exact_text(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "routes.parquet"
    exact = cli("bench", tiny_path, *MADE_UP, "--streams", 2, "--trace", trace, "--json", *FAST).json
    words = ("bench", tiny_path, *MADE_UP[:4], "--repeat", 2, *MADE_UP[6:], "--streams", 2, "--json", *FAST)
    replayed = cli(*words, "--routing", "prerouted", "--routes", trace).json
    assert replayed["tokens"] == exact["tokens"]
    assert replayed["mode"]["routes"] == trace.name
    assert [one["ledger"]["decode"]["prerouter_agreement"] for one in replayed["repeats"]] == [1.0, 1.0]


def test_compare(cli: Cli, tiny_path: Path, heads: Path) -> None:
    modes = "exact,hints,oracle,prerouted"
    result = cli("bench", tiny_path, *MADE_UP, "--compare", modes, "--prerouter", heads, "--json", *FAST).json
    assert result["same_tokens"] is True
    arms = result["arms"]
    assert arms["exact"]["tokens"] == arms["oracle"]["tokens"] == arms["hints"]["tokens"] != arms["prerouted"]["tokens"]
    assert arms["oracle"]["ledger"]["decode"]["prerouter_agreement"] == 1.0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--routes", "t.parquet"), "recorded routes are for routing prerouted"),
        (("--routing", "prerouted", "--routes", "/nowhere/t.parquet"), "no such file"),
        (("--compare", "oracle", "--routing", "prerouted", "--routes", "t"), "--compare sets routing itself"),
        (("--compare", "hints"), "needs --prerouter FILE"),
    ],
)
def test_what_does_not_go_together(cli: Cli, tiny_path: Path, words: tuple[str, ...], expected: str) -> None:
    done = cli("bench", tiny_path, *MADE_UP, *words, *FAST)
    assert (done.code, done.out) == (2, "") and expected in done.err and done.err.count("\n") == 1
