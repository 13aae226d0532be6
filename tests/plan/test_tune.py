"""The search of `sluice tune`, on speeds that are made up, and the files that it leaves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import InputError
from sluice.plan import tuned
from sluice.plan.tune import NO_TIME, Found, Knob, Sample, Search, Settings, Stopped

SHARE = Knob("pool_share", (0.25, 0.4, 0.55, 0.7, 0.85, 1.0))
THREADS = Knob("threads", (1, 2, 3, 4))
READER = Knob("reader", ("auto", "threads"), ordered=False)
START = {"pool_share": 1.0, "threads": 4, "reader": "auto"}
PEAK = {0.25: 4.0, 0.4: 5.0, 0.55: 6.0, 0.7: 5.5, 0.85: 4.5, 1.0: 4.0}  # more slots are slower from 0.55 on


class Machine:
    """Runs that decode at `speed(settings)`, with noise, each taking a second."""

    def __init__(self, speed: Callable[[Settings], float], noise: float = 0.0, seed: int = 0) -> None:
        self.speed, self.noise, self.random = speed, noise, random.Random(seed)
        self.runs: list[Settings] = []

    def __call__(self, settings: Settings) -> Sample:
        self.runs.append(dict(settings))
        speed = self.speed(settings) * math.exp(self.random.gauss(0, self.noise))
        return Sample(dict(settings), speed, 1.0, (1, 2, 3))

    def left_s(self, minutes: float) -> Callable[[], float]:
        return lambda: minutes * 60 - len(self.runs)


def search(machine: Callable[[Settings], Sample], *knobs: Knob, **more: Any) -> Found:
    return Search(START, knobs or (SHARE, THREADS, READER), machine, **more).run()


def test_a_peak_between_the_ends_is_found() -> None:
    found = search(Machine(lambda s: PEAK[s["pool_share"]], 0.02))
    assert found.best == {**START, "pool_share": 0.55}
    assert found.confirmed and found.gain == pytest.approx(0.5, abs=0.1) and found.stopped is None


def test_knobs_that_help_are_all_turned() -> None:
    def speed(s: Settings) -> float:
        return (
            PEAK[s["pool_share"]] * {1: 1.0, 2: 1.3, 3: 1.2, 4: 1.0}[s["threads"]] * (1 + 0.1 * (s["reader"] != "auto"))
        )

    found = search(Machine(speed, 0.01))
    assert found.best == {"pool_share": 0.55, "threads": 2, "reader": "threads"}


def test_the_defaults_stay_where_nothing_beats_them() -> None:
    machine = Machine(lambda s: s["threads"] * s["pool_share"], 0.01)
    found = search(machine)
    assert (found.best, found.gain, found.confirmed) == (START, None, False)
    assert {one.verdict for one in found.tried} == {"not faster"}
    assert len(found.tried[0].ratios) == 1  # what is clearly worse in a first pair is not run again


def test_noise_alone_rarely_changes_anything() -> None:
    changed = [search(Machine(lambda s: 5.0, 0.05, seed)).best != START for seed in range(60)]
    assert sum(changed) <= 3


def test_luck_in_the_search_is_found_out_at_the_end() -> None:
    machine = Machine(lambda s: 6.0 if s["threads"] == 3 and len(machine.runs) < 8 else 5.0, 0.005)
    found = search(machine, THREADS)
    assert any(one.verdict == "faster" for one in found.tried)
    assert found.best == START and not found.confirmed and found.gain == pytest.approx(0, abs=0.02)


def test_what_changes_the_output_or_cannot_run_is_dropped() -> None:
    def measure(settings: Settings) -> Sample:
        if settings["pool_share"] < 0.8:
            raise InputError("too few slots")
        return Sample(settings, 9.0 / settings["pool_share"], 1.0, (1, 2) if settings["threads"] == 4 else (1, 3))

    found = search(measure, SHARE, THREADS)
    assert found.best == {**START, "pool_share": 0.85}
    assert [(one.value, one.verdict, one.gain is None) for one in found.tried[1:]] == [
        (0.7, "dropped: too few slots", True), (3, "dropped: it changed the output", True)
    ]  # fmt: skip


def test_a_start_that_cannot_run_is_the_users_to_mend() -> None:
    def measure(settings: Settings) -> Sample:
        raise InputError("no such model")

    with pytest.raises(InputError, match="no such model"):
        search(measure)


@pytest.mark.parametrize("minutes", [0.1, 0.3, 0.5, 2.0])
def test_it_ends_in_time_and_what_it_has_is_compared_once_more(minutes: float) -> None:
    machine = Machine(lambda s: PEAK[s["pool_share"]], 0.02)
    found = search(machine, left_s=machine.left_s(minutes))
    assert len(machine.runs) <= max(1, minutes * 60)
    assert (found.stopped == NO_TIME) == (minutes < 1.0)
    assert found.confirmed == (found.best != START)


def test_an_interrupt_keeps_the_best_so_far() -> None:
    def speed(settings: Settings) -> float:
        if settings["threads"] != 4:
            raise Stopped("it was interrupted")
        return PEAK[settings["pool_share"]]

    found = Search(START, [SHARE, THREADS], Machine(speed))
    result = found.run()
    assert result.best == {**START, "pool_share": 0.55}
    assert result.stopped == "it was interrupted" and not result.confirmed
    assert found.gain_so_far() == pytest.approx(0.5)


# --- files


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuned, "cache_folder", lambda: tmp_path / "cache")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def kept(model: Path, settings: Mapping[str, Any], machine: str = "m") -> tuned.Tuned:
    return tuned.Tuned.of(model, machine, budget=4 << 30, settings=settings, gain=0.1, when="2026-11-30T12:00:00+00:00")


def test_what_is_saved_is_found_for_this_file_and_machine(model: Path) -> None:
    one = kept(model, {"threads": 2, "pool_share": 0.55, "no_prefetch": True, "policy": "lru", "reader": "threads"})
    tuned.save(one)
    assert tuned.find(model, "m") == one
    assert tuned.find(model, "another machine") is None
    two = kept(model, {"io_threads": 8})
    tuned.save(two)
    assert tuned.find(model, "m") == two
    model.write_bytes(b"GGUF, another")
    assert tuned.find(model, "m") is None
    tuned.save(kept(model, {}))
    tuned.forget(model, "m")
    assert tuned.find(model, "m") is None


def test_the_pools_share_holds_for_like_budgets(model: Path) -> None:
    one = kept(model, {"threads": 2, "pool_share": 0.55})
    assert one.for_budget(int(3.8 * (1 << 30))) == one
    assert one.for_budget(3 << 30).settings == one.without_pool().settings == {"threads": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {"kv": "q4_0"}, {"threads": 0}, {"threads": "2"}, {"threads": True}, {"pool_share": 2.0}, {"pool_share": 1},
        {"reader": "fast"}, {"no_prefetch": 1}, {"policy": None},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_as_good_as_none(model: Path, settings: dict[str, Any]) -> None:
    tuned.save(kept(model, settings))
    assert tuned.find(model, "m") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 2}', b'{"format": 1}', b"[" * 70000, b"\xff"])
def test_damaged_files_are_as_good_as_none(model: Path, content: bytes) -> None:
    tuned.save(kept(model, {})).write_bytes(content)
    assert tuned.find(model, "m") is None
