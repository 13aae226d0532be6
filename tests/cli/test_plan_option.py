"""--plan, --save-residents and `sluice plan --out`: the way from one run to the next."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from commands import FAST, Cli
from test_run import KEYS

from sluice.cli.opening import open_engine
from sluice.cli.signals import deferred
from sluice.config import EngineConfig
from sluice.plan_file import read_plan
from sluice.store import ExpertStore

WORDS = ("-p", "the river", "-n", 8, "--seed", 3, "--ignore-eos", "--json")
PLAN_KEYS = {"name", "policy", "pins", "loaded", "bytes_read", "load_s", "expected_hit_rate"}


def test_a_run_goes_on_with_what_the_one_before_left(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "residents.json"
    first = cli("run", tiny_path, *WORDS, *FAST, "--save-residents", saved)
    assert first.code == 0 and f"{saved}: 12 experts" in first.err
    assert set(first.json) == KEYS
    again = cli("run", tiny_path, *WORDS, *FAST, "--plan", saved)
    plan = again.json["plan"]
    assert again.code == 0 and again.json["tokens"] == first.json["tokens"]
    assert set(again.json) == KEYS | {"plan"} and set(plan) == PLAN_KEYS
    assert (plan["name"], plan["pins"], plan["loaded"], plan["policy"]) == ("residents.json", 0, 12, "lru")
    assert plan["bytes_read"] > 0 and plan["expected_hit_rate"] is None
    assert again.json["mode"] == first.json["mode"], "a plan changes no output"
    assert "plan residents.json: 12 experts loaded" in again.err and "plan residents.json, 0 pinned" in again.err
    reads = [sum(phase["bytes_read"] for phase in one.json["ledger"].values()) for one in (first, again)]
    assert reads[1] < reads[0]


def test_the_demo_model_starts_warm(cli: Cli, demo_model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "residents.json"
    words = ("run", demo_model, "-p", "Once upon a time", "-n", 12, "--seed", 1, "--json", "--threads", 1)
    cold = cli(*words, "--save-residents", saved)
    assert cold.code == 0
    n = len(read_plan(saved).load)
    warm = cli(*words, "--plan", saved)
    assert (warm.code, warm.json["tokens"], warm.json["plan"]["loaded"]) == (0, cold.json["tokens"], n)
    assert sum(phase["misses"] for phase in warm.json["ledger"].values()) == 0
    assert sum(phase["misses"] + phase["prefetch_issued"] for phase in cold.json["ledger"].values()) > 0


def test_residents_overwrite_nothing_and_it_is_said_before_the_run(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "residents.json"
    saved.write_text("precious")
    for command, *words in (("run", *WORDS), ("bench", "--gen", 2, "--repeat", 1, "--json")):
        refused = cli(command, tiny_path, *words, *FAST, "--save-residents", saved)
        assert (refused.code, refused.out) == (2, "")
        assert refused.err.count("\n") == 1 and "exists already" in refused.err and "--force" in refused.err
        assert saved.read_text() == "precious"
        assert cli(command, tiny_path, *words, *FAST, "--save-residents", saved, "--force").code == 0
        assert len(read_plan(saved).load) == 12
        saved.write_text("precious")


def test_bench_and_chat_take_plans(cli: Cli, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "residents.json"
    bench = ("bench", tiny_path, "--gen", 4, "--repeat", 2, "--seed", 1, *FAST)
    first = cli(*bench, "--json", "--policy", "lfu", "--save-residents", saved)
    again = cli(*bench, "--json", "--plan", saved)
    assert again.json["tokens"] == first.json["tokens"]
    assert [one["pool"] for one in again.json["repeats"]] == ["planned", "warm"]
    assert again.json["plan"]["policy"] == "lfu" and "policy lfu" in again.err
    compared = cli(*bench, "--json", "--plan", saved, "--compare", "demand,exact").json
    assert compared["same_tokens"] and all(arm["plan"]["loaded"] == 12 for arm in compared["arms"].values())

    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    talk = cli("chat", tiny_path, "-n", 3, "--plan", saved, "--json", *FAST)
    assert talk.code == 0 and talk.json["plan"]["loaded"] == 12


REFUSED = {
    "no such plan": (["run", "TINY", "-p", "x", "--plan", "/nowhere.json"], "no such file"),
    "plan and policy": (["run", "TINY", "-p", "x", "--plan", "x.json", "--policy", "lru"], "brings its own policy"),
    "residents of a comparison": (
        ["bench", "TINY", "--compare", "exact,demand", "--save-residents", "x.json"],
        "leave",
    ),
    "residents nowhere": (["run", "TINY", "-p", "x", "--save-residents", "/nowhere/x.json"], "make it first"),
    "residents to a folder": (["bench", "TINY", "--save-residents", "/tmp"], "names no file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(cli: Cli, tiny_path: Path, name: str) -> None:
    words, said = REFUSED[name]
    code, out, err = cli(*(str(tiny_path) if word == "TINY" else word for word in words), *FAST)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_ctrl_c_while_the_plan_is_loaded(
    cli: Cli, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "residents.json"
    cli("run", tiny_path, *WORDS, *FAST, "--save-residents", saved)
    preload = ExpertStore.preload

    def preload_and_signal(self: ExpertStore, *args: object) -> int:
        signal.raise_signal(signal.SIGINT)
        preload(self, *args)  # type: ignore[arg-type]
        raise AssertionError("loading went on to its end")

    monkeypatch.setattr(ExpertStore, "preload", preload_and_signal)
    with deferred() as stop, pytest.raises(KeyboardInterrupt):
        open_engine(tiny_path, EngineConfig(expert_slots=12, threads=1, plan=saved), stop)


def test_from_a_trace_to_a_plan_to_a_run(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    trace, out = tmp_path / "trace.parquet", tmp_path / "plan.json"
    bench = ("bench", tiny_path, "--gen", 60, "--repeat", 1, "--seed", 1, "--threads", 1, "--no-prefetch", "--json")
    first = cli(*bench, "--expert-slots", 12, "--trace", trace)
    assert first.code == 0, first.err
    ram = f"{first.json['peak_rss_bytes'] // (1 << 20) + 300}M"
    planned = cli("plan", tiny_path, "--trace", trace, "--ram", ram, "--out", out, "--json")
    assert planned.code == 0, planned.err
    told, plan = planned.json["plan"], read_plan(out)
    assert (told["pins"], told["slots"], told["policy"]) == (len(plan.pins), plan.slots, "lru")
    assert told["loaded"] == len(plan.pins) + len(plan.load) <= plan.slots
    assert plan.expected is not None and plan.expected["hit_rate"] == told["held_out"]["planned"]["hit_rate"]
    refused = cli("plan", tiny_path, "--trace", trace, "--ram", ram, "--out", out, "--json")
    assert refused.code == 2 and "--force" in refused.err
    run = cli(*bench, "--expert-slots", plan.slots, "--plan", out)
    assert run.code == 0 and run.json["tokens"] == first.json["tokens"]
    assert run.json["plan"]["expected_hit_rate"] == plan.expected["hit_rate"]
    people = cli("plan", tiny_path, "--trace", trace, "--ram", ram, "--out", out, "--force")
    assert people.code == 0 and "judged: pins from the first half" in people.out and str(out) in people.out


def test_a_trace_of_another_model_is_refused(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from tiny import write_tiny

    other = write_tiny(tmp_path / "other.gguf", n_expert=9).path
    trace = tmp_path / "trace.parquet"
    assert (
        cli("bench", other, "--gen", 4, "--repeat", 1, "--threads", 1, "--expert-slots", 9, "--trace", trace).code == 0
    )
    refused = cli("plan", tiny_path, "--trace", trace, "--ram", "4G", "--out", tmp_path / "plan.json")
    assert refused.code == 2 and "another n_expert" in refused.err
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_file_can_be_read_by_people(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "residents.json"
    cli("run", tiny_path, *WORDS, *FAST, "--save-residents", saved)
    fields = json.loads(saved.read_text())
    assert fields["architecture"] == "qwen3moe" and len(fields["fingerprint"]) == 64
    assert saved.read_text().count("\n") == len(fields), "a line each"
