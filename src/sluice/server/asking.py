"""From a checked request to the jobs that answer it; knows what the model bounds, and nothing of HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sluice.server.errors import bad
from sluice.server.jobs import Job, TokenMask
from sluice.server.limits import MAX_FIGURES
from sluice.server.model import ServedModel
from sluice.server.schemas import GenerationRequest
from sluice.text.sampling import SamplingParams

_SEEDS = 1 << 64


@dataclass(frozen=True)
class Asker:
    """Who asks: whom fairness counts (no secret: the page shows it), and how long the server gives a request."""

    name: str
    deadline_s: float | None = None

    def of(self, user: str | None) -> str:
        """The name with a request's `user`: those of one key are told apart."""
        return f"{self.name}/{user}" if user else self.name


def jobs_for(
    request: GenerationRequest, prompts: Sequence[tuple[int, ...]], model: ServedModel, asker: Asker, *,
    max_tokens: int | None, top_logprobs: int | None, echo_logprobs: bool = False,
    constraint: Callable[[], TokenMask] | None = None,
) -> list[Job]:  # fmt: skip
    """The jobs, each prompt's `n` choices together. Raises ApiError for what the model can't serve."""
    for prompt in prompts:
        if len(prompt) > model.n_ctx:
            raise bad(
                f"the prompt has {len(prompt)} tokens and the context {model.n_ctx} positions: shorten it",
                "prompt", "context_length_exceeded",
            )  # fmt: skip
        if any(id >= model.tokenizer.n_vocab for id in prompt):
            raise bad(f"a token id is outside the model's vocabulary of {model.tokenizer.n_vocab}", "prompt")
    if max_tokens is not None and max_tokens > model.n_ctx:
        raise bad(f"max_tokens is {max_tokens} and the context has {model.n_ctx} positions: ask for fewer",
                  "max_tokens", "context_length_exceeded")  # fmt: skip
    if top_logprobs is not None:
        max_tokens = _that_can_be_held(request, prompts, max_tokens, 1 + top_logprobs, echo_logprobs)
    bias = _bias(request, model.tokenizer.n_vocab)
    return [
        Job(
            prompt=prompt, params=_params(request, choice), max_tokens=max_tokens, stop=request.stops,
            client=asker.of(request.user), deadline_s=asker.deadline_s, top_logprobs=top_logprobs, logit_bias=bias,
            constraint=constraint, echo_logprobs=echo_logprobs, ignore_eos=request.ignore_eos,
        )
        for prompt in prompts for choice in range(request.n)
    ]  # fmt: skip


def _that_can_be_held(
    request: GenerationRequest, prompts: Sequence[tuple[int, ...]], max_tokens: int | None, each: int, echo: bool
) -> int | None:
    """`max_tokens`, or how many tokens' log-probabilities can be held, `each` so many, where none were asked for.

    An answer that comes whole holds all of its own; a stream only the prompt's, which come at once. Raises ApiError.
    """
    choices = request.n * len(prompts)
    echoed = request.n * sum(map(len, prompts)) if echo else 0
    made = 0 if request.stream else choices * (1 if max_tokens is None else max_tokens)
    if (wanted := (echoed + made) * each) > MAX_FIGURES:
        raise bad(
            f"the answer may come to {wanted:,} log-probabilities, and {MAX_FIGURES:,} can be held: stream it, or ask "
            "for fewer tokens, choices or likeliest ones",
            "logprobs",
        )  # fmt: skip
    return max_tokens if max_tokens is not None or request.stream else (MAX_FIGURES // each - echoed) // choices


def _params(request: GenerationRequest, choice: int) -> SamplingParams:
    """Choices of one seed draw by seeds of their own, or all would be the same."""
    return SamplingParams(
        temperature=request.temperature, sample_top_k=max(request.top_k, 0), top_p=request.top_p, min_p=request.min_p,
        repeat_penalty=request.repetition_penalty, repeat_last_n=request.repeat_last_n,
        seed=None if request.seed is None else (request.seed + choice) % _SEEDS,
    )  # fmt: skip


def _bias(request: GenerationRequest, n_vocab: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in (request.logit_bias or {}).items():
        if not re.fullmatch(r"[0-9]{1,9}", name) or int(name) >= n_vocab:
            raise bad(f"logit_bias names {name[:40]!r}: give ids of tokens, 0 to {n_vocab - 1}", "logit_bias")
        bias[int(name)] = value
    return bias
