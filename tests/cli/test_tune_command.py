"""`sluice tune`: runs of a tiny model, and its settings in the commands that run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import FAST, Cli

from sluice.cli.machine import cpu_name
from sluice.config import usable_cores
from sluice.plan.measure import machine_name
from sluice.plan.tuned import Tuned, find, save

MACHINE = machine_name(cpu_name(), usable_cores())
ASK = ("-p", "hello", "-n", 4, "--seed", 1, "--json", "--raw")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def keep(path: Path, **settings: object) -> None:
    save(Tuned.of(path, MACHINE, budget=8 << 30, settings=settings, gain=0.1, when="2026-11-30T12:00:00+00:00"))


def test_it_measures_and_says_what_it_found(cli: Cli, tiny_path: Path) -> None:
    result = cli("tune", tiny_path, "--minutes", 0.15, "--gen", 4, "--ram", "8G", "--json").json
    assert result["runs"] >= 1 and result["start_tok_per_s"] > 0
    assert result["budget_bytes"] == 8 << 30
    assert set(result["start"]) == set(result["best"])
    assert (result["saved"] is not None) == bool(result["settings"])
    assert result["settings"] == {n: v for n, v in result["best"].items() if v != result["start"][n]}


def test_what_was_tuned_is_used_and_said_unless_something_else_is_asked_for(cli: Cli, tiny_path: Path) -> None:
    plain = cli("run", tiny_path, *ASK, "--ram", "8G")
    keep(tiny_path, threads=1, pool_share=0.5, no_prefetch=True, io_threads=2)
    used = cli("run", tiny_path, *ASK, "--ram", "8G")
    assert used.json["tokens"] == plain.json["tokens"]
    assert used.json["slots"] == plain.json["slots"] // 2
    assert used.json["ledger"]["decode"]["prefetch_issued"] == 0
    assert "tuned for this model: threads 1, pool_share 0.5, no_prefetch True, io_threads 2" in used.err
    without = cli("run", tiny_path, *ASK, "--ram", "8G", "--no-tuned")
    assert without.json["slots"] == plain.json["slots"] and "pool_share" not in without.err
    given = cli("run", tiny_path, *ASK, "--ram", "8G", "--pool-share", 0.75)
    assert given.json["slots"] == plain.json["slots"] * 3 // 4
    assert cli("run", tiny_path, *ASK, "--ram", "12G").json["slots"] == plain.json["slots"]  # another budget
    assert cli("run", tiny_path, *ASK, *FAST).json["slots"] == 12


def test_it_is_forgotten_when_asked(cli: Cli, tiny_path: Path) -> None:
    keep(tiny_path, threads=1)
    assert find(tiny_path, MACHINE) is not None
    assert cli("tune", tiny_path, "--forget").code == 0
    assert find(tiny_path, MACHINE) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--minutes", 0), "give a number above 0"), (("--gen", 0), "at least 1"), (("--ram", "much"), "not a size"),
        (("--ram", "1M"), "too little"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(cli: Cli, tiny_path: Path, words: tuple[object, ...], says: str) -> None:
    done = cli("tune", tiny_path, *words)
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1
