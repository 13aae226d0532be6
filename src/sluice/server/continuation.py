"""One job under way in a session: from a step's logits to the events its submitter hears. Knows no threads, no company.

Bias, then the constraint's mask, are put on a copy of the logits before penalties and temperature; log-probabilities
are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sluice.engine import Generation, Session
from sluice.errors import InputError
from sluice.server.jobs import Job, PromptLogprobs, TokenEvent
from sluice.text.sampling import likeliest, log_probabilities

Top = tuple[tuple[int, float], ...]


class Continuation:
    """`job` in `session`, whose tokens are the beginning of its prompt that it took over (none with `echo_logprobs`).

    Making one makes the job's TokenMask, and raises what that does.
    """

    def __init__(self, job: Job, session: Session) -> None:
        self.job = job
        self.session = session
        self.max_tokens = session.engine.n_ctx if job.max_tokens is None else job.max_tokens
        self.generation = Generation(
            session, job.prompt, job.params, max_tokens=self.max_tokens, stop=job.stop, ignore_eos=job.ignore_eos
        )
        self.mask = None if job.constraint is None else job.constraint()
        self._bias_ids = np.fromiter(job.logit_bias.keys(), np.int64)
        self._biases = np.fromiter(job.logit_bias.values(), np.float32)

    @property
    def finish_reason(self) -> str | None:
        """None until the answer is complete."""
        return self.generation.finish_reason

    @property
    def last_id(self) -> int:
        """The token to decode next."""
        return self.generation.tokens[-1]

    def end(self) -> None:
        """Nothing is to be generated."""
        self.generation.finish_reason = "length"

    def take(self, logits: np.ndarray) -> list[TokenEvent]:
        """Choose the next token by `logits` [n_vocab], left as they are: what is to be told of it, maybe nothing.

        Raises InputError where the constraint allows nothing, ModelFileError for NaN, and what the constraint raises.
        """
        generation, own = self.generation, logits[: self.session.engine.tokenizer.n_vocab]
        id = generation.pick(self._adjusted(own))
        ended = False
        if self.mask is not None:
            self.mask.accept(id)
            ended = self.mask.ended
        before = len(generation.tokens)
        token = generation.accept(id, last=ended)
        if token is None:
            return []
        if len(generation.tokens) == before:  # the end of text, with what had been held back
            return [TokenEvent(None, token.text)]
        logprob, top = None, ()
        if self.job.top_logprobs is not None:
            logprob, top = _figures(log_probabilities(own), id, self.job.top_logprobs)
        return [TokenEvent(id, token.text, logprob, top)]

    def _adjusted(self, logits: np.ndarray) -> np.ndarray:
        if not self._bias_ids.size and self.mask is None:
            return logits
        adjusted = logits.copy()
        adjusted[self._bias_ids] += self._biases
        if self.mask is not None:
            self.mask.allow(adjusted)
            if adjusted.max() == -np.inf and logits.max() > -np.inf:
                raise InputError("the structure asked for lets no token follow: ask for another, or without it")
        return adjusted

    def feed_for_logprobs(self) -> Iterator[int | tuple[PromptLogprobs, np.ndarray]]:
        """Feed the prompt a step at a time, yielding how many tokens are fed by then; at last, without another step,
        the prompt's log-probabilities, and the logits [n_vocab] after its last token."""
        prompt, n_top = self.generation.prompt, self.job.top_logprobs or 0
        n_vocab, engine = self.session.engine.tokenizer.n_vocab, self.session.engine
        logprobs: list[float | None] = [None]
        tops: list[Top] = [()]
        last = np.empty(0, np.float32)

        def use(first: int, rows: np.ndarray) -> None:
            nonlocal last
            for i, row in enumerate(rows, first + 1):
                if i == len(prompt):
                    last = row.copy()
                    return
                logprob, top = _figures(log_probabilities(row[:n_vocab]), prompt[i], n_top)
                logprobs.append(logprob)
                tops.append(top)

        yield from engine.prefill_rows(self.session, prompt, use)
        yield PromptLogprobs(tuple(logprobs), tuple(tops)), last


def _figures(logprobs: np.ndarray, id: int, n_top: int) -> tuple[float, Top]:
    """Of `logprobs` [n_vocab]: that of `id` (which a file may pad beyond its tokens), and the `n_top` highest."""
    top = tuple((int(i), float(logprobs[i])) for i in likeliest(logprobs, n_top)) if n_top else ()
    return float(logprobs[id]) if id < logprobs.size else -np.inf, top
