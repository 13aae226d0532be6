"""What the answers of both routes have in common: ids, usage, how each choice went. Knows no route's own fields."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from sluice.server.jobs import Finished
from sluice.server.model import ServedModel
from sluice.server.schemas import GenerationRequest


class Reply:
    """One request's answer as it grows; choices are numbered prompt by prompt."""

    def __init__(
        self, request: GenerationRequest, prompts: Sequence[tuple[int, ...]], model: ServedModel, *, prefix: str,
        object: str,
    ) -> None:  # fmt: skip
        self.model = model
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.object = object
        self.n_choices = len(prompts) * request.n
        self.reasoning_tokens = 0
        self.stream = request.stream
        self._include_usage = request.include_usage
        self._per_prompt = request.n
        self._prompt_tokens = sum(map(len, prompts))
        self._ends: dict[int, Finished] = {}

    def head(self, object: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model.id,
            "system_fingerprint": self.model.fingerprint,
        }

    def chunk(self, choice: dict[str, Any], end: int | None = None) -> dict[str, Any]:
        """One chunk of a stream with one choice's news; the last one of choice `end` says how that went."""
        usage = {"usage": None} if self._include_usage else {}
        more = {} if end is None else {"sluice": self._report([end])}
        return self.head(self.object) | {"choices": [choice]} | usage | more

    def ended(self, index: int, end: Finished) -> None:
        self._ends[index] = end

    def closing(self) -> list[dict[str, Any]]:
        """The chunk with a stream's usage, if it was asked for."""
        return [self.head(self.object) | {"choices": [], "usage": self.usage()}] if self._include_usage else []

    def complete(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer in one piece."""
        report = self._report(sorted(self._ends))
        return self.head(object) | {"choices": choices, "usage": self.usage(), "sluice": report}

    def usage(self) -> dict[str, Any]:
        """Token counts. A prompt counts once, however many choices continue it."""
        generated = sum(end.generated for end in self._ends.values())
        firsts = [end for index, end in self._ends.items() if index % self._per_prompt == 0]
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": sum(end.reused_tokens for end in firsts)},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def _report(self, indices: Sequence[int]) -> dict[str, Any]:
        """What OpenAI's format has no place for: the mode, and each choice's seed and times in seconds."""
        return {"mode": dict(self.model.mode), "choices": [_how(i, self._ends[i]) for i in indices]}


def _how(index: int, end: Finished) -> dict[str, Any]:
    gaps = end.intervals_s
    return {
        "index": index,
        "seed": end.seed,
        "reused_tokens": end.reused_tokens,
        "queue_s": end.queue_s,
        "ttft_s": end.ttft_s,
        "tpot_s": sum(gaps) / len(gaps) if gaps else None,
        "total_s": end.total_s,
    }
