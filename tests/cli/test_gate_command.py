"""`sluice gate`: exit codes, one table with both sides, and what is said of a gate that wasn't written down first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import Cli

GATE = """name = "three"
description = "Three experts a token."
seed = 7
[[metric]]
name = "quality"
side = "cost"
path = "ppl_change"
direction = "<="
threshold = 0.01
[[metric]]
name = "hit rate"
side = "benefit"
path = "results.0.hit_rate"
direction = ">="
threshold = 0.6
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate.toml"
    path.write_text(GATE)
    return path


def results(folder: Path, hit_rate: float, change: float) -> tuple[Path, Path]:
    (folder / "sim.json").write_text(json.dumps({"results": [{"hit_rate": hit_rate}]}))
    (folder / "kl.json").write_text(json.dumps({"ppl_change": change}))
    return folder / "sim.json", folder / "kl.json"


def test_recorded_then_passed(cli: Cli, gate: Path) -> None:
    done = cli("gate", gate, "--record")
    assert done.code == 0 and "three: recorded on 20" in done.out
    assert cli("gate", gate, "--record").out == done.out
    done = cli("gate", gate, *results(gate.parent, 0.7, 0.002))
    assert done.code == 0
    assert done.out.splitlines()[-1] == "three: passed, 2 of 2 metrics reached"
    assert done.out.index("hit rate") < done.out.index("quality")  # benefits first, in one table
    assert "FAILED" not in done.out + done.err
    assert "not checked: which dataset and seed sim.json, kl.json came from" in done.err


def test_a_failed_gate_is_printed_as_failed(cli: Cli, gate: Path) -> None:
    cli("gate", gate, "--record")
    done = cli("gate", gate, *results(gate.parent, 0.7, 0.02))
    assert done.code == 1
    assert done.out.splitlines()[-1] == "three: FAILED, 1 of 2 metrics reached"
    assert done.out.count("FAILED") == 2


def test_unmeasured_has_failed(cli: Cli, gate: Path) -> None:
    cli("gate", gate, "--record")
    sim, _ = results(gate.parent, 0.7, 0.0)
    done = cli("gate", gate, sim)
    assert done.code == 1 and "not measured (there is no ppl_change in sim.json)" in done.out
    done = cli("gate", gate)
    assert done.code == 1 and done.out.count("FAILED") == 3


def test_an_unrecorded_or_changed_gate_says_so_and_fails(cli: Cli, gate: Path) -> None:
    given = results(gate.parent, 0.7, 0.0)
    done = cli("gate", gate, *given)
    assert done.code == 1
    assert "UNRECORDED" in done.out and "FAILED: " in done.err and "was not recorded before these results" in done.err
    cli("gate", gate, "--record")
    gate.write_text(GATE.replace("0.6", "0.1"))
    done = cli("gate", gate, *given)
    assert done.code == 1
    assert "CHANGED" in done.out and "has changed since it was recorded on" in done.err
    done = cli("gate", gate, "--record")
    assert (done.code, done.out) == (2, "") and "has changed since" in done.err and done.err.count("\n") == 1


def test_results_older_than_the_record_are_pointed_out(cli: Cli, gate: Path) -> None:
    given = results(gate.parent, 0.7, 0.0)
    cli("gate", gate, "--record")
    assert "older" not in cli("gate", gate, *results(gate.parent, 0.7, 0.0)).err
    os.utime(given[0], (1e9, 1e9))
    done = cli("gate", gate, *given)
    assert done.err.count("is older than the gate's record") == 1


def test_json(cli: Cli, gate: Path) -> None:
    recorded = cli("gate", gate, "--record", "--json").json
    assert recorded["registration"]["state"] == "recorded" and recorded["registration"]["sha256"] == recorded["sha256"]
    sim, kl = results(gate.parent, 0.7, 0.02)
    done = cli("gate", gate, sim, kl, "--json")
    assert done.code == 1 and done.out.count("\n") == 1
    assert done.json["passed"] is False
    assert [(m["name"], m["side"], m["value"], m["passed"]) for m in done.json["metrics"]] == [
        ("hit rate", "benefit", 0.7, True), ("quality", "cost", 0.02, False),
    ]  # fmt: skip
    kl.write_text('{"ppl_change": NaN}')
    assert [m["value"] for m in cli("gate", gate, sim, kl, "--json").json["metrics"]] == [0.7, None]


def test_bad_input_is_one_line(cli: Cli, gate: Path, tmp_path: Path) -> None:
    sim, kl = results(gate.parent, 0.7, 0.0)
    other = tmp_path / "other"
    other.mkdir()
    (other / "sim.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.toml").write_text("name = \x1b[31m")
    for words, said in (
        ((tmp_path / "absent.toml",), "no such file"),
        ((tmp_path / "broken.toml",), "is not TOML"),
        ((gate, tmp_path / "broken.json"), "is not JSON"),
        ((gate, tmp_path / "absent.json"), "no such file"),
        ((gate, sim, other / "sim.json"), "two files of results are named sim.json"),
        ((gate, kl, "--record"), "leave out the results"),
    ):
        done = cli("gate", *words)
        assert (done.code, done.out) == (2, "") and said in done.err
        assert done.err.count("\n") == 1 and "Traceback" not in done.err and "\x1b" not in done.err
