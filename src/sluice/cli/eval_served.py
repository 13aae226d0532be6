"""Runs benchmark tasks against servers side by side, and keeps what is done. It opens no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sluice.cli.eval_compare import Measured, file_state
from sluice.cli.signals import Stop
from sluice.cli.terminal import progress_bar
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.eval.task_run import Outcome
    from sluice.eval.task_store import Store


class Servers:
    """Servers by the names that `urls` give them ([MODE=]URL), the reference first; `path` is a file of their model.

    `apart` stays empty: servers tell the likeliest few tokens' probabilities, which is not enough for a divergence.
    """

    def __init__(
        self, path: Path, urls: Sequence[str], measured: Measured, store: Store, stop: Stop, *, ctx: int, streams: int,
        key: str | None,
    ) -> None:  # fmt: skip
        if measured.chat:
            raise InputError("--chat is for an engine of this process: leave it out with --url")
        self.path = path
        self.urls = _named(urls)
        self.reference = next(iter(self.urls))
        self.measured = measured
        self.store = store
        self.stop = stop
        self.ctx = ctx
        self.streams = streams
        self.key = key
        self.outcomes: dict[str, dict[str, Outcome]] = {name: {} for name in self.urls}
        self.apart: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in self.urls}
        self.sides: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        """Fill `outcomes` and `sides`. Raises InputError, and SluiceError where a server fails."""
        from sluice.eval.task_run import Outcome, run_task
        from sluice.eval.task_served import ServedLM
        from sluice.ggml import load_library
        from sluice.gguf import open_gguf
        from sluice.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_metadata(open_gguf(self.path, load_library(None)).metadata)
        for name, url in self.urls.items():
            began, lm = perf_counter(), None
            made = {"model": file_state(self.path), "url": url, "ctx": self.ctx}
            with progress_bar(f"asking {name}", self.stop.check) as progress:
                for i, task in enumerate(self.measured.tasks):
                    progress(i, len(self.measured.tasks))
                    key = self.measured.made_of(task) | made
                    if (kept := self.store.load(f"{task.name}-{name}", key)) is not None:
                        self.outcomes[name][task.name] = Outcome.from_json(kept)
                        continue
                    lm = lm or ServedLM(url, tokenizer, ctx=self.ctx, concurrent=self.streams, key=self.key)
                    outcome = run_task(task, lm, limit=self.measured.limit)
                    self.outcomes[name][task.name] = outcome
                    self.store.save(f"{task.name}-{name}", key, outcome.to_json())
            self.sides[name] = {"url": url, "streams": self.streams, "eval_s": perf_counter() - began}


def _named(urls: Sequence[str]) -> dict[str, str]:
    """Each server's address by its name, which is the address itself unless one is given. Raises InputError."""
    from sluice.eval.task_served import base_of

    found: dict[str, str] = {}
    for given in urls:
        name, equals, url = given.partition("=")
        if not equals or "/" in name:
            name = url = given
        if name in found:
            raise InputError(f"--url {name[:100]} is there twice: name each server once, like exact={url}")
        found[name] = base_of(url)
    return found
