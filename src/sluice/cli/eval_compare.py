"""Runs benchmark tasks in several modes, one engine after the other, and keeps what is done. Computes no statistic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sluice.cli.opening import announce, device_for, open_engine
from sluice.cli.signals import Stop
from sluice.cli.spool import check_room, spool
from sluice.cli.terminal import note, progress_bar
from sluice.config import EngineConfig
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.engine import Engine
    from sluice.eval.divergence import Recorded
    from sluice.eval.task_run import Outcome
    from sluice.eval.task_store import Store
    from sluice.eval.tasks import Task

_CHANGE_OUTPUT = ("ctx", "kv", "routing", "top_k_experts", "threads", "reroute", "reroute_keep")
_CHANGE_DEVICE = ("device", "vram", "gpu_layers", "cpu_moe_layers", "upload_from", "ram", "expert_slots", "policy")
_CHANGE_REROUTING = ("ram", "expert_slots", "policy", "streams")  # and with it what rerouting makes


@dataclass(frozen=True)
class Measured:
    """What is measured in every mode: the first `limit` items (None: all), predictions on `kl_tokens` of a task."""

    tasks: Sequence[Task]
    limit: int | None
    chat: bool
    kl_tokens: int

    def made_of(self, task: Task) -> dict[str, Any]:
        """What a task's outcome depends on, beside the model and its mode."""
        return {"task": task.digest, "limit": self.limit, "chat": self.chat}


class Comparison:
    """The modes, the reference first. What `store` has of an earlier run is not done again."""

    def __init__(
        self, path: Path, modes: Mapping[str, EngineConfig], measured: Measured, store: Store, stop: Stop
    ) -> None:  # fmt: skip
        self.path = path
        self.modes = modes
        self.reference = next(iter(modes))
        self.measured = measured
        self.store = store
        self.stop = stop
        self.outcomes: dict[str, dict[str, Outcome]] = {}  # by mode and task
        self.apart: dict[str, dict[str, dict[str, Any]]] = {}  # by mode and task: predictions against the reference's
        self.sides: dict[str, dict[str, Any]] = {}
        self._settings = {name: {"model": file_state(path)} | _settings(config) for name, config in modes.items()}
        self._recorded: dict[str, Recorded] = {}

    def run(self) -> None:
        """Fill `outcomes`, `apart` and `sides`. Raises InputError, and what `stop` stands for."""
        self._load()
        others = [mode for mode in self.modes if mode != self.reference]
        wanted = {
            mode: [
                task for task in self.measured.tasks if self.measured.kl_tokens and task.name not in self.apart[mode]
            ]
            for mode in others
        }
        wanted[self.reference] = [task for task in self.measured.tasks if any(task in each for each in wanted.values())]
        with ExitStack() as files:
            for mode in self.modes:
                self._run(mode, wanted[mode], files)

    def _key(self, task: Task, mode: str) -> dict[str, Any]:
        return self.measured.made_of(task) | self._settings[mode]

    def _kl_key(self, task: Task, mode: str) -> dict[str, Any]:
        return self._key(task, mode) | {
            "reference": self._settings[self.reference], "kl_tokens": self.measured.kl_tokens,
        }  # fmt: skip

    def _load(self) -> None:
        from sluice.eval.task_run import Outcome

        for mode in self.modes:
            outcomes, apart = self.outcomes.setdefault(mode, {}), self.apart.setdefault(mode, {})
            for task in self.measured.tasks:
                if (kept := self.store.load(f"{task.name}-{mode}", self._key(task, mode))) is not None:
                    outcomes[task.name] = Outcome.from_json(kept)
                if (kept := self.store.load(f"{task.name}-{mode}-kl", self._kl_key(task, mode))) is not None:
                    apart[task.name] = kept

    def _run(self, mode: str, to_compare: Sequence[Task], files: ExitStack) -> None:
        """One mode: tasks that are not done yet, and predictions on the texts of `to_compare`."""
        outcomes = self.outcomes[mode]
        side = self.store.load(f"mode-{mode}", self._settings[mode])
        if side is not None and len(outcomes) == len(self.measured.tasks) and not to_compare:
            self.sides[mode] = side
            return
        began = perf_counter()
        with open_engine(self.path, self.modes[mode], self.stop) as engine:
            announce(engine)
            for task in self.measured.tasks:
                if task.name not in outcomes:
                    outcomes[task.name] = self._outcome(engine, task, mode)
                    self.store.save(f"{task.name}-{mode}", self._key(task, mode), outcomes[task.name].to_json())
            for task in to_compare:
                if mode == self.reference:
                    self._record(engine, task, files)
                elif task.name in self._recorded:
                    self.apart[mode][task.name] = found = self._compare(engine, task, mode)
                    self.store.save(f"{task.name}-{mode}-kl", self._kl_key(task, mode), found)
            self.sides[mode] = _side(engine, perf_counter() - began)
            self.store.save(f"mode-{mode}", self._settings[mode], self.sides[mode])

    def _outcome(self, engine: Engine, task: Task, mode: str) -> Outcome:
        from sluice.eval.task_model import EngineLM
        from sluice.eval.task_run import run_task

        with progress_bar(f"{task.name}, {mode}", self.stop.check) as progress:
            lm = EngineLM(engine, chat=self.measured.chat, progress=progress)
            return run_task(task, lm, limit=self.measured.limit, chat=self.measured.chat)

    def _record(self, engine: Engine, task: Task, files: ExitStack) -> None:
        """The reference's predictions on a task's texts, to a file."""
        from sluice.eval.divergence import record, spooled_bytes
        from sluice.eval.task_texts import texts_of
        from sluice.eval.windows import lead_of

        def encode(text: str) -> list[int]:
            return engine.tokenizer.encode(text, special=self.measured.chat, bos=False)

        texts = texts_of(
            self.outcomes[self.reference][task.name].items, encode, most=self.measured.kl_tokens,
            longest=engine.n_ctx - len(lead_of(engine)),
        )  # fmt: skip
        if not texts:
            note(f"{task.name}: no item is as short as --kl-tokens {self.measured.kl_tokens}: nothing to compare on")
            return
        file, folder = files.enter_context(spool())
        check_room("the reference's logits take", spooled_bytes(engine, texts), folder, "give fewer --kl-tokens")
        with progress_bar(f"{task.name}, predictions", self.stop.check) as progress:
            self._recorded[task.name] = record(engine, texts, file, progress)

    def _compare(self, engine: Engine, task: Task, mode: str) -> dict[str, Any]:
        from sluice.eval.divergence import compare, together

        with progress_bar(f"{task.name}, predictions, {mode}", self.stop.check) as progress:
            return together(compare(engine, self._recorded[task.name], progress).values()).as_dict()


def _settings(config: EngineConfig) -> dict[str, Any]:
    """What of a configuration an outcome depends on, with the files that it names, as JSON has it."""
    names = _CHANGE_OUTPUT if config.reroute is None else _CHANGE_OUTPUT + _CHANGE_REROUTING
    if (device := device_for(config)) is not None:
        names = tuple(dict.fromkeys(names + _CHANGE_DEVICE))
    files = [config.prerouter, *(path for path, _ in config.lora)]
    return {
        **{name: getattr(config, name) for name in names},
        **({} if device is None else {"device": device}),
        "files": [file_state(path) for path in files if path is not None],
        "scales": [scale for _, scale in config.lora],
        "ggml": None if config.ggml is None else str(config.ggml),
    }


def file_state(path: Path) -> list[Any]:
    """A file by its name, size and time of change: enough to notice another one. Raises InputError."""
    try:
        state = path.stat()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: can't be read ({why}): check the path") from None
    return [path.name, state.st_size, state.st_mtime_ns]


def _side(engine: Engine, seconds: float) -> dict[str, Any]:
    """What one mode ran as, and what that cost."""
    from sluice.memory import peak_rss_bytes

    return {
        "mode": engine.mode | {"ctx": engine.n_ctx},
        "budget_bytes": engine.plan.budget,
        "slots": engine.plan.slots,
        "streams": engine.config.streams,
        "eval_s": seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "ledger": engine.stats(),
    }
