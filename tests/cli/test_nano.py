"""`nano`, the trained model that comes with Sluice: its files, and its own heads and adapter for predicted routes."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from commands import Cli

from sluice import nano

ASK = ("-p", "The king said", "-n", 16, "--temperature", 0, "--json", "--threads", 1)
SLOTS = ("--expert-slots", 38)  # 15 % of its 256


def test_the_files_are_what_the_card_says() -> None:
    card = json.loads(nano.CARD.read_text(encoding="utf-8"))
    for path in (nano.MODEL, nano.HEADS, nano.ADAPTER):
        assert card["files"].pop(path.name) == {
            "bytes": path.stat().st_size,
            "sha256": sha256(path.read_bytes()).hexdigest(),
        }
    assert not card["files"]
    assert nano.MODEL.stat().st_size <= 12 << 20


def test_it_is_exact_unless_asked_and_then_uses_all_it_brings(cli: Cli) -> None:
    exact = cli("run", "nano", *ASK, *SLOTS).json
    assert exact["mode"]["routing"] == "exact"
    assert "lora" not in exact["mode"]
    assert exact["tokens"] == cli("run", nano.MODEL, *ASK).json["tokens"]
    predicted = cli("run", "nano", *ASK, *SLOTS, "--routing", "prerouted").json
    files = ("--prerouter", nano.HEADS, "--lora", nano.ADAPTER)
    assert predicted["mode"] == cli("run", nano.MODEL, *ASK, *SLOTS, "--routing", "prerouted", *files).json["mode"]
    assert predicted["mode"]["routing"] == "prerouted"
    assert nano.ADAPTER.name in str(predicted["mode"]["lora"])


def test_heads_of_the_users_own_go_without_its_adapter(cli: Cli) -> None:
    mode = cli("run", "nano", *ASK, *SLOTS, "--routing", "prerouted", "--prerouter", nano.HEADS).json["mode"]
    assert "lora" not in mode


def test_it_writes_words_it_has_learnt(cli: Cli) -> None:
    text = cli("run", "nano", *ASK).json["text"]
    assert text.isascii() and " " in text.strip()


def test_other_commands_know_it_too(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("And the LORD spake unto Moses, saying, Speak unto the children of Israel.\n" * 8)
    score = ("--text", text, "--ctx", 64, "--expert-slots", 64, "--json")
    exact = cli("eval", "ppl", "nano", *score).json
    predicted = cli("eval", "kl", "nano", *score, "--routing", "prerouted").json
    assert 1 < exact["ppl"] < predicted["ppl"] < 4096
    assert predicted["mode"]["routing"] == "prerouted"
    arms = cli("bench", "nano", "--gen", 4, "--repeat", 1, "--compare", "exact,prerouted", *SLOTS, "--json").json[
        "arms"
    ]
    assert [arms[name]["mode"]["routing"] for name in ("exact", "prerouted")] == ["exact", "prerouted"]


def test_a_missing_file_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sluice.cli.opening.HEADS", tmp_path / "none.safetensors")
    done = cli("run", "nano", *ASK, "--routing", "prerouted")
    assert done.code == 2
    assert "install Sluice again" in done.err
