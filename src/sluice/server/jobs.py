"""What passes between whoever takes requests and the worker that answers them: frozen values and their errors.

It knows neither HTTP nor engines. One job is one sampled continuation of one prompt; `n` choices are `n` jobs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from sluice.errors import InputError, SluiceError
from sluice.text.sampling import SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
HEAT_HALF_LIFE_S = 10.0
MAX_BIAS = 100.0  # logit_bias reaches from -100 to 100, as OpenAI has it

# ---- errors: what becomes of a job that isn't answered


class Busy(SluiceError):
    """The queue is full; `retry_after_s` is when a place will likely be free."""

    def __init__(self, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"all streams are in use and the queue is full: try again in {math.ceil(retry_after_s)} s")


class Draining(SluiceError):
    """The service is shutting down: it takes nothing new, or ended a job that could not be finished in time."""

    def __init__(self, text: str = "the server is shutting down: send the request again when it is back") -> None:
        super().__init__(text)


class Cancelled(SluiceError):
    """Whoever asked for the job took it back."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class DeadlineExceeded(SluiceError):
    """A job wasn't done when its deadline passed."""

    def __init__(self, deadline_s: float | None = None) -> None:
        after = "" if deadline_s is None else f" of {deadline_s:g} s"
        super().__init__(f"the request was not done within its deadline{after}: allow more time, or fewer tokens")


# ---- jobs


class TokenMask(Protocol):
    """What may come next in one continuation. The worker's thread calls it, for each token `allow`, then `accept`."""

    @property
    def ended(self) -> bool:
        """Nothing may follow what was accepted: the continuation is complete."""
        ...

    def allow(self, logits: np.ndarray) -> None:
        """Set to -inf, in place, those of `logits` [n_vocab] float32 that must not come; the end of text is a token."""
        ...

    def accept(self, token: int) -> None:
        """Note that `token` was chosen."""
        ...


@dataclass(frozen=True)
class Job:
    """One continuation to sample; checked when built (InputError), and against the model when submitted.

    `max_tokens` None is as much as fits the context; generation ends there in any case. `client` is whom fairness
    counts. `deadline_s` counts from submission. `top_logprobs` None wants no log-probabilities, 0 the chosen token's,
    n those of the n likeliest too: the model's own, before bias, constraint, penalties and temperature, in nats.
    `constraint` makes the continuation's TokenMask; it is called in the worker's thread, where all streams wait for it,
    so what takes long (compiling a grammar) is done before. `echo_logprobs` wants the prompt's own log-probabilities,
    which come as PromptLogprobs before the first token (with as many likeliest ones as `top_logprobs`, which it needs).
    """

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    client: str = ""
    deadline_s: float | None = None
    top_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Callable[[], TokenMask] | None = None
    echo_logprobs: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "prompt", tuple(map(operator.index, self.prompt)))
        except TypeError:
            raise InputError("the prompt holds what is no token id: give whole numbers") from None
        if not self.prompt:
            raise InputError("the prompt is empty: give at least one token")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InputError(f"max_tokens is {self.max_tokens}: give 0 or more")
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise InputError(f"there are {len(self.stop)} stop strings: give up to {MAX_STOPS}, none of them empty")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise InputError(f"the deadline is {self.deadline_s} s: give more than 0")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InputError(f"top_logprobs is {self.top_logprobs}: give 0 to {MAX_TOP_LOGPROBS}")
        if self.echo_logprobs and self.top_logprobs is None:
            raise InputError("the prompt's log-probabilities are asked for without logprobs: ask for those too")
        if not all(abs(bias) <= MAX_BIAS for bias in self.logit_bias.values()):  # NaN is not
            raise InputError(f"a logit_bias is out of range: give numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}")


# ---- events: what a job's submitter is told, in order; Finished or Failed comes exactly once, last


@dataclass(frozen=True)
class TokenEvent:
    """A token, and the text that became safe to show with it (maybe none yet). The end of text is no event.

    `logprob` and `top`, (id, log-probability) pairs with the likeliest first, are there as the job asked. `id` None
    brings text only: what had been held back when the text ended (a stop string's beginning, half a character).
    """

    id: int | None
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptLogprobs:
    """For each token of the prompt its log-probability, given those before it, and the likeliest in its place.

    The first token has none: None and ().
    """

    logprobs: tuple[float | None, ...]
    tops: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class Finished:
    """The job is answered. `reason`: "stop" (end of text, stop string, complete structure) or "length".

    `reused_tokens` of the prompt were taken over from earlier requests. `generated` tokens were given out as events.
    `queue_s`: from submission until the job had a stream; `ttft_s`: until its first token (None: there is none);
    `intervals_s`: between tokens after that; `total_s`: all of it.
    """

    reason: Literal["stop", "length"]
    seed: int
    prompt_tokens: int
    reused_tokens: int
    generated: int
    queue_s: float
    ttft_s: float | None
    intervals_s: tuple[float, ...]
    total_s: float


@dataclass(frozen=True)
class Failed:
    """The job is not answered, or not to its end. `error`: Cancelled, DeadlineExceeded, Draining, ReadError, …"""

    error: SluiceError


Event = TokenEvent | PromptLogprobs | Finished | Failed


# ---- the state of a service, for metrics and the page


@dataclass(frozen=True)
class RequestState:
    """Where one job is. `fed` of its `prompt_tokens` are in the KV cache, `reused` of those without being computed."""

    ticket: int
    client: str
    phase: Literal["queued", "prefill", "decode"]
    prompt_tokens: int
    fed: int
    reused: int
    generated: int
    max_tokens: int | None
    age_s: float


@dataclass(frozen=True)
class Totals:
    """Counts since the service began. submitted = queued + running + finished + failed, failed by kind in `failures`.

    `failures` has the keys "cancelled", "deadline", "draining", "error". `refused` were never submitted: Busy or
    Draining. `prompt_tokens` were fed, `reused_tokens` taken over instead.
    """

    submitted: int = 0
    refused: int = 0
    stopped: int = 0
    out_of_length: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0

    @property
    def finished(self) -> int:
        return self.stopped + self.out_of_length

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


@dataclass(frozen=True)
class StepState:
    """One step, which ended at `at_s`: `width` streams took part with `tokens` in all."""

    phase: Literal["prefill", "decode"]
    at_s: float
    width: int
    tokens: int
    wall_s: float
    compute_s: float
    wait_s: float
    bytes_read: int
    io_busy_s: float


@dataclass(frozen=True)
class ExpertsState:
    """Which experts are in the pool and how much they are wanted: arrays [n_moe_layers, n_expert], rows as `layers`.

    `resident` is uint8 (1: in the pool), `heat` float32: demands, those of `HEAT_HALF_LIFE_S` ago counting half.
    """

    layers: tuple[int, ...]
    resident: np.ndarray
    heat: np.ndarray


@dataclass(frozen=True)
class ServiceState:
    """A snapshot taken between two steps. Times in seconds by the service's clock, sizes in bytes.

    `ledger` is the engine's, by phase, as PhaseLedger.as_dict gives it (without memory, which is here). `recent` are
    the last steps, oldest first. `width_limit`: streams that may decode together now. `kept_tokens`: prompt tokens that
    requests to come may take over. `fault`: why nothing is answered any more, if the worker broke down.
    """

    at_s: float
    uptime_s: float
    draining: bool
    streams: int
    width_limit: int
    max_queue: int
    queue: Sequence[RequestState]
    running: Sequence[RequestState]
    totals: Totals
    ledger: Mapping[str, Mapping[str, Any]]
    recent: Sequence[StepState]
    decode_tok_per_s: float | None  # of all streams together, in the last few seconds; None: nothing was decoded
    kept_tokens: int
    slots: int
    slot_bytes: int
    slots_resident: int
    budget_bytes: int | None
    rss_bytes: int
    page_cache_bytes: int | None
    experts: ExpertsState | None
    fault: str | None = None


# ---- who answers


class Service(Protocol):
    """What answers jobs, used from any thread; sluice.server.worker.Worker does it with an engine.

    `on_event` is called in the worker's thread, in order, and must return at once: all streams wait for it. If it
    raises, its job is cancelled and hears no more.
    """

    def submit(self, job: Job, on_event: Callable[[Event], None]) -> int:
        """Queue a job; its ticket. Raises Busy, Draining, ContextError (the prompt is too long), or InputError."""
        ...

    def submit_all(self, jobs: Sequence[Job], on_event: Callable[[int, Event], None]) -> list[int]:
        """Queue all of `jobs`, or none; `on_event` is told which job by its index. Raises as `submit` does."""
        ...

    @property
    def fault(self) -> str | None:
        """Why nothing is answered any more, if the worker broke down."""
        ...

    def cancel(self, ticket: int) -> None:
        """The job leaves at the next step, also in mid-prefill: Failed(Cancelled), if it had not ended."""
        ...

    def state(self, patience_s: float = 1.0) -> ServiceState:
        """A snapshot taken between steps: a fresh one if a step ends within `patience_s`, else the latest there is."""
        ...

    def close(self, drain_s: float | None = 0) -> None:
        """Take nothing new, finish what there is within `drain_s` (None: however long), fail the rest, end the worker.

        Returns when all of that is done. May be called again, from any other thread too, with less patience.
        """
        ...
