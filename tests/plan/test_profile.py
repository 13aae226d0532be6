"""Machine profiles: there and back through a file, and files that are none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from profiles import profile

from sluice.errors import InputError
from sluice.plan.profile import load, save


@pytest.mark.parametrize("changes", [{}, {"prefetch": None, "recall": None}])
def test_there_and_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "p.json"
    save(profile(**changes), path)
    assert load(path) == profile(**changes)
    assert [each.name for each in tmp_path.iterdir()] == ["p.json"]


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(profile(), path)
    with pytest.raises(InputError, match=r"exists: .*--force"):
        save(profile(threads=3), path)
    assert load(path).threads == 2
    save(profile(threads=3), path, force=True)
    assert load(path).threads == 3


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be written"):
        save(profile(), tmp_path / "none" / "p.json")
    with pytest.raises(InputError, match="can't be read"):
        load(tmp_path / "none.json")
    with pytest.raises(InputError, match="not a regular file"):
        load(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        load(tmp_path / "pipe")


def _set(*path: str | int, to: Any) -> Callable[[dict[str, Any]], Any]:
    def change(value: Any) -> None:
        for name in path[:-1]:
            value = value[name]
        value[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda v: v.pop("load_b_s"), "load_b_s is missing"),
        (lambda v: v.pop("fresh_host_s"), "fresh_host_s is missing"),
        (_set("fresh_load_s", to=-1e-3), "fresh_load_s is '-0.001'"),
        (_set("more", to=1), "'more' is unknown"),
        (_set("format", to=1), "format 1"),
        (_set("threads", to="2"), "threads is '2'"),
        (_set("threads", to=True), "threads is 'True'"),
        (_set("top_k", to=1.5), "top_k is '1.5'"),
        (_set("expert_bytes", to=-1), "expert_bytes is '-1'"),
        (_set("load_b_s", to=0), "load_b_s is 0"),
        (_set("read_beside", to=1.5), "read_beside is more than 1"),
        (_set("top_k", to=17), "top_k is more than n_expert"),
        (_set("moe_layers", to=1 << 40), "more than any model has"),
        (_set("machine", to=None), "machine is 'None'"),
        (_set("demand", to=None), "demand is no object"),
        (_set("demand", "host_s", to="x"), "host_s is 'x'"),
        (_set("prompts", to=[]), "prompts is no list"),
        (_set("prompts", 0, "tokens", to=0), "without tokens"),
        (_set("recall", to=1.01), "recall is more than 1"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], Any], complaint: str) -> None:
    value = json.loads(json.dumps(asdict(profile())))
    change(value)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match=complaint) as caught:
        load(path)
    assert str(path) in str(caught.value) and "--force" in str(caught.value)


NO_PROFILES = ["", "{", "[]", "null", "\x00\xff", "NaN", "[" * 100_000, '{"format": 2}', " " * (2 << 20)]


@pytest.mark.parametrize("text", NO_PROFILES, ids=range(len(NO_PROFILES)))
def test_what_is_no_profile_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="no whole machine profile"):
        load(path)


def test_infinite_figures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(asdict(profile(load_b_s=float("inf")))))
    with pytest.raises(InputError, match="load_b_s is 'inf'"):
        load(path)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("fingerprint", "0" * 64, "another model"),
        ("machine", "another", "another machine"),
        ("threads", 4, "another thread count"),
        ("ggml", "9.9", "another ggml"),
    ],
)
def test_another_model_or_machine_is_refused(name: str, value: Any, complaint: str) -> None:
    own = profile()
    same = {each: getattr(own, each) for each in ("fingerprint", "machine", "threads", "ggml")}
    own.check(Path("p.json"), **same)
    with pytest.raises(InputError, match=complaint):
        own.check(Path("p.json"), **{**same, name: value})
