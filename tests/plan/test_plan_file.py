"""Plan files: what is written is read, and what is damaged, huge or another model's is refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice import plan_file
from sluice.errors import InputError
from sluice.new_file import check_out
from sluice.plan_file import Placement, read_plan, write_plan
from sluice.types import ExpertKey

PLAN = Placement(
    fingerprint="f" * 64, architecture="qwen3moe", name="a model", n_layers=4, moe_layers=(1, 2, 3), n_expert=8,
    slots=10, policy="lru", pins=(ExpertKey(2, 7), ExpertKey(1, 0)), load=(ExpertKey(3, 1), ExpertKey(1, 4)),
    expected={"hit_rate": 0.75, "none_pinned_hit_rate": 0.5}, source="a test",
)  # fmt: skip
MODEL: dict[str, Any] = {
    name: getattr(PLAN, name) for name in ("fingerprint", "architecture", "name", "n_layers", "moe_layers", "n_expert")
}


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, pins=(), load=(), expected=None, name="", fingerprint="")])
def test_what_is_written_is_read(tmp_path: Path, plan: Placement) -> None:
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("precious")
    with pytest.raises(InputError, match="--force"):
        write_plan(path, PLAN)
    assert path.read_text() == "precious"
    write_plan(path, PLAN, force=True)
    assert read_plan(path) == PLAN


@pytest.mark.parametrize(
    "name, said", [("absent/plan.json", "make it first"), (".", "names no file"), ("folder", "names no file")]
)
def test_places_that_can_not_be_written(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=said):
        check_out(tmp_path / name, force=True)


def test_what_a_plan_is_made_from_is_kept_whatever_is_asked(tmp_path: Path) -> None:
    model, link = tmp_path / "model.gguf", tmp_path / "link.gguf"
    model.write_bytes(b"GGUF")
    link.hardlink_to(model)
    for path in (model, link):
        with pytest.raises(InputError, match="is what the plan is made from"):
            write_plan(path, PLAN, force=True, keep=[tmp_path / "absent", model])
    assert model.read_bytes() == b"GGUF"


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: object, **options: object) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_plan(tmp_path / "plan.json", PLAN)
    assert list(tmp_path.iterdir()) == []


def changed(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda plan: plan | fields


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda plan: {key: value for key, value in plan.items() if key != name}


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a list": (lambda plan: [plan], "no object"),
    "a number": (lambda plan: 3, "no object"),
    "a later format": (changed(format=2), "format '2', this version reads 1"),
    "no format": (without("format"), "format 'None'"),
    "an unknown field": (changed(extra=1), "'extra' is unknown"),
    "no pins": (without("pins"), "pins is no list"),
    "pins as text": (changed(pins="12"), "pins is no list"),
    "a pin of three": (changed(pins=[[1, 2, 3]]), r"not \[layer, expert\]"),
    "a pin of text": (changed(pins=[["1", 2]]), "not a whole number"),
    "a pin of truth": (changed(pins=[[1, True]]), "not a whole number"),
    "a pin of fractions": (changed(pins=[[1.0, 2]]), "not a whole number"),
    "a pin beyond the experts": (changed(pins=[[1, 8]]), "not a whole number of 0 to 7"),
    "a negative pin": (changed(pins=[[1, -1]]), "not a whole number of 0 to 7"),
    "a pin of a dense layer": (changed(pins=[[0, 1]]), "layer 0, which has no experts"),
    "a pin twice": (changed(pins=[[1, 1], [1, 1]]), "twice"),
    "a pin among the others": (changed(load=[[2, 7]]), "the same"),
    "more pins than slots": (changed(slots=1), "pins is no list of at most 1"),
    "no slots": (changed(slots=0), "slots has 0"),
    "more slots than experts": (changed(slots=25), "slots has 25, not a whole number of 1 to 24"),
    "huge layers": (changed(n_layers=1 << 40), "n_layers"),
    "huge experts": (changed(n_expert=1 << 40), "n_expert"),
    "layers that descend": (changed(moe_layers=[2, 1]), "isn't ascending"),
    "layers beyond the model": (changed(moe_layers=[1, 4]), "moe_layers has 4"),
    "no layers": (changed(moe_layers=[]), "isn't ascending"),
    "a number for a text": (changed(policy=3), "policy is no text"),
    "a long text": (changed(source="x" * 5000), "source is no text"),
    "a rate beyond 1": (changed(expected={"hit_rate": 1.5}), "'hit_rate' is no share"),
    "a rate of text": (changed(expected={"hit_rate": "1"}), "'hit_rate' is no share"),
    "a huge rate": (changed(expected={"hit_rate": 10**400}), "'hit_rate' is no share"),
    "many rates": (changed(expected={str(i): 0.5 for i in range(17)}), "no object of figures"),
    "a list of rates": (changed(expected=[1]), "no object of figures"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_plans(tmp_path: Path, name: str) -> None:
    damage, said = DAMAGES[name]
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(InputError, match=f"the plan is damaged .*{said}.*make it again") as raised:
        read_plan(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


RAW: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "blank": (b" \n", "empty"),
    "cut short": (b'{"format": 1, "pins": [[1,', "no JSON, or cut short"),
    "no text": (b"\xff\xfe\x00{}", "no JSON"),
    "another file": (b"PAR1" + bytes(100), "no JSON"),
    "deep": (b"[" * 200_000, "no JSON"),
    "not a number": (b'{"format": NaN}', "no JSON"),
    "a number of many digits": (b'{"format": ' + b"9" * 5000 + b"}", "no JSON"),
}


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_plan(tmp_path: Path, name: str) -> None:
    raw, said = RAW[name]
    path = tmp_path / "plan.json"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=said):
        read_plan(path)


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_file, "MAX_BYTES", 100)
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    with pytest.raises(InputError, match="no plan: longer than"):
        read_plan(path)


def test_no_file_and_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_plan(tmp_path / "absent.json")
    with pytest.raises(InputError, match="can't be read"):
        read_plan(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        read_plan(tmp_path / "pipe")


@pytest.mark.parametrize(
    "other, said",
    [
        ({"architecture": "olmoe"}, "architecture 'qwen3moe', this model has 'olmoe'"),
        ({"n_layers": 5}, "layers 4, this model has 5"),
        ({"moe_layers": (1, 2)}, "layers with experts 3, this model has 2"),
        ({"moe_layers": (0, 2, 3)}, "first and last"),
        ({"n_expert": 16}, "experts a layer 8, this model has 16"),
        ({"fingerprint": "0" * 64}, "fingerprint ffffffffffff"),
    ],
)
def test_another_models_plan_is_refused_with_the_difference(other: dict[str, Any], said: str) -> None:
    PLAN.check_model("plan.json", **MODEL)
    with pytest.raises(InputError, match=f"plan.json: made for another model .*{said}.*plan again for this model"):
        PLAN.check_model("plan.json", **(MODEL | other))


def test_an_unknown_fingerprint_leaves_the_shape_to_tell() -> None:
    replace(PLAN, fingerprint="").check_model("plan.json", **MODEL)
    unknown: dict[str, Any] = MODEL | {"fingerprint": ""}
    PLAN.check_model("plan.json", **unknown)


@pytest.mark.parametrize("slots, kept", [(10, 2), (5, 2), (4, 2), (3, 1)])
def test_the_most_recent_of_what_is_loaded_is_what_fits(slots: int, kept: int) -> None:
    fitted = PLAN.fitted(slots, 1, "plan.json")
    assert fitted.pins == PLAN.pins
    assert fitted.load == PLAN.load[-kept:]


def test_pins_that_leave_no_room_are_refused() -> None:
    assert PLAN.fitted(4, 2, "plan.json").pins == PLAN.pins
    with pytest.raises(InputError, match="pins 2 experts, made for 10 slots; this budget's 3 slots have room for 1: "):
        PLAN.fitted(3, 2, "plan.json")
