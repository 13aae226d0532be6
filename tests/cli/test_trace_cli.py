"""`sluice trace record` and `import`, `--trace`: what is recorded, what is refused, what a Ctrl-C leaves."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pyarrow.parquet as pq
import pytest
from commands import FAST, Cli, process

from sluice.trace import TraceReader

TEXT = "the river runs under the old bridge and the water is cold in the morning\n" * 12
Rows = list[dict[str, Any]]


def rows_of(path: Path) -> Rows:
    with TraceReader(path) as reader:
        assert sum(map(len, reader.batches(weights=True, scores=True))) == reader.n_rows
    return pq.read_table(path).to_pylist()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "t.parquet"


def test_run_records_beside_the_same_answer(cli: Cli, tiny_path: Path, out: Path) -> None:
    words = ("run", tiny_path, "-p", "the river", "-n", 6, "--seed", 3, "--ignore-eos", "--json", *FAST)
    plain, recorded = cli(*words), cli(*words, "--trace", out)
    assert recorded.json["tokens"] == plain.json["tokens"]
    assert recorded.json.keys() == plain.json.keys()
    rows = rows_of(out)
    assert f"{len(rows)} rows of routes" in recorded.err
    assert {row["phase"] for row in rows} == {"prefill", "decode"} and rows[0]["scores"] is None
    for phase in ("prefill", "decode"):
        demands = {(r["step"], r["layer"], e) for r in rows if r["phase"] == phase for e in r["experts"]}
        assert len(demands) == recorded.json["ledger"][phase]["demands"]

    again = cli(*words, "--trace", out)
    assert (again.code, again.err.count("\n")) == (2, 1) and "--force" in again.err
    forced = cli(*words, "--trace", out, "--trace-scores", "--force")
    assert forced.code == 0 and len(rows_of(out)[0]["scores"]) == 8


def test_bench_records_all_streams_and_repeats(cli: Cli, tiny_path: Path, out: Path) -> None:
    words = ("--streams", 2, "--repeat", 2, "--gen", 4, "--prompt-tokens", 3)
    done = cli("bench", tiny_path, *words, "--trace", out, "--json", *FAST)
    assert done.code == 0
    rows = rows_of(out)
    assert {row["sequence"] for row in rows} == {0, 1, 2, 3}
    assert {(row["position"], row["phase"]) for row in rows if row["sequence"] == 3} == {
        *((i, "prefill") for i in range(3)), *((i, "decode") for i in range(3, 6)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bench", "--compare", "demand", "--trace", "t.parquet"), "leave out --trace"),
        (("run", "-p", "x", "--trace-scores"), "give --trace OUT too"),
        (("run", "-p", "x", "--trace", "/nowhere/t.parquet"), "there is no directory /nowhere"),
        (("trace", "record", "t.parquet"), "give --prompts FILE, --text FILE or --domain"),
        (("trace", "record", "t.parquet", "--text", "/nowhere"), "/nowhere: no such file"),
        (("trace", "record", "t.parquet", "--text", "/dev"), "/dev: not a regular file"),
        (("trace", "record", "t.parquet", "--domain", "code"), "write it like code=code.txt"),
        (("trace", "record", "t.parquet", "--text", "x", "-n", "-1"), "at least 1"),
        (("trace", "import", "x.csv", "t.parquet", "--experts", "0"), "at least 1"),
        (("trace", "import", "/nowhere", "t.parquet"), "/nowhere: no such file"),
    ],
)
def test_bad_words_are_refused(
    cli: Cli, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    at = 2 if words[:2] == ("trace", "record") else 1
    model = [] if words[:2] == ("trace", "import") else [tiny_path]
    done = cli(*words[:at], *model, *words[at:])
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert expected in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("p.txt", b"\n \n", "is empty: give it a prompt a line"),
        ("p.txt", b"hello\n" + b"the river " * 200, "line 2: the prompt has"),
        ("p.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("p.txt", b"x" * (2 << 20), "line 1: is longer"),
        ("p.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2: is no object with a text as "prompt"'),
        ("p.jsonl", b"[" * 99999, "line 1: is no object"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(
    cli: Cli, tiny_path: Path, tmp_path: Path, out: Path, name: str, data: bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    done = cli("trace", "record", tiny_path, out, "--prompts", path, "--ctx", 64, "-n", 1, *FAST)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert expected in done.err and str(path) in done.err
    assert list(tmp_path.iterdir()) == [path]


def test_prompts_are_answered_each_on_its_own(cli: Cli, tiny_path: Path, tmp_path: Path, out: Path) -> None:
    plain, as_json = tmp_path / "p.txt", tmp_path / "q.jsonl"
    plain.write_text("the river\n\nthe sun\n")
    as_json.write_text('{"prompt": "the boats", "id": 1}\n')
    words = ("--prompts", plain, "--domain", f"boats={as_json}", "-n", 3, "--seed", 5, "--json")
    done = cli("trace", "record", tiny_path, out, *words, *FAST)
    assert done.code == 0
    rows, result = rows_of(out), done.json
    assert (result["sequences"], result["rows"], result["complete"]) == (3, len(rows), True)
    assert {(row["sequence"], row["domain"]) for row in rows} == {(0, None), (1, None), (2, "boats")}
    for i, prompt in enumerate(("the river", "the sun", "the boats")):  # as `run` would
        alone = cli("run", tiny_path, "-p", prompt, "-n", 3, "--seed", 5, "--json", *FAST).json
        mine = {row["position"] for row in rows if row["sequence"] == i and row["layer"] == 0}
        assert mine == set(range(alone["prompt_tokens"] + alone["generated_tokens"] - 1))
    assert result["bytes"] == out.stat().st_size
    with TraceReader(out) as reader:
        assert result["fingerprint"] == reader.info.fingerprint
    demands = {(r["step"], r["layer"], e) for r in rows for e in r["experts"]}
    assert sum(phase["demands"] for phase in result["ledger"].values()) == len(demands)


@pytest.mark.parametrize("decode", [False, True])
def test_a_text_is_cut_to_the_context(cli: Cli, tiny_path: Path, tmp_path: Path, out: Path, decode: bool) -> None:
    from sluice.engine import Engine

    path = tmp_path / "x.txt"
    path.write_text(TEXT)
    with Engine.open(tiny_path, expert_slots=6, threads=1) as engine:
        n = len(engine.tokenizer.encode(TEXT))
    words = ("--domain", f"prose={path}", "--scores", "--ctx", 64, "--json", *["--decode"] * decode)
    done = cli("trace", "record", tiny_path, out, *words, *FAST)
    rows = rows_of(out)
    assert done.json["tokens"] == n and done.json["sequences"] == -(-n // 64)
    assert {row["domain"] for row in rows} == {"prose"} and len(rows[0]["scores"]) == 8
    assert {row["phase"] for row in rows} == {"decode" if decode else "prefill"}
    first = [(row["sequence"], row["position"]) for row in rows if row["layer"] == 0]
    assert first == [(i // 64, i % 64) for i in range(n)]
    last = [row for row in rows if row["layer"] == 2]
    assert len(last) == (n if decode else -(-n // 64))


def test_a_recording_does_not_replace_what_is_there(cli: Cli, tiny_path: Path, tmp_path: Path, out: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("the sun")
    words = ("trace", "record", tiny_path, out, "--text", path, *FAST)
    assert cli(*words).code == 0
    before = out.read_bytes()
    refused = cli(*words)
    assert refused.code == 2 and "--force" in refused.err and out.read_bytes() == before
    assert cli(*words, "--force").code == 0


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals to one process")
def test_an_interrupt_keeps_what_was_recorded(tiny_path: Path, tmp_path: Path, out: Path) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("this process ignores the signal, and so do those it starts")
    path = tmp_path / "p.txt"
    path.write_text("the river\n" * 20000)
    words = ("--prompts", path, "-n", 2, "--json", *FAST)
    with process("trace", "record", tiny_path, out, *words) as child:
        partial, deadline = Path(f"{out}.partial"), monotonic() + 120
        while monotonic() < deadline and (not partial.exists() or partial.stat().st_size < 10_000):
            sleep(0.05)
        child.send_signal(signal.SIGINT)
        stdout, err = child.communicate(timeout=300)
    assert child.returncode == 130, err
    result = json.loads(stdout.splitlines()[-1])
    rows = rows_of(out)
    assert result["complete"] is False and result["rows"] == len(rows) > 0
    assert "kept" in err and not partial.exists()


def test_an_import_by_its_model_is_the_same_trace(cli: Cli, tiny_path: Path, tmp_path: Path, out: Path) -> None:
    path, again = tmp_path / "in.csv", tmp_path / "again.parquet"
    words = ("run", tiny_path, "-p", "the river", "-n", 12, "--seed", 3, "--ignore-eos", "--trace", out, *FAST)
    assert cli(*words).code == 0
    rows = rows_of(out)
    path.write_text("layer,expert\n" + "".join(f"{r['layer']},{e}\n" for r in rows for e in r["experts"]))
    done = cli("trace", "import", path, again, "--model", tiny_path, "--json")
    assert done.code == 0, done.err
    assert done.json["rows"] == len(rows)
    kept = ("step", "sequence", "position", "phase", "layer", "experts")
    assert [{k: r[k] for k in kept} for r in rows_of(again)] == [{k: r[k] for k in kept} for r in rows]
    with TraceReader(out) as a, TraceReader(again) as b:
        assert a.info.fingerprint == b.info.fingerprint and a.info.expert_bytes == b.info.expert_bytes
    counted = cli("trace", "import", path, again, "--experts", 8, "--force")
    assert counted.code == 0 and "2 of 8 experts a token" in counted.err


def test_the_demo_model_is_traced(cli: Cli, demo_model: Path, out: Path) -> None:
    done = cli(
        "run", demo_model, "-p", "What is a river?", "-n", 8, "--temperature", 0, "--trace", out, "--trace-scores"
    )
    assert done.code == 0, done.err
    for row in rows_of(out):  # two of eight, the likeliest; their weights sum to one
        best = sorted(range(8), key=lambda e: -row["scores"][e])[:2]
        assert row["experts"] == best
        total = sum(row["scores"][e] for e in best)
        assert row["weights"] == pytest.approx([row["scores"][e] / total for e in best], rel=1e-5)


def test_help_and_a_bare_call(cli: Cli) -> None:
    assert all(name in cli("trace").out for name in ("record", "import", "report", "synth"))
    shown = cli("trace", "record", "--help").out
    assert all(option in shown for option in ("--prompts", "--text", "--domain", "--decode", "--scores", "--ram"))
