"""POST /v1/chat/completions: answers conversations. Knows OpenAI's shapes; how a model writes is `formats`' to know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sluice.server.asking import Asker, jobs_for
from sluice.server.errors import bad
from sluice.server.figures import Figures
from sluice.server.formats import Delta, Format, Splitter, check_tools
from sluice.server.jobs import Event, Finished, Job, TokenEvent
from sluice.server.limits import Limits
from sluice.server.model import ServedModel, finite
from sluice.server.replies import Reply
from sluice.server.schemas import ChatRequest, Message

TAIL_TOKENS = 64  # of the prompt, for what the answer continues: a begun thought, an opened call
# what the template is given by others than the client
_TAKEN = frozenset(("messages", "tools", "template", "add_generation_prompt", "bos_token", "eos_token", "self"))


def prepare(request: ChatRequest, model: ServedModel, asker: Asker, limits: Limits) -> tuple[list[Job], ChatReply]:
    """The jobs of a request and what gathers their answer. Raises ApiError and InputError. Takes long for long prompts.

    It renders the conversation in the model's template, and compiles what the answer must conform to.
    """
    template = model.tokenizer.chat_template
    if template is None:
        raise bad("the model has no chat template: use /v1/completions", "model", "chat_template")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad("top_logprobs is about log-probabilities: set logprobs too", "logprobs")
    if request.n > limits.choices:
        raise bad(f"n is {request.n}: give at most {limits.choices}", "n")
    max_tokens = request.max_completion_tokens or request.max_tokens
    if request.max_tokens == 0:
        raise bad("max_tokens is 0: ask for 1 or more", "max_tokens")
    format = Format.of(template)
    tools = check_tools(request.tools)
    prompt = tuple(
        model.engine.encode_chat(
            format.messages([_as_dict(message) for message in request.messages]), tools=tools,
            **_variables(request, format),
        )
    )  # fmt: skip
    tail = model.decode(prompt[-TAIL_TOKENS:])
    constraint = format.constraint(
        model.tokenizer, request.response_format, tools, request.tool_choice, prompt_tail=tail,
        parallel=request.parallel_tool_calls,
    )  # fmt: skip
    jobs = jobs_for(
        request, [prompt], model, asker, max_tokens=max_tokens,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None, constraint=constraint,
    )  # fmt: skip
    callable = None if request.tool_choice == "none" else tools
    splitters = [format.splitter(model.tokenizer, prompt_tail=tail, tools=callable) for _ in jobs]
    return jobs, ChatReply(request, prompt, model, splitters)


def _as_dict(message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    told: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            told[name] = value
    if message.tool_calls:
        told["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return told


def _variables(request: ChatRequest, format: Format) -> dict[str, Any]:
    """What the template is given beside messages and tools."""
    given = dict(request.chat_template_kwargs or {})
    if taken := sorted(_TAKEN & set(given)):
        raise bad(f"chat_template_kwargs can't set {taken[0]!r}: leave it out", "chat_template_kwargs")
    thinking = given.pop("enable_thinking", None)
    if thinking is not None and not isinstance(thinking, bool):
        raise bad("enable_thinking is neither true nor false", "chat_template_kwargs")
    return format.variables(request.reasoning_effort, thinking) | given


class ChatReply(Reply):
    """The answer to one request."""

    def __init__(
        self, request: ChatRequest, prompt: tuple[int, ...], model: ServedModel, splitters: Sequence[Splitter]
    ) -> None:
        super().__init__(request, [prompt], model, prefix="chatcmpl", object="chat.completion.chunk")
        self._choices = [_Choice(i, model, each, request) for i, each in enumerate(splitters)]

    def take(self, index: int, event: Event) -> Iterable[dict[str, Any]]:
        choice = self._choices[index]
        if isinstance(event, TokenEvent):
            deltas = choice.token(event)
            self.reasoning_tokens += any(delta.kind == "reasoning" for delta in deltas)
        elif isinstance(event, Finished):
            deltas = choice.finish(event)
            self.ended(index, event)
        else:
            return
        if not self.stream:
            return
        for news in choice.news(deltas):
            yield self.chunk(news)
        if isinstance(event, Finished):
            yield self.chunk(choice.last(), index)

    def whole(self) -> dict[str, Any]:
        return self.complete("chat.completion", [choice.whole() for choice in self._choices])


class _Choice:
    """One answer: its parts, as the splitter tells them apart. Of a stream nothing is kept that has been told."""

    def __init__(self, index: int, model: ServedModel, splitter: Splitter, request: ChatRequest) -> None:
        self.index = index
        self._model = model
        self._splitter = splitter
        self._stream = request.stream
        self._finish_reason: str | None = None
        self._text: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[dict[str, Any]] = []
        self._figures = Figures() if request.logprobs else None
        self._begun = False  # whether there has been a chunk

    def token(self, event: TokenEvent) -> list[Delta]:
        if self._figures is not None and event.id is not None and event.logprob is not None:
            self._figures.add(event.id, event.logprob, event.top)
        return self._note(self._splitter.push(event.text, event.id))

    def finish(self, event: Finished) -> list[Delta]:
        deltas = self._note(self._splitter.finish())
        self._finish_reason = "tool_calls" if self._splitter.called and event.reason == "stop" else event.reason
        return deltas

    def _note(self, deltas: Iterable[Delta]) -> list[Delta]:
        noted = list(deltas)
        for kind, text, _, id in () if self._stream else noted:
            if kind == "name":
                self._calls.append({"id": id, "type": "function", "function": {"name": text, "arguments": ""}})
            elif kind == "arguments":
                self._calls[-1]["function"]["arguments"] += text
            else:
                self._text[kind].append(text)
        return noted

    def news(self, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """What chunks say of these deltas, before them who speaks; log-probabilities come with the first."""
        if not self._begun:
            self._begun = True
            yield self._chunk({"role": "assistant", "content": ""}, None)
        logprobs = None
        if self._figures:
            logprobs = self._logprobs()
            self._figures.clear()
        for delta in deltas:
            yield self._chunk(_delta(delta), logprobs)
            logprobs = None
        if logprobs is not None:
            yield self._chunk({}, logprobs)

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def last(self) -> dict[str, Any]:
        """The chunk that ends the choice."""
        return self._chunk({}, None) | {"finish_reason": self._finish_reason}

    def whole(self) -> dict[str, Any]:
        content, reasoning = "".join(self._text["content"]), "".join(self._text["reasoning"])
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        message |= {"refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return {
            "index": self.index,
            "message": message,
            "logprobs": None if self._figures is None else self._logprobs(),
            "finish_reason": self._finish_reason,
        }

    def _logprobs(self) -> dict[str, Any]:
        """What is known of each token that has not been told."""
        content: list[dict[str, Any]] = []
        for id, logprob, top in self._figures or ():
            tops = [self._logprob(other, value) for other, value in top]
            content.append(self._logprob(id, logprob or 0.0) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _logprob(self, id: int, logprob: float) -> dict[str, Any]:
        raw = self._model.token_bytes(id)
        return {"token": bytes(raw).decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": raw}


def _delta(delta: Delta) -> dict[str, Any]:
    match delta.kind:
        case "content":
            return {"content": delta.text}
        case "reasoning":
            return {"reasoning_content": delta.text}
        case "name":
            function = {"name": delta.text, "arguments": ""}
            return {"tool_calls": [{"index": delta.call, "id": delta.id, "type": "function", "function": function}]}
        case _:
            return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}
