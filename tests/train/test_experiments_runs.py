"""The reference experiment at toy size, from text to the page of results, its commands in this process."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from train.toys import write_documents

from sluice.cli import main
from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.lab.gates import read_gate, record

torch.set_num_threads(1)
FOLDER = Path(__file__).parents[2] / "experiments"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="experiments come with the source tree")
RUNS = (
    "data", "base-s1", "weak-s1", "choose", "divided-s1", "choose-domain", "stack-s1", "control", "live", "text-s1",
    "prerouter-s1", "recover-s1", "onpolicy-s1", "stages-s1", "survival", "speed", "base-s2", "local-s2", "stronger-s2",
    "stack-s2",
)  # fmt: skip


def module(name: str) -> Any:
    return importlib.import_module(name)


def in_this_process(work: Any, folder: Path, step: Any, log: Any) -> Any:
    """As the runner does it, without a start of Python and PyTorch for each command."""
    assert step.words[0] == "sluice"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(step.words[1:]) == 0, step.words
    with (folder / "attempts.jsonl").open("a") as attempts:
        attempts.write(json.dumps({"step": step.name, "elapsed_s": 1.0}) + "\n")
    return json.loads(out.getvalue().splitlines()[-1])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A work folder in which RUNS have been done, one after the other."""
    folder = tmp_path_factory.mktemp("experiment")
    texts = [f"{name}={path}" for name, path in write_documents(folder).items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        runner = module("runner")
        patch.setattr(runner, "_command", in_this_process)
        found = runner.Work(folder / "work")
        found.folder.mkdir()
        patch.chdir(found.folder)
        gates = folder / "gates.toml"
        gates.write_bytes((FOLDER / "gates.toml").read_bytes())
        record(read_gate(gates))
        words = [*RUNS, "--work", str(found.folder), "--gates", str(gates), "--size", "toy"]
        for text in texts:
            words += ["--text", text]
        assert module("run").main(words) == 0
        yield found


def test_every_kind_of_run_was_done_and_left_what_others_read(work: Any) -> None:
    assert [name for name in RUNS if work.result(name) is None] == []
    assert work.step("choose", "choose")["chosen"] == "weak"
    live = work.step("live", "compare")
    for one in live.values():  # the engine counts what the simulator says, and PyTorch's routes are nearly its own
        assert one["engine_misses"] == one["simulated_misses"]
        assert one["torch_misses"] == pytest.approx(one["engine_misses"], rel=0.05)
    claim = work.step("stack-s1", "claim")
    assert (claim["tries"][0]["model"], claim["tries"][0]["misses_change"]) == ("base", 0)
    assert claim["model"] == "local" and claim["rule"] in module("recipes").TOY.margins
    assert work.step("stack-s2", "claim")["rule"] == claim["rule"]


def test_the_engine_agrees_with_pytorch_on_what_the_stages_left(work: Any) -> None:
    found = work.step("stages-s1", "recovered")
    assert found["engine"]["ppl"] == pytest.approx(found["states"]["stage3"]["ppl"], rel=5e-3)
    # eval kl's reference keeps its KV cache in float16, rerouting was run with float32
    assert found["engine"]["reference_ppl"] == pytest.approx(found["teacher_ppl"], rel=5e-3)
    assert work.step("stack-s1", "claim")["base"]["ppl"] == pytest.approx(found["teacher_ppl"], rel=1e-5)
    for state in ("quantised", "untrained", "stage1", "stage2", "stage3"):
        assert found["states"][state]["kl"] > 0
    assert found["states"]["untrained"]["won_back"] in (0, None)


def test_the_bundled_model_is_what_the_runs_left(work: Any, tmp_path: Path) -> None:
    out = tmp_path / "nano"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert module("nano").main(["--work", str(work.folder), "--out", str(out)]) == 0
    card = json.loads(printed.getvalue())
    assert card == json.loads((out / "nano.json").read_text())
    assert {name: sha256((out / name).read_bytes()).hexdigest() for name in card["files"]} == {
        name: file["sha256"] for name, file in card["files"].items()
    }
    config = EngineConfig(
        expert_slots=8, ctx=32, routing="prerouted", prerouter=out / "nano-heads.safetensors",
        lora=((out / "nano-adapter.gguf", 1.0),),
    )  # fmt: skip
    with Engine(out / "nano.gguf", config) as engine:
        assert engine.mode["routing"] == "prerouted"
    assert set(card["held_out"]["states"]) == {"quantised", "untrained", "stage1", "stage2", "stage3"}


def test_results_of_another_machine_are_kept_and_not_compared(work: Any, tmp_path: Path) -> None:
    runner, measures, sections = module("runner"), module("measures"), module("sections")
    kept = runner.Work(work.folder, tmp_path / "kept")
    runner.keep(kept, [*RUNS, "base-s3"])
    assert {file.stem for file in kept.kept.iterdir()} == set(RUNS)
    assert work.training("base-s1") and kept.training("choose") == []
    alone = runner.Work(tmp_path / "none", kept.kept)
    assert measures.gathered(alone) == measures.gathered(work)
    assert sections.locality(alone, measures.gathered(alone)) == sections.locality(work, measures.gathered(work))

    path = kept.kept / "weak-s1.json"
    moved = json.loads(path.read_text())
    moved["machine"]["model"] = "another"
    path.write_text(json.dumps(moved))
    numbers = measures.gathered(alone)
    assert (
        numbers["locality"]["misses_change"]["n"] == 1 and measures.gathered(work)["locality"]["ppl_change"]["n"] == 2
    )
    page = sections.locality(alone, numbers)
    assert "not compared: weak." in page and "| weak:" not in page


def test_the_page_has_a_table_of_each_question(work: Any, tmp_path: Path) -> None:
    recipes, runs = module("recipes"), module("runs")
    gates = tmp_path / "gates.toml"
    gates.write_bytes((FOLDER / "gates.toml").read_bytes())
    record(read_gate(gates))
    module("results").write_results(work, runs.table(recipes.TOY), gates, tmp_path)
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    parts = text.split("\n## ")[1:]
    for part in parts:
        assert part.splitlines()[2:], part
        assert "Not run.\n" not in part + "\n", part
    assert text.count("](figures/experiment-") == 6 == len(list((tmp_path / "figures").glob("*.png")))
    assert "PASSED" in text or "FAILED" in text
    numbers = json.loads((work.folder / "gates.json").read_text())
    assert numbers["locality"]["misses_change"]["n"] == 2 and numbers["locality"]["misses_change"]["upper"] is not None
    assert numbers["stages"]["recovered"]["n"] in (0, 1)
