"""`sluice trace synth` and `sluice trace report` as a user calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Cli

SYNTH = ("--tokens", 40, "--layers", 3, "--experts", 8, "--top-k", 2)


@pytest.fixture
def trace(cli: Cli, tmp_path: Path) -> Path:
    path = tmp_path / "trace.parquet"
    made = cli("trace", "synth", path, *SYNTH, "--json")
    assert made.code == 0 and made.json == {"path": str(path), "tokens": 40, "token_demands": 240, "seed": 0}
    return path


def test_a_report_is_tables_or_json(cli: Cli, trace: Path, tmp_path: Path) -> None:
    shown = cli("trace", "report", trace)
    assert shown.code == 0 and shown.err == ""
    assert "adjacent reuse" in shown.out and "Hit rate of caches" in shown.out
    again = tmp_path / "again.parquet"
    again.write_bytes(trace.read_bytes())
    numbers = cli("trace", "report", trace, again, "--json").json
    assert (numbers["rows"], numbers["tokens"], numbers["sequences"]) == (240, 80, 2)
    twice = cli("trace", "report", trace, trace)
    assert twice.code == 2 and "given twice" in twice.err


@pytest.mark.parametrize("name, head", [("r.html", b"<!doctype html>"), ("r.PNG", b"\x89PNG")])
def test_a_page_or_a_sheet_is_written_once(name: str, head: bytes, cli: Cli, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / name
    assert cli("trace", "report", trace, "--out", out).err.strip() == f"wrote {out}"
    before = out.read_bytes()
    assert before.startswith(head)
    again = cli("trace", "report", trace, "--out", out)
    assert again.code == 2 and "--force" in again.err and out.read_bytes() == before
    assert cli("trace", "report", trace, "--out", out, "--force").code == 0


@pytest.mark.parametrize("out, named", [("r.pdf", ".html or .png"), ("no/such/folder/r.html", "can't be written")])
def test_where_no_report_can_go(out: str, named: str, cli: Cli, trace: Path, tmp_path: Path) -> None:
    result = cli("trace", "report", trace, "--out", tmp_path / out)
    assert result.code == 2 and named in result.err and len(result.err.splitlines()) == 1


def test_what_is_no_trace_of_the_same_model_is_refused(cli: Cli, trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.parquet"
    assert cli("trace", "synth", other, "--tokens", 3, "--layers", 2, "--experts", 8, "--top-k", 2).code == 0
    text = tmp_path / "text"
    text.write_text("no trace")
    for paths, named in (
        ((trace, other), "another model"),
        ((text,), "no trace"),
        ((tmp_path / "none",), "no such file"),
        ((trace, trace), "twice"),
    ):
        result = cli("trace", "report", *paths)
        assert result.code == 2 and named in result.err and len(result.err.splitlines()) == 1


def test_synth_refuses_what_it_cant_make(cli: Cli, trace: Path, tmp_path: Path) -> None:
    assert "--force" in cli("trace", "synth", trace, *SYNTH).err
    result = cli("trace", "synth", tmp_path / "t", "--top-k", 9, "--experts", 8)
    assert result.code == 2 and "top-k" in result.err
    assert cli("trace", "synth", tmp_path / "t", "--tokens", 0).code == 2
