"""`sluice run`: its JSON, its streams, its prompts."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from commands import FAST, Cli, finished

KEYS = {
    *("text", "tokens", "finish_reason", "prompt_tokens", "generated_tokens", "load_s", "ttft_s", "prefill_tok_per_s"),
    *("tok_per_s", "itl_ms", "peak_rss_bytes", "budget_bytes", "slots", "seed", "mode", "ledger"),
}
PHASE_KEYS = {
    *("wall_s", "compute_s", "wait_s", "host_s", "demands", "hits", "late_hits", "misses", "token_demands"),
    *("evictions", "bytes_read", "prefetch_issued", "prefetch_used", "prefetch_late", "prefetch_wasted"),
    *("recall_at_k", "substituted", "io_busy_s", "io_depth_mean", "resident_bytes", "page_cache_bytes"),
}


def test_json_has_the_keys_and_the_sums_hold(cli: Cli, tiny_path: Path) -> None:
    done = cli("run", tiny_path, "-p", "hello", "-n", 8, "--seed", 3, "--ignore-eos", "--json", *FAST)
    result = done.json
    assert done.code == 0
    assert set(result) == KEYS
    assert set(result["itl_ms"]) == {"p50", "p95", "max"}
    assert len(result["tokens"]) == result["generated_tokens"] == 8
    assert result["finish_reason"] == "length"
    assert result["slots"] == 12
    assert result["budget_bytes"] is None  # the pool was set, no budget given
    assert set(result["ledger"]) == {"prefill", "decode"}
    for phase in result["ledger"].values():
        assert set(phase) >= PHASE_KEYS
        assert phase["demands"] == phase["hits"] + phase["late_hits"] + phase["misses"] > 0
        assert phase["wall_s"] == pytest.approx(phase["compute_s"] + phase["wait_s"] + phase["host_s"])
    assert result["mode"]["routing"] == "exact"
    assert result["mode"]["temperature"] == 0.7
    assert done.out.count("\n") == 1  # the text is in the object, not streamed before it


def test_unmeasured_is_null(cli: Cli, tiny_path: Path) -> None:
    result = cli("run", tiny_path, "-p", "hello", "-n", 1, "--json", *FAST).json
    assert result["generated_tokens"] == 1
    assert result["tok_per_s"] is None
    assert result["itl_ms"] == {"p50": None, "p95": None, "max": None}
    assert result["ledger"]["decode"]["io_depth_mean"] is None


def test_the_same_seed_gives_the_same_tokens_whatever_the_pool(cli: Cli, tiny_path: Path) -> None:
    common = ("run", tiny_path, "-p", "the river", "-n", 12, "--json", "--threads", 1)
    first = cli(*common, "--seed", 7, "--expert-slots", 4).json
    again = cli(*common, "--seed", 7, "--expert-slots", 24, "--policy", "lfu", "--no-prefetch").json
    other = cli(*common, "--seed", 8, "--expert-slots", 4).json
    assert first["tokens"] == again["tokens"] != other["tokens"]


def test_the_answer_streams_and_stderr_sums_up(cli: Cli, tiny_path: Path) -> None:
    done = cli("run", tiny_path, "-p", "the old bridge", "-n", 6, "--threads", 1)
    as_json = cli("run", tiny_path, "-p", "the old bridge", "-n", 6, "--threads", 1, "--json")
    seed = done.err.rsplit("seed ", 1)[1].removesuffix(" (random)\n")
    again = cli("run", tiny_path, "-p", "the old bridge", "-n", 6, "--threads", 1, "--seed", seed)
    assert done.code == as_json.code == 0
    assert again.out == done.out
    budget, summary = done.err.splitlines()
    assert budget.startswith("budget ")
    for part in ("exact", "tok/s", "hit rate", "read a token", "waiting", "bottleneck", "bound", "achieved", "seed"):
        assert part in summary


def test_ids_are_taken_as_they_are(cli: Cli, tiny_path: Path) -> None:
    result = cli("run", tiny_path, "--prompt-ids", "1,2,3", "-n", 2, "--json", *FAST).json
    assert result["prompt_tokens"] == 3
    assert result["mode"]["raw"] is True


def test_raw_leaves_the_template_out(cli: Cli, tiny_path: Path) -> None:
    templated = cli("run", tiny_path, "-p", "hello", "-n", 1, "--json", *FAST).json
    raw = cli("run", tiny_path, "-p", "hello", "-n", 1, "--raw", "--json", *FAST).json
    assert raw["prompt_tokens"] < templated["prompt_tokens"]


def test_prompt_from_stdin(cli: Cli, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = cli("run", tiny_path, "-p", "hello", "-n", 2, "--json", "--seed", 1, *FAST).json
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    piped = cli("run", tiny_path, "-n", 2, "--json", "--seed", 1, *FAST).json
    assert (piped["prompt_tokens"], piped["tokens"]) == (given["prompt_tokens"], given["tokens"])


def test_a_stop_text_ends_the_answer(cli: Cli, tiny_path: Path) -> None:
    common = ("run", tiny_path, "-p", "hello", "-n", 40, "--seed", 5, "--ignore-eos", "--json", *FAST)
    whole = cli(*common).json["text"]
    stop = whole[len(whole) // 2 :][:2]
    cut = cli(*common, "--stop", stop).json
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole[: whole.index(stop)]


def test_a_long_prompt_fed_in_pieces_gives_the_same_tokens(cli: Cli, tiny_path: Path) -> None:
    from sluice.engine import Engine

    ids = [(7 * i) % 400 for i in range(1100)]  # more than two chunks
    with Engine.open(tiny_path, expert_slots=12, threads=1) as engine:
        expected = [token.id for token in engine.generate(ids, 4, temperature=0, ignore_eos=True)]
    words = ("--prompt-ids", ",".join(map(str, ids)), "-n", 4, "--temperature", 0, "--ignore-eos", "--json")
    result = cli("run", tiny_path, *words, *FAST).json
    assert result["tokens"] == expected
    assert result["prompt_tokens"] == 1100


def test_a_pool_below_one_tokens_demand_is_warned_of(cli: Cli, tiny_path: Path) -> None:
    few = cli("run", tiny_path, "-p", "hello", "-n", 1, "--threads", 1, "--expert-slots", 5)
    enough = cli("run", tiny_path, "-p", "hello", "-n", 1, "--threads", 1, "--expert-slots", 6)
    assert "warning: 5 expert slots are fewer than the 6 experts that one token needs" in few.err
    assert "warning" not in enough.err


def test_help_is_light() -> None:
    script = (
        "import sys; from sluice.cli import main; code = main(['--help']); "
        "heavy = {'numpy', 'tokenizers', 'gguf', 'jinja2', 'sluice.ggml'} & set(sys.modules); "
        "sys.exit(code or str(heavy or 'light'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "light\n")
    assert all(name in done.stdout for name in ("run", "chat", "bench", "inspect", "pack", "doctor"))


def test_version_and_bare_call(cli: Cli) -> None:
    from sluice import __version__

    assert cli("--version").out == f"{__version__}\n"
    assert "Usage" in cli().out
    assert finished(["--version"]).code == 0


def test_another_number_of_experts_is_called_lossy(cli: Cli, tiny_path: Path) -> None:
    common = ("run", tiny_path, "-p", "hello", "-n", 6, "--seed", 3, "--ignore-eos", "--json", *FAST)
    own, same, other = (cli(*common, *more) for more in ((), ("--top-k-experts", 2), ("--top-k-experts", 1)))
    assert own.json["tokens"] == same.json["tokens"] != other.json["tokens"]
    assert own.json["mode"] == same.json["mode"]
    assert (own.json["mode"]["top_k_experts"], other.json["mode"]["top_k_experts"]) == (2, 1)
    assert other.json["mode"]["top_k_experts_of_model"] == 2
    assert "lossy" not in own.err and "lossy, 1 expert a token instead of the model's 2" in other.err
    assert other.json["ledger"]["decode"]["token_demands"] * 2 == own.json["ledger"]["decode"]["token_demands"]
