"""The reference experiment's machinery: bounds, runs that go on where they were cut short, the page of results."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sluice.lab.gates import read_gate, record

FOLDER = Path(__file__).parents[2] / "experiments"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="experiments come with the source tree")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def module(name: str) -> Any:
    return importlib.import_module(name)


# --- bounds


def test_bounds_are_students() -> None:
    bounds = module("bounds")
    found = bounds.bounded([0.8, 0.9, 1.0])
    half = 2.920 * 0.1 / math.sqrt(3)
    assert found["mean"] == pytest.approx(0.9)
    assert (found["lower"], found["upper"]) == pytest.approx((0.9 - half, 0.9 + half))
    changes = bounds.changes([70, 60], [100, 100])
    logs = [math.log(0.7), math.log(0.6)]
    half = 6.314 * (logs[0] - logs[1]) / 2  # s ÷ √2 of two values is half of their distance
    assert changes["upper"] == pytest.approx(math.exp(sum(logs) / 2 + half) - 1)
    assert changes["values"] == pytest.approx([-0.3, -0.4]) and changes["mean"] == pytest.approx(math.sqrt(0.42) - 1)
    assert bounds.changes([0], [1000])["mean"] == pytest.approx(-0.9995)
    scipy = pytest.importorskip("scipy.stats")
    assert pytest.approx([scipy.t.ppf(0.95, n) for n in range(1, 11)], abs=6e-4) == bounds.QUANTILES


def test_one_seed_and_none_have_no_bound() -> None:
    bounds = module("bounds")
    assert bounds.bounded([0.95]) == {"n": 1, "mean": 0.95, "lower": None, "upper": None, "values": [0.95]}
    assert bounds.changes([], [])["mean"] is None


# --- one run at a time


SCRIPT = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
n = int(path.read_text()) + 1 if path.exists() else 1
path.write_text(str(n))
print("progress", file=sys.stderr)
if n < int(sys.argv[2]):
    print("not yet", file=sys.stderr)
    sys.exit(3)
print("a line"); print(json.dumps({"n": n}))
"""


def runs_of(tmp_path: Path, until: int = 2) -> tuple[Any, Any]:
    """A work folder and a run of three steps, whose second fails until it is done for the `until`th time."""
    runner = module("runner")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    work = runner.Work(tmp_path / "work")
    work.folder.mkdir()

    def steps(work: Any) -> list[Any]:
        return [
            runner.Step("first", (str(script), "first", "1")),
            runner.Step("second", (str(script), "second", str(until))),
            runner.Step("sum", ("compute", "sum"), lambda done: {"sum": done["first"]["n"] + done["second"]["n"]}),
        ]

    return work, runner.Run("a", "a run", (), steps, 1)


def test_a_run_goes_on_with_the_step_that_failed(tmp_path: Path) -> None:
    runner = module("runner")
    work, run = runs_of(tmp_path)
    said: list[str] = []
    assert work.state(run) == "ready"
    with pytest.raises(runner.RunError, match="ended with 3: not yet"):
        runner.execute(work, run, log=said.append)
    assert work.state(run) == "begun" and work.result("a") is None
    result = runner.execute(work, run, log=said.append)
    assert [name.split(":")[0] for name in said] == ["a"] * 4  # the first step once, the second twice, the sum
    assert work.state(run) == "done" and (work.folder / "first").read_text() == "1"
    assert work.step("a", "sum") == {"sum": 3} and result["steps"]["second"]["result"] == {"n": 2}
    attempts = [json.loads(line) for line in (work.at("a") / "attempts.jsonl").read_text().splitlines()]
    assert [(one["step"], one["status"]) for one in attempts] == [("first", 0), ("second", 3), ("second", 0)]
    assert work.spent_s("a") == pytest.approx(sum(one["elapsed_s"] for one in attempts))
    assert runner.execute(work, run, log=said.append) == result and len(said) == 4


def test_results_outlive_the_folder_they_were_made_in(tmp_path: Path) -> None:
    runner = module("runner")
    work, run = runs_of(tmp_path, until=1)
    result = runner.execute(work, run, log=lambda text: None)
    metrics = work.at("a") / "train" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 1, "tokens": 8, "cross_entropy": 2.5}\n{"step": 1, "valid": {}}\n')
    spent = work.spent_s("a")
    kept = tmp_path / "kept"
    runner.keep(runner.Work(work.folder, kept), ["a", "not begun"])
    assert [file.name for file in kept.iterdir()] == ["a.json"]

    new = runner.Work(tmp_path / "new", kept)
    assert new.result("a") == {**result, "training": [[8, 2.5]]} and new.training("a") == [[8, 2.5]]
    assert new.step("a", "sum") == {"sum": 2} and new.spent_s("a") == spent and new.last_words("a") is None
    assert (new.result("b"), new.training("b"), new.spent_s("b")) == (None, [], 0.0)
    # what is to be run needs files, which are not kept
    assert runner.Work(tmp_path / "new").state(run) == "ready"


def test_other_commands_under_a_runs_name_are_refused(tmp_path: Path) -> None:
    runner = module("runner")
    work, run = runs_of(tmp_path, until=9)
    with pytest.raises(runner.RunError):
        runner.execute(work, run, log=lambda text: None)
    other = runner.Run("a", "", (), lambda work: [runner.Step("first", (str(tmp_path / "script.py"), "x", "1"))], 1)
    with pytest.raises(runner.RunError, match="is of another command"):
        runner.execute(work, other, log=lambda text: None)
    waiting = runner.Run("b", "", ("a",), lambda work: [], 1)
    assert work.state(waiting) == "needs a"
    with pytest.raises(runner.RunError, match="b needs a: run that first"):
        runner.execute(work, waiting, log=lambda text: None)


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_an_interrupt_reaches_the_command_once_which_ends_by_itself(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        "import json, signal, time\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "open('ready', 'w').close()\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.3)\nprint(json.dumps({'seen': len(seen)}))\n"
    )
    (tmp_path / "parent.py").write_text(
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
        "from pathlib import Path; from runner import Run, Step, Work, execute\n"
        f"words = ({str(tmp_path / 'child.py')!r},)\n"
        "run = Run('a', '', (), lambda work: [Step('one', words)], 1)\n"
        f"print(execute(Work(Path({str(tmp_path)!r})), run, log=lambda text: None)['steps']['one']['result'])\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (tmp_path / "ready").exists():
        assert parent.poll() is None
        time.sleep(0.01)
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does it
    out, _ = parent.communicate(timeout=60)
    assert out.strip() == "{'seen': 1}"


# --- what is run


def test_every_run_can_be_done_in_the_order_of_the_table() -> None:
    runs = module("runs").table(module("recipes").REFERENCE)
    before: set[str] = set()
    for name, run in runs.items():
        assert name == run.name and set(run.needs) <= before, name
        assert run.minutes <= 40
        before.add(name)
    assert {"base-s1", "base-s2", "base-s3", "weak-s1", "strong-s1", "divided-s1", "control", "stages-s3"} <= before


def test_runs_of_a_seed_differ_in_what_they_are_about_alone() -> None:
    recipes = module("recipes")
    base = recipes.recipe(recipes.REFERENCE, 1)
    for _, changes in recipes.LOCALITY.values():
        other = recipes.recipe(recipes.REFERENCE, 1, changes)
        assert {name for name in other if other[name] != base.get(name)} == set(changes)
    assert recipes.recipe(recipes.REFERENCE, 2)["train"]["seed"] == 2


def test_what_begins_late_branches_off_the_base(tmp_path: Path) -> None:
    parts, recipes, runs = module("parts"), module("recipes"), module("runs")
    work = module("runner").Work(tmp_path)
    table = runs.table(recipes.REFERENCE)
    leave(work, "choose-domain", choose={"chosen": "shared", "tries": {}})
    for name, (_, changes) in recipes.LOCALITY.items():
        (words,) = (step.words for step in table[f"{name}-s1"].steps(work) if step.name == "train")
        whole = ("weak", "medium", "strong", "set", "bias", "distill", "gentle")  # at work from the first step
        branches = name not in whole
        assert recipes.late(changes) == branches == ("--branch" in words), name
        if branches:
            assert words[words.index("--branch") + 1] == "runs/base-s1/train/checkpoints/step-000400"
            assert "base-s1" in table[f"{name}-s1"].needs
    for size in recipes.SIZES.values():
        for name in (*(f"{one}-s1" for one in recipes.DOMAINS), "domain-s2", "domain-s3"):
            run, seed = runs.table(size)[name], name[-1]
            (words,) = (step.words for step in run.steps(work) if step.name == "train")
            half = f"runs/base-s{seed}/train/checkpoints/step-{size.base['train']['steps'] // 2:06d}"
            assert words[2] == "locality" and words[words.index("--branch") + 1] == half
            assert f"base-s{seed}" in run.needs and run.minutes == 10 < table["base-s1"].minutes
    assert "--branch" not in parts.pretrained_steps(recipes.REFERENCE, "base-s1", 1, {}, work)[0].words
    steps, every = (recipes.REFERENCE.base["train"][name] for name in ("steps", "save_every"))
    kept = recipes.REFERENCE.base["train"]["keep"]
    assert steps // 2 in range(steps, steps - kept * every, -every)


@pytest.mark.parametrize(
    ("domain", "late"),
    [
        ({"begin": 0.5, "full": 0.6}, True),
        ({"begin": 0.45, "full": 0.6}, False),
        ({"begin": 0.5, "full": 0.6, "prior": 2.0}, False),
        ({"begin": 0.55, "full": 0.6, "experts": "used"}, True),
        ({"begin": 0.5, "full": 0.6, "experts": "used"}, False),  # counts before half of the run
        ({"begin": 0.5, "full": 0.6, "experts": "hottest"}, False),
        ({}, False),
    ],
)
def test_domains_begin_late_or_early(domain: dict[str, Any], late: bool) -> None:
    assert module("recipes").late({"domain": {"weight": 0.3, **domain}}) == late


def test_recipes_are_read_as_they_were_written(tmp_path: Path) -> None:
    from sluice.train.recipe import read_recipe

    recipes = module("recipes")
    for size in recipes.SIZES.values():
        for changes in ({}, *(one for _, one in (recipes.LOCALITY | recipes.DOMAINS).values())):
            wanted = recipes.recipe(size, 3, changes)
            path = tmp_path / "recipe.toml"
            path.write_text(recipes.toml(wanted))
            found = read_recipe(path).as_dict()
            for section, values in wanted.items():
                assert found[section].items() >= values.items()


def test_the_try_with_the_fewest_misses_within_the_cost_is_chosen() -> None:
    best = module("choosing").best
    tries = {
        "a": {"misses_change": -0.5, "ppl_change": 0.02},
        "b": {"misses_change": -0.3, "ppl_change": 0.009},
        "c": {"misses_change": -0.2, "ppl_change": -0.01},
    }
    assert best(tries, 0.01) == "b" and best(tries, 0.05) == "a"
    assert best({name: tries[name] for name in "a"}, 0.01) == "a"
    assert best({"a": tries["a"], "d": {"misses_change": -0.1, "ppl_change": 0.015}}, 0.01) == "d"


def test_tries_that_were_trained_rerouted_are_chosen_apart(tmp_path: Path) -> None:
    choosing, parts, recipes = module("choosing"), module("parts"), module("recipes")
    work = module("runner").Work(tmp_path)
    leave(work, "base-s1", evaluate=evaluated(1000, 20))
    leave(work, "wing-s1", evaluate=evaluated(100, 20.01))
    with pytest.raises(module("runner").RunError, match="choose needs a try of locality that is done"):
        choosing.choose_steps(work)
    leave(work, "quill-s1", evaluate=evaluated(700, 20.01))
    leave(work, "pinion-s1", evaluate=evaluated(400, 20.3))
    (step,) = choosing.choose_steps(work)
    found = step.compute({})
    assert (found["chosen"], found["stronger"], found["rerouted"]) == ("quill", "pinion", "wing")
    leave(work, "choose", choose=found)
    leave(work, "data", texts={"texts": [{"domain": "code", "file": "texts/000-code.txt"}]})
    steps = parts.stack_steps(recipes.REFERENCE, 1, work)
    assert {step.words[3] for step in steps[:-1]} == {f"runs/{one}-s1/f32.gguf" for one in ("base", "pinion", "wing")}
    leave(work, "stack-s1", claim={"model": "rerouted", "rule": "0.03:0"})
    assert parts.stacked(work, 1) == "wing-s1" and parts.stacked(work, 2) == "stronger-s2"
    (train, *_) = parts.stronger_steps(recipes.REFERENCE, 2, work)
    asked = (tmp_path / train.words[train.words.index("--recipe") + 1]).read_text()
    assert "reroute = 0.03" in asked and "seed = 2" in asked


def test_what_ran_on_another_machine_is_neither_chosen_nor_compared(tmp_path: Path) -> None:
    choosing, runner = module("choosing"), module("runner")
    work = runner.Work(tmp_path / "work")
    leave(work, "base-s1", evaluate=evaluated(1000, 20))
    for name in ("divided", "shared"):
        leave(work, f"{name}-s1", evaluate=evaluated(900, 20.1, hits=0.95))
    path = work.at("shared-s1") / "result.json"
    result = json.loads(path.read_text())
    runner.write_json(path, {**result, "machine": {**result["machine"], "model": "another"}})
    (step,) = choosing.choose_domain_steps(work)
    assert step.compute({})["chosen"] == "divided" and list(step.compute({})["tries"]) == ["divided"]
    text = page(tmp_path, work)
    assert "Run on another machine than the base, so not compared: shared." in text and "| shared:" not in text


def test_the_cheapest_try_with_enough_hits_is_chosen() -> None:
    cheapest = module("choosing").cheapest
    tries = {
        "a": {"hit_rate": 0.95, "ppl_change": 0.04},
        "b": {"hit_rate": 0.91, "ppl_change": 0.02},
        "c": {"hit_rate": 0.85, "ppl_change": 0.001},
    }
    assert cheapest(tries, 0.91) == "b" and cheapest(tries, 0.93) == "a" and cheapest(tries, 0.99) == "a"


def test_domains_weigh_alike_in_what_the_engine_said() -> None:
    parts = module("parts")
    assert parts.balanced_ppl({"a": [(4, 10), (1, 10)], "b": [(8, 1)]}) == pytest.approx(4)
    ledger = {"decode": {"demands": 9, "misses": 4, "hits": 5}}
    said = {"per_domain": {"000-a": {"ppl": 4, "tokens": 3}, "001-b": {"ppl": 9, "tokens": 30}}, "ledger": ledger}
    assert parts.live_of(said) == {"ppl": pytest.approx(6), "demands": 9, "misses": 4}
    kl = {"ppl": 4, "ppl_reference": 2, "kl": {"mean": 0.25}, "tokens": 5}
    assert parts.stage_of({"per_domain": {"000-a": kl}}) == pytest.approx({"ppl": 4, "reference_ppl": 2, "kl": 0.25})


# --- the page


def evaluated(misses: int, ppl: float, hits: float = 0.4) -> dict[str, Any]:
    """As `sluice train evaluate --json` says it."""
    loss = math.log(ppl)
    return {
        "parameters": 5_000_000, "experts": {"layers": 8, "each": 32, "top_k": 2}, "texts": 8,
        "balanced": {"loss": loss, "ppl": ppl, "kl": None},
        "per_domain": {"code": {"ppl": ppl - 1}, "prose": {"ppl": ppl + 1}},
        "load": {"load_entropy": 0.97, "dead_share": 0.0},
        "cache": {
            "tokens": 1000, "demands_per_token": 16.0,
            "results": [{"misses": misses, "capacity_slots": 34, "reads_per_token": misses / 1000}],
            "curve": [{"slots": 34, "share": 0.134, "misses_per_token": misses / 1000}],
        },
        "domains": {"mean_pinned_hit_rate": hits, "switching": []},
        "repetition": {"rate": 0.1, "distinct": 0.8},
    }  # fmt: skip


def leave(work: Any, name: str, **steps: Any) -> None:
    """As if a run had been done."""
    runner = module("runner")
    work.at(name).mkdir(parents=True)
    (work.at(name) / "attempts.jsonl").write_text(json.dumps({"step": "x", "elapsed_s": 60.0}) + "\n")
    done = {step: {"result": result} for step, result in steps.items()}
    runner.write_json(work.at(name) / "result.json", {"machine": runner.machine(), "steps": done})


def page(tmp_path: Path, work: Any) -> str:
    gates = tmp_path / "gates.toml"
    if not gates.exists():
        gates.write_bytes((FOLDER / "gates.toml").read_bytes())
        record(read_gate(gates))
    runs = module("runs").table(module("recipes").REFERENCE)
    module("results").write_results(work, runs, gates, tmp_path / "docs")
    return (tmp_path / "docs" / "results.md").read_text(encoding="utf-8")


def test_what_was_not_run_is_said_to_be_not_run(tmp_path: Path) -> None:
    text = page(tmp_path, module("runner").Work(tmp_path / "work"))
    assert "**domain FAILED, locality FAILED, stack FAILED, stages FAILED.**" in text
    assert text.count("not run | ") == 7 and "Not run: data, base-s1" in text.replace("\n", " ")
    assert "<!--" not in text and "![" not in text and "passed" not in text.lower().replace("has passed", "")


def test_a_gate_passes_by_its_bound_over_seeds(tmp_path: Path) -> None:
    work = module("runner").Work(tmp_path / "work")
    for seed in (1, 2, 3):
        leave(work, f"base-s{seed}", evaluate=evaluated(1000 + seed, 20 + seed / 10))
    for name, misses, ppl in (("weak", 900, 20.1), ("margin", 600, 20.2), ("strong", 400, 22.0)):
        leave(work, f"{name}-s1", evaluate=evaluated(misses, ppl))
    tries = {"margin": {"misses_change": -0.4, "ppl_change": 0.005}}
    leave(work, "choose", choose={"chosen": "margin", "tries": tries})
    first = page(tmp_path, work)
    assert "locality FAILED" in first and "(one seed, so no bound)" in first
    leave(work, "local-s2", evaluate=evaluated(610, 20.3))
    leave(work, "local-s3", evaluate=evaluated(605, 20.4))
    leave(work, "divided-s1", evaluate=evaluated(990, 20.2, hits=0.99))
    leave(work, "choose-domain", choose={"chosen": "divided", "tries": {}})
    text = page(tmp_path, work)
    assert "locality PASSED" in text and "domain FAILED" in text  # of one seed, however good
    assert "Claimed: **margin**: misses -39." in text and "3 seeds)" in text
    assert "| strong: chance that neighbours draw the same expert, λ 1.6 | 22.000 | +9.45% |" in text
    assert "Not run: medium, set" in text
    for name in ("tradeoff", "curves"):
        assert f"](figures/experiment-{name}.png)" in text
        assert (tmp_path / "docs" / "figures" / f"experiment-{name}.png").read_bytes()[:4] == b"\x89PNG"
    numbers = json.loads((work.folder / "gates.json").read_text())
    assert numbers["locality"]["misses_change"]["n"] == 3 and numbers["domain"]["hit_rate"]["lower"] is None
    assert "0.18 hours" in text


def test_gates_that_changed_after_they_were_recorded_fail_whatever_was_measured(tmp_path: Path) -> None:
    work = module("runner").Work(tmp_path / "work")
    for seed in (1, 2, 3):
        leave(work, f"base-s{seed}", evaluate=evaluated(1000, 20))
        name = "shared-s1" if seed == 1 else f"domain-s{seed}"
        leave(work, name, evaluate=evaluated(990, 20.1, hits=0.98 + seed / 1000))
    leave(work, "choose-domain", choose={"chosen": "shared", "tries": {}})
    text = page(tmp_path, work)
    assert "domain PASSED" in text and "Claimed: **shared**: hits 98.2% (98.0% to 98.4%, 3 seeds)" in text
    assert "| shared, seed 3 |" in text and "Not run: divided" in text
    gates = tmp_path / "gates.toml"
    gates.write_text(gates.read_text().replace("0.90", "0.80"))
    text = page(tmp_path, work)
    assert "domain FAILED" in text and "has changed since it was recorded" in text


def test_the_reference_gates_are_the_papers() -> None:
    gate = read_gate(FOLDER / "gates.toml")
    bounds = {metric.path: (metric.direction, metric.threshold) for metric in gate.metrics}
    assert bounds == {
        "locality.misses_change.upper": ("<=", -0.30), "locality.ppl_change.upper": ("<=", 0.01),
        "domain.hit_rate.lower": (">=", 0.90), "domain.ppl_change.upper": ("<=", 0.02),
        "stack.misses_change.upper": ("<=", -0.80), "stack.ppl_change.upper": ("<=", 0.034),
        "stages.recovered.lower": (">=", 0.80),
    }  # fmt: skip


# --- the command


def command(*words: object) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(FOLDER / "run.py"), *map(str, words)]
    return subprocess.run(script, capture_output=True, text=True, timeout=600, check=False)


def test_nothing_is_run_before_the_gates_are_recorded(tmp_path: Path) -> None:
    gates = tmp_path / "gates.toml"
    gates.write_bytes((FOLDER / "gates.toml").read_bytes())
    common = ("--work", tmp_path / "work", "--gates", gates, "--size", "toy")
    listed = command("list", *common)
    assert listed.returncode == 0 and "base-s1        needs data" in listed.stdout
    refused = command("next", *common)
    assert refused.returncode == 2 and "record them first" in refused.stderr
    record(read_gate(gates))
    unknown = command("other", *common)
    assert unknown.returncode == 2 and "choose from data, base-s1" in unknown.stderr
    early = command("base-s1", *common)
    assert early.returncode == 1 and early.stderr.splitlines()[-1] == "run.py: base-s1 needs data: run that first"
    other = command("next", "--work", tmp_path / "work", "--gates", gates)
    assert other.returncode == 1 and "is of other runs" in other.stderr
