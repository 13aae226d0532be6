"""What bad input gets: exit code 2 and one line on stderr with the cause and the remedy."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Cli, finished, process
from raw_gguf import STRING, U32, entry, file_bytes
from tiny import write_tiny

Make = Callable[[Path], Path]


def _file(data: bytes) -> Make:
    def make(folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(data)
        return path

    return make


def _truncated(folder: Path) -> Path:
    path = write_tiny(folder / "tiny.gguf").path
    path.write_bytes(path.read_bytes()[:-1000])
    return path


def _missing_shard(folder: Path) -> Path:
    first, second = write_tiny(folder / "tiny.gguf", split=2).paths
    second.unlink()
    return first


def _broken_template(folder: Path) -> Path:
    return write_tiny(folder / "tiny.gguf", chat_template="{% for %}").path


def _more_tokens_than_embeddings(folder: Path) -> Path:
    known = tiny.vocabulary()

    def one_more(n_vocab: int | None = None) -> tuple[list[str], list[int], list[str]]:
        tokens, kinds, merges = known
        return [*tokens, "one more"], [*kinds, kinds[0]], merges

    with pytest.MonkeyPatch.context() as patch:
        add = tiny.add_tokenizer

        def add_with_one_more(*args: Any) -> None:
            patch.setattr(tiny, "vocabulary", one_more)
            add(*args)

        patch.setattr(tiny, "add_tokenizer", add_with_one_more)
        return write_tiny(folder / "tiny.gguf").path


ARCHITECTURE = "general.architecture"
MODELS: dict[str, tuple[Make, str]] = {
    "no such file": (lambda folder: folder / "absent.gguf", "no such file: check the path"),
    "directory": (lambda folder: folder, "director"),
    "empty": (_file(b""), "empty"),
    "truncated": (_truncated, "truncated|shorter|ends"),
    "git-lfs": (_file(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"), "git-lfs|git lfs"),
    "not gguf": (_file(b"PK\x03\x04" + bytes(500)), "GGUF"),
    "dense": (
        _file(file_bytes([entry(ARCHITECTURE, STRING, "llama"), entry("llama.block_count", U32, 2)])),
        "a dense model: Sluice is for Mixture-of-Experts models",
    ),
    "unknown architecture": (_file(file_bytes([entry(ARCHITECTURE, STRING, "mamba")])), "qwen35moe, qwen3moe"),
    "missing shard": (_missing_shard, "is missing"),
    "broken template": (_broken_template, "--raw"),
    "more tokens than embeddings": (_more_tokens_than_embeddings, "lists 401 tokens and embeds 400"),
}

OPTIONS: dict[str, tuple[list[str], str]] = {
    "too little memory": (["-p", "x", "--ram", "10M"], r"smallest budget that works is --ram \d+M"),
    "no size": (["-p", "x", "--ram", "lots"], "write it like 512M or 4G"),
    "nan size": (["-p", "x", "--ram", "-1G"], "write it like 512M or 4G"),
    "no number": (["-p", "x", "-n", "many"], "sluice run --help"),
    "no tokens": (["-p", "x", "-n", "0"], "at least 1"),
    "fewer than no tokens": (["-p", "x", "-n", "-1"], "at least 1"),
    "temperature": (["-p", "x", "--temperature", "-1"], "temperature is -1.0; give"),
    "temperature nan": (["-p", "x", "--temperature", "nan"], "temperature is nan; give"),
    "top_p": (["-p", "x", "--top-p", "0"], "top_p is 0.0; give"),
    "min_p": (["-p", "x", "--min-p", "2"], "min_p is 2.0; give"),
    "top k": (["-p", "x", "--sample-top-k", "-2"], "sample_top_k is -2; give"),
    "repeat penalty": (["-p", "x", "--repeat-penalty", "0"], "repeat_penalty is 0.0; give"),
    "negative seed": (["-p", "x", "--seed", "-1"], "out of range: give 0 to"),
    "huge seed": (["-p", "x", "--seed", str(1 << 64)], "out of range: give 0 to"),
    "threads": (["-p", "x", "--threads", "0"], "at least 1"),
    "many threads": (["-p", "x", "--threads", "100000"], "at most 512"),
    "slots": (["-p", "x", "--expert-slots", "1"], "one layer of one token needs 2"),
    "slots beyond ram": (["-p", "x", "--expert-slots", "9", "--ram", "20M"], "leave out --expert-slots"),
    "context": (["-p", "x", "--ctx", "99999999"], "lower it"),
    "prompt beyond the context": (["-p", "x" * 500, "--ctx", "16"], "raise --ctx"),
    "kv type": (["-p", "x", "--kv", "q5_0"], "f16, f32, q8_0, q4_0"),
    "reader": (["-p", "x", "--reader", "mmap"], "auto, io_uring, threads"),
    "policy": (["-p", "x", "--policy", "mru"], "choose from auto, arc, cyclic, lfru, lfu, lru, pinned, s3fifo"),
    "routing": (["-p", "x", "--routing", "psychic"], "exact"),
    "more experts than there are": (["-p", "x", "--top-k-experts", "9"], "the model takes 2 experts a token"),
    "no experts": (["-p", "x", "--top-k-experts", "0"], "top_k_experts is 0: give a whole number of at least 1"),
    "routing without heads": (["-p", "x", "--routing", "prerouted"], "needs predictions: give --prerouter FILE"),
    "heads that aren't there": (["-p", "x", "--prerouter", "/nowhere/heads"], "no such file"),
    "no margin": (["-p", "x", "--reroute", "wide"], "'wide' is no margin: write it like 0.05"),
    "margin that is no number": (["-p", "x", "--reroute", "nan"], "reroute nan:1 can't be"),
    "endless margin": (["-p", "x", "--reroute", "inf"], "reroute inf:1 can't be"),
    "keep fewer than none": (["-p", "x", "--reroute", "0.1:-1"], "reroute 0.1:-1 can't be"),
    "keep a half": (["-p", "x", "--reroute", "0.1:0.5"], "is no margin"),
    "keep more than there are": (["-p", "x", "--reroute", "0.1:3"], "keeps 3 experts of 2 that a token takes"),
    "rerouting with heads": (["-p", "x", "--reroute", "0.1", "--prerouter", "h"], "leave out one of them"),
    "rerouting predicted routes": (
        ["-p", "x", "--reroute", "0.1", "--routing", "prerouted", "--prerouter", "h"],
        "leave out reroute",
    ),
    "empty prompt": (["-p", ""], "the prompt is empty"),
    "two prompts": (["-p", "x", "--prompt-ids", "1"], "give one of them"),
    "no ids": (["--prompt-ids", ""], "write it like 1,2,3"),
    "words for ids": (["--prompt-ids", "1,two"], "write it like 1,2,3"),
    "negative id": (["--prompt-ids", "1,-2"], "write it like 1,2,3"),
    "id beyond the vocabulary": (["--prompt-ids", "1,400"], "vocabulary of 400"),
    "empty stop": (["-p", "x", "--stop", ""], "give at least one character"),
    "no such ggml": (["-p", "x", "--ggml", "/nowhere/ggml"], "no such file or folder"),
    "ggml without libraries": (["-p", "x", "--ggml", "/dev"], "name the folder that holds them"),
    "unknown option": (["--frobnicate"], "No such option"),
    "missing value": (["--ram"], "sluice run --help"),
}


def _check(code: int, out: str, err: str, expected: str) -> None:
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert re.search(expected, err), err


@pytest.mark.parametrize("name", MODELS)
def test_models(cli: Cli, tmp_path: Path, name: str) -> None:
    make, expected = MODELS[name]
    _check(*cli("run", make(tmp_path), "-p", "x", "--threads", 1, "--expert-slots", 6), expected)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "broken template"])
def test_models_inspected(cli: Cli, tmp_path: Path, name: str) -> None:
    make, expected = MODELS[name]
    _check(*cli("inspect", make(tmp_path)), expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(cli: Cli, tiny_path: Path, name: str) -> None:
    words, expected = OPTIONS[name]
    _check(*cli("run", tiny_path, *words), expected)


COMMANDS: dict[str, tuple[list[str], str]] = {
    "unknown command": (["walk"], "No such command"),
    "streams": (["bench", "TINY", "--streams", "0"], "at least 1"),
    "many streams": (["bench", "TINY", "--streams", "5000"], "at most 1024"),
    "repeat": (["bench", "TINY", "--repeat", "0"], "at least 1"),
    "gen": (["bench", "TINY", "--gen", "-3"], "at least 1"),
    "read rate": (["bench", "TINY", "--read-rate", "slow"], "write it like"),
    "arm without heads": (["bench", "TINY", "--compare", "exact,prerouted"], "needs --prerouter FILE"),
    "arm without a margin": (["bench", "TINY", "--compare", "exact,reroute:"], "'' is no margin: write it like"),
    "arm with a bad margin": (["bench", "TINY", "--compare", "reroute:-1"], "reroute -1:1 can't be"),
    "arms and rerouting": (["bench", "TINY", "--compare", "exact", "--reroute", "1"], "leave out --routing, --reroute"),
    "quality alone": (["bench", "TINY", "--quality-text", "x.txt"], "in the modes of --compare"),
    "quality of no text": (["bench", "TINY", "--compare", "exact", "--quality-text", "/no.txt"], "no such file"),
    "unknown arm": (["bench", "TINY", "--compare", "fastest"], "naive, demand, exact"),
    "arm twice": (["bench", "TINY", "--compare", "exact,exact"], "name each once"),
    "arm twice in other words": (["bench", "TINY", "--compare", "exact,reroute:0.1,reroute:0.10:1"], "name each once"),
    "heads for no arm": (["bench", "TINY", "--compare", "exact", "--prerouter", "DIR/short.txt"], "leave it out"),
    "arm that fails": (["bench", "TINY", "--compare", "exact", "--ram", "10M"], "smallest budget that works"),
    "inspect ram": (["inspect", "TINY", "--ram", "10M"], "smallest budget that works"),
    "pack without model": (["pack"], "Missing argument"),
    "doctor": (["doctor", "/nowhere.gguf"], "no such file"),
    "pack source": (["pack", "/nowhere.gguf", "/tmp/out.gguf"], "no such file"),
    "pack to a folder": (["pack", "TINY", "/tmp"], "directory"),
    "pack to the root": (["pack", "TINY", "/"], "names no file"),
    "pack to nothing": (["pack", "TINY", ""], "names no file"),
    "chat": (["chat", "TINY", "-n", "0"], "at least 1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(cli: Cli, tiny_path: Path, name: str) -> None:
    words, expected = COMMANDS[name]
    _check(*cli(*(str(tiny_path) if word == "TINY" else word for word in words)), expected)


def test_chat_without_a_template(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", chat_template=None).path
    _check(*cli("chat", path, "--threads", 1, "--expert-slots", 6), "--raw")


def test_pack_does_not_overwrite(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed.gguf"
    assert cli("pack", tiny_path, out).code == 0
    before = out.read_bytes()
    _check(*cli("pack", tiny_path, out), "--force")
    assert out.read_bytes() == before
    report = cli("pack", tiny_path, out, "--force", "--json").json
    assert (report["experts"], report["layers"], report["bytes"]) == (24, 3, len(before))
    assert [path.name for path in tmp_path.iterdir()] == ["packed.gguf"]


def test_no_prompt_on_an_empty_stdin() -> None:
    _check(*finished(["run", "x.gguf"]), "the prompt on stdin is empty")


def test_a_process_says_it_in_one_line_too(tmp_path: Path) -> None:
    _check(*finished(["run", tmp_path / "absent.gguf", "-p", "x"]), "no such file")
    _check(*finished(["run", "--threads", "x"]), "sluice run --help")


def test_what_an_error_quotes_can_not_steer_a_terminal(cli: Cli, tmp_path: Path) -> None:
    done = cli("run", tmp_path / "a\x1b[31mb\nc.gguf", "-p", "x")
    _check(*done, "no such file")
    assert "\x1b" not in done.err


def test_tracebacks_are_for_those_who_ask(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_DEBUG", "1")
    done = cli("run", tmp_path / "absent.gguf", "-p", "x")
    assert done.code == 2
    assert "Traceback" in done.err


def test_an_unforeseen_error_is_one_line(cli: Cli, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_DEBUG", raising=False)

    def fail(*args: object) -> None:
        raise ZeroDivisionError("on\npurpose")

    monkeypatch.setattr("sluice.cli.inspect.model_facts", fail)
    done = cli("inspect", tiny_path)
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "internal error (ZeroDivisionError: on purpose)" in done.err


def test_a_file_cut_short_while_running_ends_with_1(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    shutil.copy(tiny_path, path)
    words = ("-p", "x", "-n", 30000, "--ignore-eos", "--ctx", 32000, "--expert-slots", 6, "--threads", 1)
    with process("run", path, *words) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        os.truncate(path, 1 << 20)
        _, err = child.communicate(timeout=300)
    assert child.returncode == 1
    assert err.count("\n") == 1 and "Traceback" not in err
    assert "the file changed while running" in err


def test_every_command_points_at_its_own_help() -> None:
    from sluice.cli.app import app
    from sluice.cli.ending import COMMANDS

    groups = [group.typer_instance.info.name for group in app.registered_groups if group.typer_instance is not None]
    assert {command.name for command in app.registered_commands} | set(groups) == set(COMMANDS)
