"""`sluice eval`: its JSON, its tables, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import hashlib
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from commands import FAST, Cli, Outcome
from test_run import PHASE_KEYS
from tiny import CORPUS, write_tiny

from sluice.cli import eval_texts
from sluice.engine import Engine

LAST = "the old bridge and the water is cold in the morning"


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose.txt").write_text(CORPUS)
    (folder / "code.txt").write_text("def f(x):\n    return None if x else f(True)\n" * 3)
    return folder


def test_perplexity_as_json(cli: Cli, tiny_path: Path, texts: Path) -> None:
    words = ("--domain", f"prose={texts / 'prose.txt'}", "--domain", f"code={texts / 'code.txt'}", "--ctx", 64)
    done = cli("eval", "ppl", tiny_path, *words, "--json", *FAST)
    result = done.json
    assert done.code == 0 and done.out.count("\n") == 1
    assert set(result["per_domain"]) == {"prose", "code"}
    assert result["tokens"] == sum(one["tokens"] for one in result["per_domain"].values())
    assert result["ppl"] > 1 and result["ppl_error"] > 0
    assert result["window"] == {"ctx": 64, "overlap": 32}
    assert result["mode"]["top_k_experts"] == result["mode"]["top_k_experts_of_model"] == 2
    assert result["mode"]["kv"] == "f16,f16" and result["mode"]["ctx"] == 64
    assert set(result["ledger"]["prefill"]) >= PHASE_KEYS
    assert result["ledger"]["prefill"]["tokens"] > result["tokens"]  # windows overlap
    digest = hashlib.sha256((texts / "code.txt").read_bytes()).hexdigest()
    assert result["texts"]["code"]["sha256"] == digest
    single = cli("eval", "ppl", tiny_path, "--text", texts / "code.txt", "--ctx", 64, "--json", *FAST).json
    assert single["ppl"] == single["per_domain"]["text"]["ppl"] == result["per_domain"]["code"]["ppl"]


def test_a_lossy_mode_is_named_and_costs(cli: Cli, tiny_path: Path, texts: Path) -> None:
    words = (tiny_path, "--text", texts / "code.txt", "--ctx", 64, "--top-k-experts", 1, *FAST)
    done = cli("eval", "kl", *words, "--json")
    result = done.json
    assert done.code == 0
    assert result["mode"]["top_k_experts"] == 1 and result["reference"]["mode"]["top_k_experts"] == 2
    assert 0 < result["kl"]["median"] <= result["kl"]["p95"] <= result["kl"]["max"]
    assert result["per_domain"]["text"]["kl"] == result["kl"]
    assert 0 <= result["same_top"] < 1
    assert result["ppl_change"] == pytest.approx(result["ppl"] / result["ppl_reference"] - 1)
    assert done.err.startswith("lossy, 1 expert a token instead of the model's 2: exact, kv f16,f16, against ")
    assert cli("eval", "ppl", *words, "--json").json["ppl"] == result["ppl"]


@pytest.mark.parametrize("flags", [(), ("--top-k-experts", 2, "--policy", "lfu", "--no-prefetch")], ids=str)
def test_what_is_not_lossy_differs_by_nothing(
    cli: Cli, tiny_path: Path, texts: Path, flags: tuple[object, ...]
) -> None:
    result = cli("eval", "kl", tiny_path, "--text", texts / "code.txt", *flags, "--json", *FAST).json
    assert result["kl"] == {"mean": 0.0, "median": 0.0, "p95": 0.0, "max": 0.0}
    assert result["same_top"] == 1.0 and result["ppl_change"] == 0.0


def test_another_reference(cli: Cli, tiny_path: Path, texts: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", seed=5).path
    done = cli(
        "eval", "kl", tiny_path, "--reference", other, "--text", texts / "code.txt", "--kv", "f32", "--json", *FAST
    )
    assert done.json["reference"]["model"] == str(other)
    assert done.json["reference"]["mode"]["kv"] == "f16,f16" and done.json["mode"]["kv"] == "f32,f32"
    assert done.json["kl"]["mean"] > 0.1
    wide = write_tiny(tmp_path / "wide.gguf", n_vocab=416).path
    refused = cli("eval", "kl", tiny_path, "--reference", wide, "--text", texts / "code.txt", *FAST)
    _check(refused, "different vocabularies")


def test_tables(cli: Cli, tiny_path: Path, texts: Path) -> None:
    words = ("--domain", f"prose={texts / 'prose.txt'}", "--domain", f"code={texts / 'code.txt'}", *FAST)
    for command, heads in (("ppl", "perplexity"), ("kl", "same likeliest")):
        done = cli("eval", command, tiny_path, *words)
        assert done.code == 0 and heads in done.out
        assert [name for name in ("prose", "code", "all") if re.search(rf"^ *{name} ", done.out, re.MULTILINE)] == [
            "prose", "code", "all",
        ]  # fmt: skip
        assert "windows of 512 positions, 256 of them shared" in done.err


def _check(done: Outcome, said: str) -> None:
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1 and "Traceback" not in done.err
    assert re.search(said, done.err), done.err


BAD: dict[str, tuple[list[str], str]] = {
    "no text": ([], "give --text FILE or --domain NAME=PATH"),
    "absent": (["--text", "DIR/absent.txt"], "absent.txt: no such file"),
    "a folder": (["--text", "DIR"], "not a regular file"),
    "empty": (["--text", "DIR/empty.txt"], "empty.txt: is empty"),
    "blank": (["--text", "DIR/blank.txt"], "blank.txt: is empty"),
    "too short": (["--domain", "e=DIR/short.txt"], "e: the text has 1 tokens, too few to be scored: give at least 2"),
    "no text but bytes": (["--text", "DIR/bytes.txt"], "is not UTF-8"),
    "domain without a path": (["--domain", "code"], "is not NAME=PATH"),
    "domain twice": (["--domain", "a=DIR/short.txt", "--domain", "a=DIR/short.txt"], "given twice"),
    "domain called text": (["--text", "DIR/short.txt", "--domain", "text=DIR/short.txt"], "given twice"),
    "experts": (["--text", "DIR/text.txt", "--top-k-experts", "3"], "--top-k-experts 3"),
    "context": (["--text", "DIR/text.txt", "--ctx", "99999999"], "lower it"),
    "nul": (["--text", "a\0b"], "can't be read|no such file"),
}


@pytest.mark.parametrize("command", ["ppl", "kl"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input(cli: Cli, tiny_path: Path, tmp_path: Path, name: str, command: str) -> None:
    for file, data in (
        ("empty", b""),
        ("blank", b" \n"),
        ("short", b"e"),
        ("bytes", b"a\xff"),
        ("text", LAST.encode()),
    ):
        (tmp_path / f"{file}.txt").write_bytes(data)
    words, said = BAD[name]
    _check(cli("eval", command, tiny_path, *(w.replace("DIR", str(tmp_path)) for w in words), *FAST), said)


def test_a_text_that_is_too_long(cli: Cli, tiny_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_texts, "MAX_TEXT_BYTES", 100)
    _check(cli("eval", "ppl", tiny_path, "--text", texts / "prose.txt", *FAST), "is longer than")


def test_logits_that_do_not_fit_the_disk_are_refused_before_the_run(
    cli: Cli, tiny_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.cli.spool.shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    _check(
        cli("eval", "kl", tiny_path, "--text", texts / "prose.txt", *FAST), "1000B free: give less text, or set TMPDIR"
    )


def test_the_temporary_file_goes_where_tmpdir_says_and_away(
    cli: Cli, tiny_path: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("sluice.cli.spool.filesystem_of", lambda folder: asked.append(folder))
    assert cli("eval", "kl", tiny_path, "--text", texts / "code.txt", *FAST).code == 0
    assert asked == [tmp_path] and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    _check(cli("eval", "kl", tiny_path, "--text", texts / "code.txt", *FAST), "can't be written.*set TMPDIR")


@pytest.mark.parametrize("command", ["ppl", "kl"])
def test_ctrl_c_ends_it_after_the_step(
    cli: Cli, tiny_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    step, calls = Engine._step, []

    def interrupted(self: Engine, *arguments: Any) -> Any:
        calls.append(arguments)
        signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    monkeypatch.setattr(Engine, "_step", interrupted)
    done = cli("eval", command, tiny_path, "--text", texts / "prose.txt", "--ctx", 64, "--json", *FAST)
    assert (done.code, done.out, len(calls)) == (130, "", 1)
    assert "Traceback" not in done.err
