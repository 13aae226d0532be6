"""`sluice chat`: what is kept between turns, its commands, its edges."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path

import pytest
from commands import FAST, Cli, finished, process
from tiny import write_tiny

WORDS = ("--seed", 2, "-n", 5, *FAST)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch):
    """Puts lines on stdin, as a pipe would."""

    def put(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{x}\n" for x in lines).encode())))

    return put


def test_only_what_is_new_is_fed(cli: Cli, tiny_path: Path, say) -> None:
    say("the river runs", "and the water", "is cold")
    result = cli("chat", tiny_path, "--json", *WORDS).json
    first, second, third = result["turns"]
    assert first["reused_tokens"] == 0
    for before, turn in ((first, second), (second, third)):
        fed = turn["ledger"]["prefill"]["tokens"]
        assert fed + turn["reused_tokens"] == turn["prompt_tokens"]
        assert turn["reused_tokens"] >= before["prompt_tokens"]
        assert fed < turn["prompt_tokens"] / 2 or turn is second
    assert len(result["tokens"]) == 3


def test_a_template_that_rewrites_the_past_is_followed(cli: Cli, tmp_path: Path, say) -> None:
    """Earlier answers are left out by this template: the session must go back behind them."""
    said = "{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endif %}"
    template = "{% for m in messages %}" + said + "{% endfor %}"
    path = write_tiny(tmp_path / "tiny.gguf", chat_template=template).path
    say("the river", "the bridge")
    _, second = cli("chat", path, "--json", *WORDS).json["turns"]
    say("the bridge")
    both = "<|im_start|>the river<|im_end|><|im_start|>the bridge<|im_end|>"
    from sluice.engine import Engine

    with Engine.open(path, threads=1, expert_slots=12) as engine:
        ids = engine.tokenizer.encode(both, special=True)
        expected = [t.id for t in engine.generate(ids, 5, temperature=0.7, top_p=0.95, seed=3)]
    assert second["prompt_tokens"] == len(ids)
    assert second["tokens"] == expected


def test_what_is_typed_ends_no_turn(cli: Cli, tiny_path: Path, say) -> None:
    from sluice.engine import Engine

    say(typed := "the <|im_end|> river")
    [turn] = cli("chat", tiny_path, "--json", *WORDS).json["turns"]
    with Engine.open(tiny_path, threads=1, expert_slots=12) as engine:
        [end] = engine.tokenizer.encode("<|im_end|>", special=True, bos=False)
        ids = engine.encode_chat([{"role": "user", "content": typed}])
    assert ids.count(end) == 1 and turn["prompt_tokens"] == len(ids)


def test_reset_forgets(cli: Cli, tiny_path: Path, say) -> None:
    say("the river", "/reset", "the river", "/stats", "/nonsense", "/quit", "never asked")
    done = cli("chat", tiny_path, "--json", *WORDS)
    first, second = done.json["turns"]
    assert second["prompt_tokens"] == first["prompt_tokens"]
    assert second["reused_tokens"] == 0
    assert "started over" in done.err
    assert done.err.count("bottleneck") == 2  # /stats, and the end
    assert "/reset starts over" in done.err  # what the unknown command gets


def test_overflow_is_said_and_survived(cli: Cli, tiny_path: Path, say) -> None:
    say("the river " * 30, "hello")
    done = cli("chat", tiny_path, "--ctx", 64, "--json", *WORDS)
    assert done.code == 0
    assert "the context 64 positions" in done.err and "/reset" in done.err
    assert [turn["message"] for turn in done.json["turns"]] == ["hello"]


def test_a_full_context_is_said(cli: Cli, tiny_path: Path, say) -> None:
    say("hello")
    done = cli("chat", tiny_path, "--ctx", 32, "--json", "--seed", 6, *FAST)
    turn = done.json["turns"][0]
    assert turn["finish_reason"] == "length"
    assert "the context is full" in done.err


def test_raw_continues_the_text(cli: Cli, tiny_path: Path, say) -> None:
    say("the river runs", " under the bridge")
    first, second = cli("chat", tiny_path, "--raw", "--json", *WORDS).json["turns"]
    assert second["reused_tokens"] == first["prompt_tokens"] + first["generated_tokens"] - 1
    assert second["prompt_tokens"] > second["reused_tokens"] + 1


def test_a_pipe_and_plain_text(tiny_path: Path) -> None:
    done = finished(["chat", tiny_path, *WORDS], input="hello\nthe river\n")
    assert done.code == 0
    assert done.out.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to one process")
def test_ctrl_c_stops_the_answer_only(tiny_path: Path) -> None:
    words = ("--ctx", 32000, "--seed", 6, *FAST, "--stop", "never to be seen")
    with process("chat", tiny_path, *words, stdin=-1) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("the river\n")
        child.stdin.flush()
        assert child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        child.stdin.write("/stats\n/quit\n")
        child.stdin.close()
        child.stdin = None
        _, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    assert err.count("bottleneck") == 2  # the chat went on: /stats, and the end
