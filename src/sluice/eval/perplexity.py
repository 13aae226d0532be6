"""Perplexity of texts under an open engine, text by text. It knows tokens, not where they come from.

Perplexity is exp of the mean of −ln p(token | the tokens before it), over the tokens that are scored (which those are,
and after what: `sluice.eval.windows`). Log-probabilities are taken in float64 from the engine's float32 logits, one row
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice.errors import ModelFileError
from sluice.eval.windows import Progress, Row, Score, each_scored, log_softmax

if TYPE_CHECKING:
    from sluice.engine import Engine

_LARGEST = 700.0  # nats a token; exp of more is no float64, and no model that works comes near


@dataclass
class Tally:
    """What scoring some tokens has come to: how many, and the sums of their losses −ln p and of their squares."""

    tokens: int = 0
    loss: float = 0.0
    squares: float = 0.0

    def add(self, logprob: float) -> None:
        """One more token."""
        self.tokens += 1
        self.loss -= logprob
        self.squares += logprob * logprob

    @property
    def ppl(self) -> float:
        """Raises ModelFileError where it is too large for a number."""
        mean = self.loss / self.tokens
        if mean > _LARGEST:
            raise ModelFileError(
                f"the model's loss is {mean:.0f} nats a token: its weights are damaged, get the file again"
            )
        return math.exp(mean)

    @property
    def ppl_error(self) -> float | None:
        """One standard error of `ppl`, as if tokens were independent; None of a single token."""
        if self.tokens < 2:
            return None
        mean = self.loss / self.tokens
        variance = max(0.0, self.squares / self.tokens - mean * mean)
        return self.ppl * math.sqrt(variance / (self.tokens - 1))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"ppl": self.ppl, "ppl_error": self.ppl_error, "tokens": self.tokens}


def pooled(tallies: Iterable[Tally]) -> Tally:
    """All tokens of several tallies as one."""
    total = Tally()
    for one in tallies:
        total.tokens += one.tokens
        total.loss += one.loss
        total.squares += one.squares
    return total


def perplexity(
    engine: Engine, texts: Mapping[str, Sequence[int]], progress: Progress | None = None
) -> dict[str, Tally]:
    """The tally of each text, given as tokens without a BOS. Raises InputError for one too short to be scored.

    Raises ModelFileError where the model computes what is no number. `progress` gets (tokens scored, of all).
    """
    tallies: dict[str, Tally] = {}

    def use(name: str) -> Score:
        tally = tallies[name] = Tally()

        def score(token: int, logits: Row) -> None:
            tally.add(float(log_softmax(logits)[token]))

        return score

    each_scored(engine, texts, use, progress=progress)
    return tallies
