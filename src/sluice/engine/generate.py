"""Turns prompts into tokens: prefill, sample, decode in lockstep, stop. Knows no chat format and no printing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sluice.text.detokenize import StreamDecoder
from sluice.text.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from sluice.engine.engine import Engine
    from sluice.engine.session import Session


class Token(NamedTuple):
    """A generated token: its id, and the text that became safe to show with it (maybe none yet)."""

    id: int
    text: str


class Generation:
    """One request: an iterator of Tokens, with what it took beside them.

    `finish_reason` is "stop" (end of text, or a stop string) or "length" (max_tokens, or a full context), None while it
    runs. `ttft_s`: from the start of prefill to the first token. `intervals_s`: between tokens after that. The token
    that ends the text isn't yielded.
    """

    def __init__(
        self, session: Session, prompt: Sequence[int], params: SamplingParams, *,
        max_tokens: int = 256, stop: Sequence[str] = (), ignore_eos: bool = False,
    ) -> None:  # fmt: skip
        self.session = session
        self.engine: Engine = session.engine
        self.prompt = list(prompt)
        self.max_tokens = max_tokens
        self.ignore_eos = ignore_eos
        self.sampler = Sampler(params)
        self.decoder = StreamDecoder(self.engine.tokenizer, stop)
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish_reason: str | None = None
        self.ttft_s: float | None = None
        self.intervals_s: list[float] = []
        self._began = self._last = 0.0

    @property
    def seed(self) -> int:
        return self.sampler.seed

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self) -> bool:
        """Check the prompt and start the clock; False when nothing is to be generated."""
        self._last = self._began = perf_counter()
        self.session.check_room(self.prompt)
        if self.max_tokens < 1:
            self.finish_reason = "length"
        return self.max_tokens > 0

    def take(self, logits: np.ndarray) -> Token | None:
        """Sample from `logits` [n_vocab]; None when that ends the text without a token to show."""
        id = self.pick(logits)
        now = perf_counter()
        if self.ttft_s is None:
            self.ttft_s = now - self._began
        else:
            self.intervals_s.append(now - self._last)
        self._last = now
        return self.accept(id)

    def pick(self, logits: np.ndarray) -> int:
        """The next token's id, sampled from `logits` [n_vocab], which the caller may have adjusted. Draws once."""
        # some files pad the head beyond the tokens there are
        return self.sampler.sample(logits[: self.engine.tokenizer.n_vocab], self.session.tokens)

    def accept(self, id: int, *, last: bool = False) -> Token | None:
        """Go on with `id`, after which nothing follows if `last`. Returns as `take` does, which adds the timing."""
        if id in self.engine.tokenizer.eos_ids and not self.ignore_eos:
            return self._end("stop", None)
        self.tokens.append(id)
        text = self.decoder.push(id)
        if self.decoder.stopped or last:
            return self._end("stop", Token(id, text))
        # the token after the last that fits could be sampled, but its own successor could not
        if len(self.tokens) >= self.max_tokens or self.session.n_left < 1:
            return self._end("length", Token(id, text))
        self.pieces.append(text)
        return Token(id, text)

    def _end(self, reason: str, token: Token | None) -> Token | None:
        self.finish_reason = reason
        rest = "" if self.decoder.stopped else self.decoder.finish()
        if token is not None:
            token = Token(token.id, token.text + rest)
            rest = token.text
        elif rest and self.tokens:
            token = Token(self.tokens[-1], rest)  # text held back with the last token: shown now
        self.pieces.append(rest)
        return token

    def __iter__(self) -> Iterator[Token]:
        for _, token in run([self]):
            yield token


def run(generations: Sequence[Generation]) -> Iterator[tuple[int, Token]]:
    """Prefill all, then decode those unfinished together, one token a step: (index, token) as they come.

    All belong to one engine. Company changes no token.
    """
    if not generations:
        return
    engine = generations[0].engine
    started = [i for i, g in enumerate(generations) if g.begin()]
    for at, logits in engine.prefill_many([(generations[i].session, generations[i].prompt) for i in started]):
        token = generations[started[at]].take(logits)
        if token is not None:
            yield started[at], token
    live = [i for i, g in enumerate(generations) if g.finish_reason is None]
    while live:
        going = [generations[i] for i in live]
        logits = engine.decode([g.session for g in going], [g.tokens[-1] for g in going])
        for row, i in enumerate(live):
            token = generations[i].take(logits[row])
            if token is not None:
                yield i, token
        live = [i for i in live if generations[i].finish_reason is None]
