"""What requests may say: OpenAI's fields, those that other servers added to them, and which are refused by name.

A field that would change the answer and isn't served is refused; one that has nothing to do with the answer is taken
and left alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from sluice.server import limits

# nothing of an answer depends on these
HARMLESS = frozenset(
    ("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "prompt_cache_options", "prediction", "cache_prompt", "timings_per_token", "return_progress", "request_id")
)  # fmt: skip
# these are served only with the value that says "no"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "best_of": (1,), "suffix": ("",), "modalities": (["text"],),
    "length_penalty": (1,), "use_beam_search": (False,), "typical_p": (1, 0), "tfs_z": (1,), "mirostat": (0,),
    "xtc_probability": (0,), "dry_multiplier": (0,), "verbosity": ("medium",), "logprob_token_ids": ([],),
    "functions": ([],), "function_call": ("none",), "web_search_options": (), "audio": (), "images": ([],),
}  # fmt: skip
_INSTEAD = {
    "functions": "use tools", "function_call": "use tool_choice", "best_of": "use n", "audio": "it makes text alone",
    "images": "it reads text alone", "web_search_options": "it opens no URL",
    "frequency_penalty": "use repetition_penalty", "presence_penalty": "use repetition_penalty",
}  # fmt: skip


def _few(value: Any, most: int) -> Any:
    """`value`, unless it is an object with more entries than `most`: each could be at fault, and would be listed."""
    if isinstance(value, dict) and len(value) > most:
        counts = {"n": len(value), "most": most}
        raise PydanticCustomError("too_many", "there are {n} entries: give at most {most}", counts)
    return value


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_the_harmless(cls, data: Any) -> Any:
        """`data` without nulls and without what asks for nothing. Raises for what asks for what isn't served."""
        if not isinstance(data, dict):
            return data
        _few(data, limits.MAX_FIELDS)
        kept = {}
        for name, value in data.items():
            if value is None or name in HARMLESS:
                continue
            if name in NEUTRAL and name not in cls.model_fields:
                if not any(value == no and isinstance(value, bool) == isinstance(no, bool) for no in NEUTRAL[name]):
                    raise PydanticCustomError(
                        "not_served", "{name} is not served: {instead}",
                        {"name": name, "instead": _INSTEAD.get(name, "leave it out")},
                    )  # fmt: skip
                continue
            kept[name] = value
        return kept


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is obfuscated: a peer on the network path sees sizes


Count = Annotated[int, Field(ge=1, le=limits.MAX_COUNT)]
Stop = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARACTERS)]
Bias = Annotated[float, Field(ge=-limits.MAX_BIAS, le=limits.MAX_BIAS)]
Biases = Annotated[
    dict[str, Bias], Field(max_length=limits.MAX_BIASES),
    BeforeValidator(lambda value: _few(value, limits.MAX_BIASES)),
]  # fmt: skip


class GenerationRequest(_Request):
    """What both routes take. Sampling that isn't named is that of `sluice run`."""

    model: str | None = Field(None, max_length=1024, description="The served model's id. Default: that.")
    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_COUNT, description="0 or -1: all")] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    repeat_last_n: Annotated[int, Field(ge=-1, le=limits.MAX_COUNT)] = 64
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=limits.MAX_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=limits.MAX_COUNT)] | None = None
    logit_bias: Biases | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=limits.MAX_USER_CHARACTERS)] | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise PydanticCustomError(
                "text_alone", "a part of type {kind} is not served: this server reads text alone, and opens no URL "
                "or file", {"kind": repr(kind[:40])},
            )  # fmt: skip
        return data


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    arguments: str = Field("{}", description="JSON")


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message. What else a client's own answer came with (annotations, audio: null, …) is left alone."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=limits.MAX_PARTS)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=limits.MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_else_to_read(cls, data: Any) -> Any:
        """Refuses what stands beside the content and would have to be read with it."""
        if isinstance(data, dict):
            for name in ("audio", "images", "image_url", "function_call", "file", "files"):
                if data.get(name) is not None:
                    raise PydanticCustomError(
                        "text_alone", "{name} is not served: this server reads text alone, and opens no URL or file",
                        {"name": name},
                    )  # fmt: skip
        return data

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls and not self.reasoning_content:
            raise PydanticCustomError("no_content", "a message has neither content nor tool_calls")
        return self

    @property
    def text(self) -> str | None:
        """The content in one piece."""
        if not isinstance(self.content, list):
            return self.content
        return "\n".join(part.text or part.refusal for part in self.content)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=limits.MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="What the model's template takes beside.")


Ids = Annotated[list[Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]], Field(fail_fast=True, min_length=1)]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=limits.MAX_CHOICES)]
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=limits.MAX_CHOICES)]
    )
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt: text, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]
