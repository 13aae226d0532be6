"""`sluice inspect` and `sluice doctor`: what they say agrees with what the engine does."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Cli, finished
from tiny import T, write_tiny

from sluice.engine import Engine
from sluice.io.files import ModelFiles

MIB = 1 << 20


def test_the_smallest_budget_is_what_run_accepts(tiny_path: Path) -> None:
    facts = finished(["inspect", tiny_path, "--ctx", 512, "--json"]).json
    smallest = facts["smallest_budget_bytes"] // MIB
    words = ("run", tiny_path, "-p", "x", "-n", 1, "--ctx", 512, "--threads", 1, "--json")
    accepted = finished([*words, "--ram", f"{smallest}M"])
    assert accepted.code == 0, accepted.err
    assert accepted.json["peak_rss_bytes"] <= smallest * MIB
    refused = finished([*words, "--ram", f"{smallest - 12}M"])
    assert refused.code == 2
    named = int(refused.err.split("--ram ")[2].split("M")[0])
    assert abs(named - smallest) <= 8


def test_facts(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path / "tiny.gguf", n_layers=4, dense_layers=[1], down_type=[T.Q4_K, T.Q6_K, T.Q6_K, T.Q6_K], top_k=3
    ).path
    facts = cli("inspect", path, "--json").json
    q4, q6 = 256 * 256 // 256 * 144, 256 * 256 // 256 * 210
    small, large = 3 * q4, 2 * q4 + q6
    assert facts["expert_bytes"] == {"min": small, "mean": (small + 2 * large) / 3, "max": large}
    assert facts["moe_layers"] == [0, 2, 3]
    assert facts["token_bytes"] == 3 * (small + 2 * large)
    assert facts["experts_bytes"] == 8 * (small + 2 * large)
    assert facts["expert_types"]["down"] == {"Q4_K": 1, "Q6_K": 2}
    # 4 layers of keys and of values, 2 heads of 64
    assert facts["kv_bytes_per_token"] == {"f16": 2048, "f32": 4096, "q8_0": 1088, "q4_0": 576}
    assert (facts["architecture"], facts["packed"], facts["chat_template"]) == ("qwen3moe", False, True)
    assert facts["dense_bytes"] + facts["experts_bytes"] < facts["file_bytes"]
    assert [b["slots"] for b in facts["budgets"]] == sorted(b["slots"] for b in facts["budgets"])
    assert facts["budgets"][-1]["share"] == 1.0


def test_a_budget_of_ones_own(cli: Cli, tiny_path: Path) -> None:
    facts = cli("inspect", tiny_path, "--ram", "20G", "--json").json
    assert facts["budgets"] == [{"budget_bytes": 20480 * MIB, "slots": 24, "share": 1.0}]


def test_packed_and_stock_hold_the_same(cli: Cli, tiny_path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.gguf"
    cli("pack", tiny_path, packed)
    stock, ours = (cli("inspect", path, "--json").json for path in (tiny_path, packed))
    assert (stock["packed"], ours["packed"]) == (False, True)
    for name in ("expert_bytes", "token_bytes", "dense_bytes", "experts", "expert_types"):
        assert ours[name] == stock[name]


def test_for_people(cli: Cli, tiny_path: Path) -> None:
    done = cli("inspect", tiny_path)
    assert done.code == 0
    for part in ("qwen3moe", "3, of which 3 with experts", "8 a layer, 2 a token", "smallest --ram", "100.0%"):
        assert part in done.out


def test_inspect_reads_no_tensors(cli: Cli, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise AssertionError("inspect read data")

    monkeypatch.setattr(ModelFiles, "read_into", refuse)
    assert cli("inspect", tiny_path).code == 0


def test_doctor(cli: Cli, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.cli.doctor.SECONDS", 0.05)
    report = cli("doctor", tiny_path, "--json").json
    assert report["disk"]["read_bytes"] == 256 * 256 // 256 * 144
    assert set(report["disk"]["bytes_per_s"]) == {"1", "4", "8"}
    assert all(rate > 0 for rate in report["disk"]["bytes_per_s"].values())
    assert report["cores"] >= 1
    with Engine.open(tiny_path, expert_slots=4) as engine:
        assert report["disk"]["reader"] == engine.store.reader.name
    for_people = cli("doctor", tiny_path)
    assert for_people.code == 0
    assert "at depth 8" in for_people.out and f"by {report['disk']['reader']}" in for_people.out


def test_doctor_cleans_up_after_itself(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr("sluice.cli.doctor.SECONDS", 0.05)
    monkeypatch.setattr("sluice.cli.doctor.PROBE_BYTES", 16 << 20)
    report = cli("doctor", "--json").json
    assert report["disk"]["read_bytes"] == 1 << 20
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_doctors_warnings() -> None:
    from sluice.cli.doctor import warnings

    disk = {"file_system": "ext4", "mode": "direct", "bytes_per_s": {"1": 1e9, "4": 2e9, "8": 2e9}}
    good = {
        "cores": 8,
        "memory_bytes": 1 << 34,
        "memory_limit_bytes": None,
        "ggml": {"tried": True, "features": ["avx2"], "version": "1"},
        "disk": disk,
    }
    ours = warnings(good)  # what this platform itself is warned of

    def more(**changes: object) -> str:
        return "\n".join(text for text in warnings({**good, **changes}) if text not in ours)

    assert "usable cores: 2" in more(cores=2)
    assert "limits memory to 1.00G" in more(memory_limit_bytes=1 << 30)
    assert "is memory" in more(disk={**disk, "file_system": "tmpfs", "mode": "buffered"})
    assert "network" in more(disk={**disk, "file_system": "nfs4"})
    assert "page cache" in more(disk={**disk, "mode": "buffered"})
    assert "100 MB/s" in more(disk={**disk, "bytes_per_s": {"1": 1e8, "4": 1e8, "8": 1e8}})
    assert "--io-threads 1" in more(disk={**disk, "bytes_per_s": {"1": 2e9, "4": 1e9, "8": 1e9}})
    assert "newer" in more(ggml={**good["ggml"], "tried": False})
