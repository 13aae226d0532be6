"""`sluice bench`: streams, repeats, comparisons."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from commands import FAST, Cli
from test_run import KEYS

from sluice.engine import Engine, Generation
from sluice.text.sampling import SamplingParams


def test_one_stream(cli: Cli, tiny_path: Path) -> None:
    done = cli("bench", tiny_path, "--gen", 6, "--prompt-tokens", 10, "--repeat", 3, "--seed", 4, "--json", *FAST)
    result = done.json
    assert done.code == 0
    assert set(result) == KEYS | {"repeats", "bound", "predicted"}
    assert len(result["tokens"]) == result["generated_tokens"] == 6
    assert result["prompt_tokens"] == 10
    assert [one["pool"] for one in result["repeats"]] == ["cold", "warm", "warm"]
    assert result["tok_per_s"] == median(one["tok_per_s"] for one in result["repeats"])
    assert result["mode"]["temperature"] == result["mode"]["top_p"] == 1.0
    assert set(result["bound"]) == {"compute_s", "read_s", "bound_s", "achieved_s"}
    for one in result["repeats"]:
        assert one["ledger"]["decode"]["steps"] == 5
        assert one["tok_per_s"] == pytest.approx(5 / one["decode_s"])
    assert sum(one["ledger"]["decode"]["steps"] for one in result["repeats"]) == result["ledger"]["decode"]["steps"]


def test_streams_get_their_own_prompts_and_seeds(cli: Cli, tiny_path: Path) -> None:
    words = ("--gen", 5, "--prompt-tokens", 8, "--streams", 3, "--repeat", 1, "--seed", 9, "--json", *FAST)
    result = cli("bench", tiny_path, *words).json
    assert [len(tokens) for tokens in result["tokens"]] == [5, 5, 5]
    assert result["prompt_tokens"] == 24
    assert result["ledger"]["decode"]["steps"] == 4
    with Engine.open(tiny_path, threads=1, expert_slots=24, ctx=13) as engine:
        for stream, tokens in enumerate(result["tokens"]):
            params = SamplingParams(temperature=1, top_p=1, seed=9 + stream)
            with engine.session() as session:
                ids = [(100 + stream + 16 * i) % 400 for i in range(8)]
                alone = Generation(session, ids, params, max_tokens=5, ignore_eos=True)
                assert [token.id for token in alone] == tokens


def test_compare_runs_every_arm_in_every_round(cli: Cli, tiny_path: Path) -> None:
    words = ("--gen", 4, "--prompt-tokens", 6, "--repeat", 2, "--compare", "naive,exact", "--json", *FAST)
    result = cli("bench", tiny_path, *words).json
    assert list(result["arms"]) == ["naive", "exact"]
    assert result["same_tokens"] is True
    assert result["relative"]["naive"] == 1.0
    naive, exact = result["arms"]["naive"], result["arms"]["exact"]
    assert naive["seed"] == exact["seed"]
    for arm in (naive, exact):
        assert set(arm) == KEYS | {"repeats", "bound", "predicted"}
        assert [one["pool"] for one in arm["repeats"]] == ["cold", "cold"]
    assert naive["ledger"]["decode"]["prefetch_issued"] == 0 < exact["ledger"]["decode"]["prefetch_issued"]


def test_a_table_for_people(cli: Cli, tiny_path: Path) -> None:
    done = cli("bench", tiny_path, "--gen", 4, "--repeat", 2, "--raw-read", *FAST)
    assert done.code == 0
    assert "1 (cold pool)" in done.out and "2 (warm pool)" in done.out
    assert "policy lru" in done.err
    assert "read by threads" in cli("bench", tiny_path, "--gen", 1, "--repeat", 1, "--reader", "threads", *FAST).err


def test_a_slower_disk_is_emulated(cli: Cli, tiny_path: Path) -> None:
    words = ("--gen", 3, "--prompt-tokens", 4, "--repeat", 1, "--read-rate", "8M", "--no-prefetch", "--json", *FAST)
    decode = cli("bench", tiny_path, *words).json["ledger"]
    n_bytes = sum(phase["bytes_read"] for phase in decode.values())
    busy_s = sum(phase["io_busy_s"] for phase in decode.values())
    assert n_bytes > 0
    assert n_bytes / busy_s <= (8 << 20) * 1.01
