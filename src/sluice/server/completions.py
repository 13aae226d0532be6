"""POST /v1/completions: continues prompts as they are, with their own log-probabilities if asked. Knows no chat."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from sluice.server.asking import Asker, jobs_for
from sluice.server.errors import bad
from sluice.server.figures import Figures
from sluice.server.jobs import Event, Finished, Job, PromptLogprobs, TokenEvent
from sluice.server.limits import Limits
from sluice.server.model import ServedModel, finite
from sluice.server.replies import Reply
from sluice.server.schemas import CompletionRequest

DEFAULT_TOKENS = 16  # OpenAI's
_Top = tuple[tuple[int, float], ...]


def prepare(
    request: CompletionRequest, model: ServedModel, asker: Asker, limits: Limits
) -> tuple[list[Job], CompletionReply]:
    """The jobs of a request and what gathers their answer. Raises ApiError. Takes long for long prompts."""
    given = request.prompts
    if len(given) * request.n > limits.choices:
        raise bad(f"{len(given)} prompts with n {request.n}: give at most {limits.choices} together", "prompt")
    prompts = [model.encode(each) if isinstance(each, str) else tuple(each) for each in given]
    if not all(prompts):
        raise bad("a prompt is empty, and this model has no token to start with: give some text", "prompt")
    jobs = jobs_for(
        request, prompts, model, asker, max_tokens=DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens,
        top_logprobs=request.logprobs, echo_logprobs=request.echo and request.logprobs is not None,
    )  # fmt: skip
    return jobs, CompletionReply(request, prompts, model)


class CompletionReply(Reply):
    """The answer to one request."""

    def __init__(self, request: CompletionRequest, prompts: Sequence[tuple[int, ...]], model: ServedModel) -> None:
        super().__init__(request, prompts, model, prefix="cmpl", object="text_completion")
        self._choices: list[_Choice] = []
        for given, ids in zip(request.prompts, prompts, strict=True):
            for _ in range(request.n):
                choice = _Choice(len(self._choices), model, logprobs=request.logprobs is not None)
                if request.echo:
                    choice.echo(given if isinstance(given, str) else model.decode(ids), ids)
                self._choices.append(choice)

    def take(self, index: int, event: Event) -> Iterable[dict[str, Any]]:
        choice = self._choices[index]
        if isinstance(event, PromptLogprobs):
            choice.prompt(event)
        elif isinstance(event, TokenEvent):
            choice.token(event)
            if self.stream and choice.has_news:
                yield self.chunk(choice.news())
        elif isinstance(event, Finished):
            choice.finish_reason = event.reason
            self.ended(index, event)
            if self.stream:
                yield self.chunk(choice.news(), index)

    def whole(self) -> dict[str, Any]:
        return self.complete("text_completion", [choice.whole() for choice in self._choices])


class _Choice:
    """One continuation: its text, and lists of what is known of each token."""

    def __init__(self, index: int, model: ServedModel, *, logprobs: bool) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self._model = model
        self._pieces: list[str] = []
        self._logprobs = _Logprobs(model) if logprobs else None
        self._echoed: tuple[int, ...] = ()

    def echo(self, text: str, ids: tuple[int, ...]) -> None:
        """Begin with the prompt."""
        self._pieces.append(text)
        self._echoed = ids

    def prompt(self, event: PromptLogprobs) -> None:
        if self._logprobs is not None:
            for id, logprob, top in zip(self._echoed, event.logprobs, event.tops, strict=True):
                self._logprobs.add(id, logprob, top)

    def token(self, event: TokenEvent) -> None:
        self._pieces.append(event.text)
        if self._logprobs is not None and event.id is not None:
            self._logprobs.add(event.id, event.logprob, event.top)

    @property
    def has_news(self) -> bool:
        """Whether text or tokens came since the last chunk."""
        return any(self._pieces) or bool(self._logprobs)

    def news(self) -> dict[str, Any]:
        """The choice as a chunk shows it: what came since the last one."""
        told = self.whole()
        self._pieces.clear()
        if self._logprobs is not None:
            self._logprobs.clear()
        return told

    def whole(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": "".join(self._pieces),
            "logprobs": None if self._logprobs is None else self._logprobs.as_dict(),
            "finish_reason": self.finish_reason,
        }


class _Logprobs:
    """The lists that the format has, one entry a token; offsets count the text's characters."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._figures = Figures()
        self._offsets = array("q")
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def __len__(self) -> int:
        return len(self._figures)

    def add(self, id: int, logprob: float | None, top: _Top) -> None:
        self._figures.add(id, logprob, top)
        self._offsets.append(self._length)
        self._length += len(self._characters.decode(self._model.tokenizer.token_bytes(id)))

    def clear(self) -> None:
        """Forget what has been told."""
        self._figures.clear()
        del self._offsets[:]

    def as_dict(self) -> dict[str, Any]:
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for id, logprob, top in self._figures:
            tokens.append(self._model.token(id))
            logprobs.append(None if logprob is None else finite(logprob))
            tops.append(None if logprob is None else self._top([*top, (id, logprob)]))
        return {
            "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": self._offsets.tolist(),
        }  # fmt: skip

    def _top(self, figures: Sequence[tuple[int, float]]) -> dict[str, float]:
        """By text: of two tokens with one text the likelier counts."""
        tops: dict[str, float] = {}
        for id, value in figures:
            text = self._model.token(id)
            tops[text] = max(tops.get(text, finite(value)), finite(value))
        return tops
