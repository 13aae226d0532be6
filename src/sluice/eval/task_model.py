"""An open engine as lm-eval's model: log-likelihoods of continuations, and texts that are generated. Knows no task.

A context is fed as a prompt, once for all of its continuations, and a continuation one token a step, as if it had been
generated: so modes that change decode steps alone (rerouting, prerouted routes) are measured as they are served.
Contexts share the engine's steps, as many as it has streams; company changes no bit of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from lm_eval.api.model import TemplateLM

from sluice.engine.generate import Generation
from sluice.errors import InputError
from sluice.eval.windows import each_scored, lead_of, log_softmax
from sluice.text.chat import render_chat
from sluice.text.sampling import SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from sluice.engine import Engine, Session

Progress = Callable[[float, float], None]  # (requests done, of all)
Likelihood = tuple[float, bool]  # log-probability in nats, and whether every token is the likeliest
DEFAULT_TOKENS = 256  # of an answer, where a task does not say: lm-eval's
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "sample_top_k", "min_p": "min_p"}


class _Work(Protocol):
    """What one stream does: its prompt is fed, and then one token a step until there is no `next`."""

    prompt: tuple[int, ...]
    next: int | None

    def open(self, session: Session) -> None:
        """Before the prompt is fed."""

    def begin(self, session: Session, logits: np.ndarray) -> None:
        """`logits` [n_vocab] are those after the prompt."""

    def take(self, session: Session, logits: np.ndarray) -> None:
        """`logits` [n_vocab] are those after `next`."""


_W = TypeVar("_W", bound=_Work)


class _Scored:
    """A context and the continuations to score after it; `found` has (index, likelihood) of those that are done."""

    def __init__(self, context: tuple[int, ...], members: list[tuple[int, list[int]]]) -> None:
        self.prompt = context
        self.next: int | None = None
        self.found: list[tuple[int, Likelihood]] = []
        self._left = deque(members)
        self._first = np.empty(0)  # log-probabilities after the context
        self._at = 0
        self._total = 0.0
        self._likeliest = True

    def open(self, session: Session) -> None:
        pass

    def begin(self, session: Session, logits: np.ndarray) -> None:
        self._first = log_softmax(logits)
        self._continue(session)

    def take(self, session: Session, logits: np.ndarray) -> None:
        self._score(log_softmax(logits))
        if self.next is None:
            session.rewind(len(self.prompt))
            self._continue(session)

    def _continue(self, session: Session) -> None:
        """Begin with what is left; the first token of each needs no step."""
        while self.next is None and self._left:
            self._at, self._total, self._likeliest = 0, 0.0, True
            self._score(self._first)

    def _score(self, row: np.ndarray) -> None:
        """The next token of the first continuation that is left, by log-probabilities [n_vocab]."""
        i, tokens = self._left[0]
        token = tokens[self._at]
        self._total += float(row[token])
        self._likeliest &= int(row.argmax()) == token
        self._at += 1
        self.next = token
        if self._at == len(tokens):
            self.found.append((i, (self._total, self._likeliest)))
            self._left.popleft()
            self.next = None


class _Written:
    """A text to generate."""

    def __init__(
        self, index: int, prompt: tuple[int, ...], params: SamplingParams, stop: Sequence[str], n: int
    ) -> None:  # fmt: skip
        self.index = index
        self.prompt = prompt
        self.next: int | None = None
        self.text = ""
        self._make = lambda session: Generation(session, prompt, params, max_tokens=n, stop=stop)
        self._generation: Generation | None = None

    def open(self, session: Session) -> None:
        self._generation = self._make(session)
        self._generation.begin()

    def begin(self, session: Session, logits: np.ndarray) -> None:
        self.take(session, logits)

    def take(self, session: Session, logits: np.ndarray) -> None:
        generation = self._generation
        assert generation is not None
        generation.take(logits)
        self.next = None if generation.finish_reason is not None else generation.tokens[-1]
        self.text = generation.text


class EngineLM(TemplateLM):
    """lm-eval's requests, answered by `engine`. `truncated` counts contexts whose beginning did not fit.

    With `chat`, contexts come through the model's chat template, and control tokens in them count. `progress` is called
    between steps and may raise.
    """

    def __init__(self, engine: Engine, *, chat: bool = False, progress: Progress = lambda done, total: None) -> None:
        super().__init__()
        self.engine = engine
        self.chat = chat
        self.progress = progress
        self.truncated = 0
        self._done = self._of = 0

    # --- text and tokens

    @property
    def eot_token_id(self) -> int:
        return min(self.engine.tokenizer.eos_ids, default=0)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        bos = self.engine.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.engine.file.paths[0].name)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        # a chat template writes the start token itself
        bos = False if self.chat or add_special_tokens is False else None
        return self.engine.tokenizer.encode(string, special=self.chat, bos=bos)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.engine.tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        tokenizer = self.engine.tokenizer
        if tokenizer.chat_template is None:
            raise InputError("the model has no chat template: leave out --chat")
        return render_chat(
            tokenizer.chat_template, chat_history, add_generation_prompt=add_generation_prompt,
            bos_token=self._text_of("bos"), eos_token=self._text_of("eos"),
        )  # fmt: skip

    def _text_of(self, name: str) -> str:
        id = self.engine.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        tokenizer = self.engine.tokenizer
        if not isinstance(id, int) or not 0 <= id < tokenizer.n_vocab:
            return ""
        return tokenizer.token_bytes(id).decode(errors="replace")

    # --- requests

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Likelihood]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[Likelihood]:
        groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if not continuation:
                raise InputError("an answer has no tokens of its own: check the task's choices and delimiter")
            kept = self._fitting(context, len(continuation) - 1)  # the last token is scored, not fed
            groups.setdefault(kept, []).append((i, continuation))
        found: list[Likelihood] = [(0.0, False)] * len(requests)
        self._done, self._of = 0, len(requests)
        works = [_Scored(context, members) for context, members in groups.items()]
        works.sort(key=lambda work: -len(work.prompt))  # so that the last streams to end are short
        for work in self._together(works):
            for i, likelihood in work.found:
                found[i] = likelihood
            self._done += len(work.found)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-probabilities of whole texts, in windows as `sluice eval ppl` has them."""
        totals: list[float] = []
        for request in requests:
            ids = self.engine.tokenizer.encode(request.args[0], bos=False)
            total = 0.0

            def score(token: int, logits: np.ndarray) -> None:
                nonlocal total
                total += float(log_softmax(logits)[token])

            each_scored(self.engine, {"": ids}, lambda name, score=score: score, lead=[self.prefix_token_id])
            totals.append(total)
            self.progress(len(totals), len(requests))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        found = [""] * len(requests)
        works = []
        for i, request in enumerate(requests):
            context, given = _pair(request)
            params, stop, n = _generation(given, seed=i)
            n = min(n, self.engine.n_ctx - 1)
            prompt = self._fitting(self.tok_encode(context), n) or (self.prefix_token_id,)
            works.append(_Written(i, prompt, params, stop, n))
        works.sort(key=lambda work: -len(work.prompt))
        self._done, self._of = 0, len(requests)
        for work in self._together(works):
            found[work.index] = work.text
            self._done += 1
        return found

    def _fitting(self, context: Sequence[int], n_after: int) -> tuple[int, ...]:
        """The end of `context` that leaves room for `n_after` tokens. A BOS at its beginning stays."""
        room = self.engine.n_ctx - n_after
        if len(context) <= room:
            return tuple(context)
        self.truncated += 1
        lead = lead_of(self.engine) if tuple(context[:1]) == lead_of(self.engine) else ()
        if room < len(lead) + 1:
            raise InputError(f"an answer of {n_after + 1} tokens leaves no room for its question: raise --ctx")
        return (*lead, *context[len(context) - room + len(lead) :])

    def _together(self, works: Sequence[_W]) -> Iterator[_W]:
        """Carry out `works`, as many at a time as there are streams; yields each as it ends."""
        engine, waiting = self.engine, deque(works)
        live: list[tuple[Session, _W]] = []
        try:
            while waiting or live:
                self.progress(self._done, self._of)
                began = len(live)
                while waiting and len(live) < engine.config.streams:
                    live.append((engine.session(), waiting.popleft()))
                for session, work in live[began:]:
                    work.open(session)
                prompts = [(session, work.prompt) for session, work in live[began:]]
                for i, logits in engine.prefill_many(prompts):
                    session, work = live[began + i]
                    work.begin(session, logits)
                going = [(session, work) for session, work in live if work.next is not None]
                for session, work in live:
                    if work.next is None:
                        session.close()
                        yield work
                live = going
                if not live:
                    continue
                rows = engine.decode([session for session, _ in live], [work.next for _, work in live])  # type: ignore
                for (session, work), logits in zip(live, rows, strict=True):
                    work.take(session, logits)
        finally:
            for session, _ in live:
                session.close()


def _pair(request: Instance) -> tuple[str, Mapping[str, Any]]:
    """A request's context and generation arguments."""
    arguments: Any = request.args
    return arguments[0], arguments[1]


def _generation(given: Mapping[str, Any], *, seed: int) -> tuple[SamplingParams, tuple[str, ...], int]:
    """Sampling, stop strings and most tokens, of lm-eval's generation arguments. Raises InputError for unknown ones.

    Without sampling the likeliest token is taken. The seed is the request's place: the same in every mode.
    """
    left = dict(given)
    until = left.pop("until", ())
    n = left.pop("max_gen_toks", None) or left.pop("max_tokens", None) or DEFAULT_TOKENS
    sampled = left.pop("do_sample", None)
    params = {ours: left.pop(theirs) for theirs, ours in _SAMPLING.items() if theirs in left}
    if left:
        raise InputError(f"generation_kwargs: {min(left)} is not served: choose from until, max_gen_toks, do_sample, "
                         f"{', '.join(_SAMPLING)}")  # fmt: skip
    if sampled is False or "temperature" not in params:
        params["temperature"] = 0.0
    stop = (until,) if isinstance(until, str) else tuple(until or ())
    return SamplingParams(**{"top_p": 1.0, **params}, seed=seed), tuple(text for text in stop if text), int(n)
