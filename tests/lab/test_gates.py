"""Gates: what can't be read is refused, what changed or wasn't measured has failed, the rest is arithmetic."""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import InputError
from sluice.lab.gate_check import Verdict, check, read_results
from sluice.lab.gates import Registration, dataset_faults, read_gate, record, registration

HEAD = 'name = "three"\ndescription = "Three experts, not four."\nseed = 7\n'
BENEFIT = (
    '[[metric]]\nname = "hits"\nside = "benefit"\npath = "results.0.hit_rate"\ndirection = ">="\nthreshold = 0.6\n'
)
COST = '[[metric]]\nname = "quality"\nside = "cost"\npath = "ppl_change"\ndirection = "<="\nthreshold = 0.01\n'
GATE = HEAD + COST + BENEFIT
RECORDED = Registration("recorded", "2026-01-01T00:00:00+00:00", "0" * 64)


def written(folder: Path, text: str = GATE) -> Path:
    path = folder / "gate.toml"
    path.write_text(text)
    return path


def with_dataset(folder: Path) -> Path:
    data = b"some text"
    (folder / "text.txt").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return written(folder, GATE + f'[[dataset]]\nfile = "text.txt"\nsha256 = "{digest}"\n')


def checked(path: Path, *, known: Registration = RECORDED, **results: Any) -> Verdict:
    """`results` by file names without their `.json`."""
    return check(read_gate(path), known, {f"{name}.json": result for name, result in results.items()})


def hits(value: Any) -> dict[str, Any]:
    return {"results": [{"hit_rate": value}]}


def test_benefits_come_first_and_bounds_count_as_reached(tmp_path: Path) -> None:
    verdict = checked(written(tmp_path), sim=hits(0.6), kl={"ppl_change": 0.01})
    assert [(o.metric.side, o.metric.name, o.value, o.passed) for o in verdict.outcomes] == [
        ("benefit", "hits", 0.6, True), ("cost", "quality", 0.01, True),
    ]  # fmt: skip
    assert verdict.passed and verdict.faults == ()


@pytest.mark.parametrize(
    "hit_rate, change, reached", [(0.59999, 0.0, [False, True]), (0.7, 0.010001, [True, False]), (1, -1, [True, True])]
)
def test_every_metric_must_reach_its_threshold(
    hit_rate: float, change: float, reached: list[bool], tmp_path: Path
) -> None:
    verdict = checked(written(tmp_path), both=hits(hit_rate) | {"ppl_change": change})
    assert [outcome.passed for outcome in verdict.outcomes] == reached
    assert verdict.passed is all(reached)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, None, True, "0.9", [0.9], {}, 10**400], ids=lambda value: str(value)[:9]
)
def test_what_is_no_finite_number_has_failed(value: Any, tmp_path: Path) -> None:
    hit, cost = checked(written(tmp_path), sim=hits(value), kl={"ppl_change": value}).outcomes
    for outcome in (hit, cost):
        assert (outcome.value, outcome.passed) == (None, False)
        assert outcome.why is not None and "no finite number" in outcome.why


@pytest.mark.parametrize(
    "result", [{}, {"results": []}, {"results": {"0": 1}}, [], 3, None, {"results": [1]}, {"results": "0"}], ids=str
)
def test_what_is_not_there_has_failed(result: Any, tmp_path: Path) -> None:
    verdict = checked(written(tmp_path), sim=result, kl={"ppl_change": 0})
    assert [outcome.passed for outcome in verdict.outcomes] == [False, True]
    assert verdict.outcomes[0].why == "there is no results.0.hit_rate in sim.json or kl.json"
    assert not verdict.passed


def test_without_results_nothing_has_passed(tmp_path: Path) -> None:
    verdict = checked(written(tmp_path))
    assert not any(outcome.passed for outcome in verdict.outcomes) and not verdict.passed


@pytest.mark.parametrize("step", ["-1", "01x", "1", "٠", "99999999999"])
def test_places_in_lists_are_counted_from_0(step: str, tmp_path: Path) -> None:
    path = written(tmp_path, GATE.replace("results.0", f"results.{step}"))
    assert not checked(path, sim=hits(0.9)).outcomes[0].passed


def test_a_metric_in_two_files_must_say_which(tmp_path: Path) -> None:
    both = {"a": hits(0.1) | {"ppl_change": 0}, "b": hits(0.9)}
    with pytest.raises(InputError, match=r"the metric hits is in a\.json and in b\.json"):
        checked(written(tmp_path), **both)
    named = written(tmp_path, GATE.replace('name = "hits"', 'name = "hits"\nresults = "b.json"'))
    assert checked(named, **both).passed
    absent = checked(named, a=both["a"])
    assert absent.outcomes[0].why == "there are no results named b.json"


def relative(folder: Path) -> Path:
    more = (
        '[[metric]]\nname = "misses"\nside = "benefit"\nresults = "new.json"\npath = "misses"\nbaseline = "misses"\n'
        'baseline_results = "old.json"\ndirection = "<="\nthreshold = -0.3\n'
    )
    return written(folder, HEAD + COST + more)


@pytest.mark.parametrize("old, new, value, passed", [(1000, 700, -0.3, True), (1000, 701, -0.299, False)])
def test_a_number_can_be_relative_to_another(old: int, new: int, value: float, passed: bool, tmp_path: Path) -> None:
    verdict = checked(relative(tmp_path), new={"misses": new, "ppl_change": 0.0}, old={"misses": old})
    assert verdict.outcomes[0].value == pytest.approx(value)
    assert verdict.passed is passed


@pytest.mark.parametrize(
    "old, why", [(0, "is 0"), (None, "no finite number"), (1e-300, "no finite number"), (math.nan, "no finite number")]
)
def test_nothing_is_relative_to_nothing(old: Any, why: str, tmp_path: Path) -> None:
    outcome = checked(relative(tmp_path), new={"misses": -1e300, "ppl_change": 0}, old={"misses": old}).outcomes[0]
    assert (outcome.value, outcome.passed) == (None, False)
    assert outcome.why is not None and why in outcome.why


# --- records


def test_a_gate_is_recorded_once(tmp_path: Path) -> None:
    path = with_dataset(tmp_path)
    gate = read_gate(path)
    assert registration(gate).state == "unrecorded"
    before = datetime.now(UTC).replace(microsecond=0)
    first = record(gate)
    assert first.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert first.recorded is not None and before <= datetime.fromisoformat(first.recorded) <= datetime.now(UTC)
    text = gate.record_path.read_text()
    assert record(read_gate(path)) == first == registration(read_gate(path))
    assert gate.record_path.read_text() == text
    assert gate.record_path.name == "gate.toml.recorded.json"


def test_a_gate_that_changed_can_not_be_recorded_and_not_pass(tmp_path: Path) -> None:
    record(read_gate(written(tmp_path)))
    path = written(tmp_path, GATE.replace("0.6", "0.5"))
    gate = read_gate(path)
    with pytest.raises(InputError, match="has changed since it was recorded on 20"):
        record(gate)
    verdict = checked(path, known=registration(gate), all=hits(0.9) | {"ppl_change": 0})
    assert all(outcome.passed for outcome in verdict.outcomes)
    assert not verdict.passed and "has changed since" in verdict.faults[0]
    written(tmp_path)
    assert registration(read_gate(path)).state == "recorded"


def test_a_gate_that_was_not_recorded_does_not_pass(tmp_path: Path) -> None:
    path = written(tmp_path)
    verdict = checked(path, known=registration(read_gate(path)), all=hits(0.9) | {"ppl_change": 0})
    assert not verdict.passed and "was not recorded before" in verdict.faults[0]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", '{"sha256": 3, "recorded": 4}', "[" * 100_000),
        '{"sha256": "ab", "recorded": "2026-01-01T00:00:00+00:00"}',
        '{"sha256": "' + "0" * 64 + '", "recorded": "2026-01-01"}',
    ],
)
def test_a_broken_record_is_refused(text: str, tmp_path: Path) -> None:
    gate = read_gate(written(tmp_path))
    gate.record_path.write_text(text)
    with pytest.raises(InputError, match="is not a gate's record: restore it"):
        registration(gate)


def test_datasets_must_be_there_and_the_same(tmp_path: Path) -> None:
    gate = read_gate(with_dataset(tmp_path))
    assert dataset_faults(gate) == []
    (tmp_path / "text.txt").write_bytes(b"other text")
    [fault] = dataset_faults(gate)
    assert "text.txt is another file" in fault
    with pytest.raises(InputError, match="is another file"):
        record(gate)
    (tmp_path / "text.txt").unlink()
    [fault] = dataset_faults(gate)
    assert "no such file" in fault
    assert not check(gate, RECORDED, {"a": hits(1) | {"ppl_change": 0}}, [fault]).passed


def test_results_of_another_text_or_seed_have_failed(tmp_path: Path) -> None:
    path = with_dataset(tmp_path)
    [dataset] = read_gate(path).datasets
    good = hits(0.9) | {"ppl_change": 0, "seed": 7, "texts": {"a": {"sha256": dataset.sha256}}}
    assert checked(path, all=good).passed
    [fault] = checked(path, all=good | {"seed": 8}).faults
    assert "seed 8, and the gate says 7" in fault
    for text in ({"sha256": "0" * 64}, {}, None):
        [fault] = checked(path, all=good | {"texts": {"a": text}}).faults
        assert "a text that is none of the gate's datasets: a" in fault
    verdict = checked(path, all=hits(0.9) | {"ppl_change": 0})
    assert verdict.passed and verdict.unstated == ("all.json",)


# --- bad input

BROKEN: dict[str, tuple[str, str]] = {
    "not TOML": ("name = ", "is not TOML"),
    "nested": ("a = " + "[" * 50_000, "is not TOML"),
    "empty": ("", 'no metric with side = "benefit"'),
    "no cost": (HEAD + BENEFIT, 'no metric with side = "cost": a gate needs a benefit and a cost'),
    "no benefit": (HEAD + COST, 'no metric with side = "benefit"'),
    "no seed": (GATE.replace("seed = 7\n", ""), "needs a seed"),
    "seed of words": (GATE.replace("seed = 7", 'seed = "7"'), "needs a seed"),
    "negative seed": (GATE.replace("seed = 7", "seed = -7"), "needs a seed"),
    "true seed": (GATE.replace("seed = 7", "seed = true"), "needs a seed"),
    "no name": (GATE.replace('name = "three"\n', ""), "the gate needs a name"),
    "long name": (GATE.replace("three", "x" * 200), "at most 128 characters"),
    "unknown key": ("extra = 1\n" + GATE, "unknown key 'extra'"),
    "unknown key of a metric": (GATE + "unit = 1\n", "metric 2 has an unknown key 'unit'"),
    "side": (GATE.replace('"cost"', '"price"'), "side 'price': choose from benefit, cost"),
    "direction": (GATE.replace('">="', '">"'), "direction '>': choose from >=, <="),
    "no path": (GATE.replace('path = "ppl_change"\n', ""), "metric 1 needs a path"),
    "no threshold": (GATE.replace("threshold = 0.6\n", ""), "metric 2 needs a threshold"),
    "nan": (GATE.replace("0.6", "nan"), "a threshold, a finite number"),
    "infinite": (GATE.replace("0.01", "inf"), "a threshold, a finite number"),
    "true": (GATE.replace("0.01", "true"), "a threshold, a finite number"),
    "one name twice": (GATE.replace("quality", "hits"), "names two metrics alike"),
    "one metric": (HEAD + "metric = 3\n", r"write \[\[metric\]\]"),
    "many metrics": (HEAD + COST * 65, "has 65 entries of metric"),
    "lone baseline_results": (GATE + 'baseline_results = "a"\n', "no baseline"),
    "dataset hash": (GATE + '[[dataset]]\nfile = "a"\nsha256 = "abc"\n', "64 hexadecimal digits"),
    "dataset file": (GATE + f'[[dataset]]\nsha256 = "{"0" * 64}"\n', "dataset 1 needs a file"),
    "too long": (GATE + "#" * (1 << 18), "is longer than 256 KiB"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_gates_are_refused(name: str, tmp_path: Path) -> None:
    text, said = BROKEN[name]
    with pytest.raises(InputError, match=said) as caught:
        read_gate(written(tmp_path, text))
    assert str(tmp_path / "gate.toml") in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "absent", "no such file"), (tmp_path, "not a regular file")):
        for read in (read_gate, read_results):
            with pytest.raises(InputError, match=said):
                read(path)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not TOML"):
        read_gate(tmp_path / "b.toml")


@pytest.mark.parametrize(
    "text, found", [('{"a": 1}', {"a": 1}), ('{\n "a": 1\n}\n', {"a": 1}), ('a table\n  of  3\n{"a": 2}\n', {"a": 2})]
)
def test_results_are_json_or_end_with_it(text: str, found: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    assert read_results(path) == found


@pytest.mark.parametrize("text", ["", "words", '{"a": 1', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is not JSON, nor is its last line"):
        read_results(path)


def test_a_verdict_survives_json(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"results": [{"hit_rate": NaN}], "ppl_change": Infinity}')
    verdict = checked(written(tmp_path), r=read_results(path))
    assert not verdict.passed
    json.dumps([outcome.value for outcome in verdict.outcomes], allow_nan=False)
