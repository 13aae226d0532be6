"""`sluice simulate`: capacities as they are written, what is printed, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import Cli
from test_simulate_timed import PROFILE

from sluice.cli.simulate import NAMES, PHASES, _capacity, capacities
from sluice.errors import InputError
from sluice.lab import replay, simulate
from sluice.lab.replay import Demands
from sluice.lab.synthetic import Shape, write
from sluice.plan.profile import save
from sluice.trace import TraceReader

KEYS = [
    "policy", "capacity_slots", "capacity_share", "demands", "hits", "misses", "evictions", "hit_rate",
    "byte_hit_rate", "reads_per_token", "tok_per_s",
]  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """60 tokens of 3 layers × 8 experts, top 2."""
    write(tmp_path / "t.parquet", Shape(layers=3, experts=8, top_k=2, topics=2), 60)
    return tmp_path / "t.parquet"


def slots(text: str, n_experts: int = 6144) -> list[int]:
    return capacities([_capacity(item) for item in text.split(",")], n_experts)


def test_capacities() -> None:
    assert slots("96") == [96]
    assert slots("13.4%") == [823]
    assert slots("5%..60%", 100) == list(range(5, 61, 5))
    assert slots("1..12") == list(range(1, 13))
    assert slots(" 50% , 96,100%,3072") == [3072, 96, 6144]  # each once
    assert slots("0.5%", 100) == [1]


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-5", "101%", "6145", "0%", "0.001%", "5%..60", "5%..", "..5%", "60%..5%", "5..5", "1e3",
             "nan%", "5,,6", "9" * 40],
)  # fmt: skip
def test_capacities_that_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="capacity") as caught:
        slots(text)
    assert "\n" not in str(caught.value)


def test_names_are_the_simulators() -> None:
    assert simulate.SIMULATED == NAMES and replay.PHASES == PHASES


def test_json(cli: Cli, trace: Path) -> None:
    outcome = cli("simulate", trace, "--capacity", "9,50%,1", "--json")
    assert outcome.code == 0, outcome.err
    assert list(outcome.json) == ["results"]
    results = outcome.json["results"]
    assert [(r["capacity_slots"], r["policy"]) for r in results] == [(n, name) for n in (9, 12, 1) for name in NAMES]
    with TraceReader(trace) as reader:
        demands = Demands.of(reader)
    for r in results:
        assert list(r) == KEYS
        assert r == simulate.simulate(demands, r["policy"], r["capacity_slots"]).as_dict()
        assert r["demands"] == 360 == r["hits"] + r["misses"] and r["reads_per_token"] == r["misses"] / 60
        assert r["tok_per_s"] is None


def test_table_shows_the_gap_to_the_bound(cli: Cli, trace: Path) -> None:
    outcome = cli("simulate", trace, "--policies", "lru,belady", "--capacity", "50%", "--phase", "decode")
    assert outcome.code == 0, outcome.err
    assert "lru's gap to belady" in outcome.out
    lru, belady, gap = (float(word.rstrip("%")) for word in outcome.out.split("12 (50.0%)")[1].split()[:3])
    assert belady > lru and gap == pytest.approx(belady - lru, abs=0.11)
    alone = cli("simulate", trace, "--policies", "arc", "--capacity", "50%")
    assert alone.code == 0 and "gap" not in alone.out


def test_speed_on_a_machine(cli: Cli, trace: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    save(PROFILE, profile)
    words = ("simulate", trace, "--policies", "lru,belady", "--capacity", "9,100%", "--profile", profile)
    results = cli(*words, "--json").json["results"]
    speeds = {(r["policy"], r["capacity_slots"]): r["tok_per_s"] for r in results}
    assert 0 < speeds["lru", 9] < speeds["belady", 9] < speeds["lru", 24] == speeds["belady", 24]
    assert "predicted tokens a second" in cli(*words).out
    assert cli(*words, "--phase", "prefill", "--json").json["results"][0]["tok_per_s"] is None  # there are no prompts


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--policies", "lru,mru"], "'mru' is unknown: choose from lru"),
        (["--policies", ""], "'' is unknown"),
        (["--phase", "warmup"], "'warmup' is unknown: choose from all"),
        (["--capacity", "25"], "25 of 24 experts"),
        (["--capacity", "many"], "'many'"),
        (["--profile", "missing.json"], "missing.json"),
    ],
)
def test_bad_options(cli: Cli, trace: Path, words: list[str], cause: str) -> None:
    outcome = cli("simulate", trace, *words)
    assert outcome.code == 2 and cause in outcome.err
    assert not outcome.out and len(outcome.err.splitlines()) == 1


def test_bad_traces(cli: Cli, trace: Path, tmp_path: Path) -> None:
    empty, cut = tmp_path / "empty", tmp_path / "cut"
    empty.touch()
    cut.write_bytes(trace.read_bytes()[:400])
    for path in (empty, cut, tmp_path / "none", tmp_path):
        outcome = cli("simulate", path)
        assert outcome.code == 2 and path.name in outcome.err
        assert len(outcome.err.splitlines()) == 1


def test_a_profile_of_another_model(cli: Cli, trace: Path, tmp_path: Path) -> None:
    save(replace(PROFILE, n_expert=16), tmp_path / "other.json")
    outcome = cli("simulate", trace, "--profile", tmp_path / "other.json")
    assert outcome.code == 2 and "16 experts a layer, the trace's 8" in outcome.err
