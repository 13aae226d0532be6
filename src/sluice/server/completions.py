"""POST /v1/completions: continues prompts as they are, with their own log-probabilities if asked. Knows no chat."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from sluice.server.asking import Asker, jobs_for
from sluice.server.errors import bad
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
            if news := choice.news():
                yield self.chunk(news)
        elif isinstance(event, Finished):
            choice.finish_reason = event.reason
            self.ended(index, event)
            yield self.chunk(choice.news() or choice.as_dict("", None), index)

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
        self._told = 0, 0  # pieces and tokens that chunks have brought

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

    def news(self) -> dict[str, Any] | None:
        """The choice as a chunk shows it: what came since the last one. None if that is nothing."""
        pieces, tokens = self._told
        text = "".join(self._pieces[pieces:])
        logprobs = None if self._logprobs is None else self._logprobs.as_dict(tokens)
        if not text and self.finish_reason is None and not (logprobs and logprobs["tokens"]):
            return None
        self._told = len(self._pieces), 0 if self._logprobs is None else len(self._logprobs.tokens)
        return self.as_dict(text, logprobs)

    def whole(self) -> dict[str, Any]:
        return self.as_dict("".join(self._pieces), None if self._logprobs is None else self._logprobs.as_dict(0))

    def as_dict(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason}


class _Logprobs:
    """The lists that the format has, one entry a token; offsets count the text's characters."""

    def __init__(self, model: ServedModel) -> None:
        self.tokens: list[str] = []
        self._model = model
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def add(self, id: int, logprob: float | None, top: _Top) -> None:
        token = self._model.token
        self.tokens.append(token(id))
        self._offsets.append(self._length)
        self._length += len(self._characters.decode(self._model.tokenizer.token_bytes(id)))
        if logprob is None:
            self._logprobs.append(None)
            self._tops.append(None)
            return
        self._logprobs.append(finite(logprob))
        tops: dict[str, float] = {}
        for other, value in (*top, (id, logprob)):  # two tokens may have one text: the likelier counts
            text = token(other)
            tops[text] = max(tops.get(text, finite(value)), finite(value))
        self._tops.append(tops)

    def as_dict(self, start: int) -> dict[str, Any]:
        return {
            "tokens": self.tokens[start:],
            "token_logprobs": self._logprobs[start:],
            "top_logprobs": self._tops[start:],
            "text_offset": self._offsets[start:],
        }
