"""Runs one task with one of lm-eval's models, and keeps what each item came to. Knows no engine, no comparison."""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sluice.errors import InputError, words_of
from sluice.eval.paired import mean_interval
from sluice.eval.tasks import Task

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM


@dataclass(frozen=True)
class Item:
    """One item's outcome. `scores` by metric; `answer`: the choice's number, the text, or whether it was the likeliest.

    `context` and `reference` are texts: what was asked, and the right answer (of written ones what was written), for
    predictions to be compared on.
    """

    id: int
    scores: dict[str, float]
    answer: Any
    context: str
    reference: str


@dataclass(frozen=True)
class Outcome:
    """A task's items under one model, in order."""

    metric: str
    items: list[Item]
    truncated: int

    @property
    def scores(self) -> list[float]:
        """Of the metric that counts, item by item."""
        return [item.scores[self.metric] for item in self.items]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, without the items: means and the interval of the metric that counts."""
        low, high = mean_interval(self.scores)
        names = [name for name in self.items[0].scores if all(name in item.scores for item in self.items)]
        return {
            "items": len(self.items),
            "metric": self.metric,
            "score": sum(self.scores) / len(self.items),
            "interval": [low, high],
            "metrics": {name: sum(item.scores[name] for item in self.items) / len(self.items) for name in names},
            "truncated": self.truncated,
        }

    def to_json(self) -> dict[str, Any]:
        """All of it, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Outcome:
        return cls(value["metric"], [Item(**item) for item in value["items"]], value["truncated"])


def run_task(task: Task, model: LM, *, limit: int | None = None, chat: bool = False) -> Outcome:
    """Every item of `task`, or the first `limit`. Raises InputError where an item or the scoring is at fault."""
    built = task.built
    truncated = getattr(model, "truncated", 0)
    with contextlib.redirect_stderr(io.StringIO()), _faults(task):  # lm-eval has a progress bar of its own
        built.build_all_requests(
            limit=limit, rank=0, world_size=1, apply_chat_template=chat, fewshot_as_multiturn=chat,
            chat_template=model.apply_chat_template if chat else None,
            tokenizer_name=model.tokenizer_name if chat else "",
        )  # fmt: skip
    by_type: dict[str, list[Instance]] = defaultdict(list)
    for instance in built.instances:
        instance.resps.clear()
        by_type[instance.request_type] += [instance] * (instance.repeats or 1)
    for kind, instances in by_type.items():
        for instance, answer in zip(instances, getattr(model, kind)(instances), strict=True):
            instance.resps.append(answer)
    with _faults(task):
        built.apply_filters()
        items = _items(task)
    if not items or any(task.metric not in item.scores for item in items):
        raise InputError(f"task {task.name}: {task.metric} has no number for each item: name another metric first")
    return Outcome(task.metric, items, getattr(model, "truncated", 0) - truncated)


@contextlib.contextmanager
def _faults(task: Task) -> Any:
    """What goes wrong in a task's templates and metrics is the task's fault."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        said = words_of(error)
        raise InputError(f"task {task.name}: an item can't be asked or scored ({said}): mend the task") from None


def _items(task: Task) -> list[Item]:
    """What each item came to, of instances that have been answered and filtered. The last filter's answers count."""
    built = task.built
    groups: dict[int, list[Instance]] = defaultdict(list)
    for instance in built.instances:
        groups[instance.doc_id or 0].append(instance)
    items = []
    for id, instances in groups.items():
        instances.sort(key=lambda instance: instance.idx)
        first = instances[0]
        name = list(first.filtered_resps)[-1]
        found = built.process_results(first.doc, [instance.filtered_resps[name] for instance in instances])
        scores = {metric: float(value) for metric, value in found.items() if isinstance(value, (int, float))}
        answer, context, reference = _answer(task, instances)
        items.append(Item(id, scores, answer, context, reference))
    return items


def _answer(task: Task, instances: list[Instance]) -> tuple[Any, str, str]:
    """An item's answer, its context, and what should follow that (see Item)."""
    first = instances[0]
    if task.output_type == "multiple_choice":
        likelihoods = [instance.resps[0][0] for instance in instances]
        if task.metric == "acc_norm":  # by lm-eval's measure of an answer's length
            choices = task.built.doc_to_choice(first.doc)
            likelihoods = [total / max(1, len(text)) for total, text in zip(likelihoods, choices, strict=False)]
        gold = task.built.doc_to_target(first.doc)
        gold = gold[0] if isinstance(gold, list) else gold
        known = isinstance(gold, int) and 0 <= gold < len(instances)
        context, reference = instances[gold if known else 0].args  # type: ignore[index]
        return likelihoods.index(max(likelihoods)), context, reference
    if task.output_type == "loglikelihood":
        return bool(first.resps[0][1]), *first.args
    if task.output_type == "generate_until":
        return first.resps[0], first.args[0], first.resps[0]
    return None, "", first.args[0]
