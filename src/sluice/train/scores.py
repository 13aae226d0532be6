"""Sums of what next-token predictions cost: losses, and divergences from a teacher's. Knows logits and no model.

Losses and divergences are in nats a token. Log-probabilities are taken in float64, as `sluice eval` takes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LARGEST = 700.0  # nats a token; exp of more is no float64
_ROWS = 256  # of logits taken to float64 at once


@dataclass
class Tally:
    """Tokens scored, and sums over them; the teacher's part stays 0 where nothing was compared."""

    tokens: int = 0
    loss: float = 0.0  # of the model
    squares: float = 0.0  # of losses
    compared: int = 0
    teacher_loss: float = 0.0
    forward: float = 0.0  # KL(teacher ‖ model)
    reverse: float = 0.0  # KL(model ‖ teacher)
    same_top: int = 0  # tokens of which both hold the same one for the likeliest

    def add(self, logits: Tensor, targets: Tensor, teacher: Tensor | None = None) -> None:
        """`logits` [n, V] foretell `targets` [n]; `teacher` [n, V] are the teacher's."""
        for at in range(0, len(targets), _ROWS):
            part = slice(at, at + _ROWS)
            self._add(logits[part], targets[part], None if teacher is None else teacher[part])

    def _add(self, logits: Tensor, targets: Tensor, teacher: Tensor | None) -> None:
        log_q = torch.log_softmax(logits.double(), -1)
        losses = -log_q.gather(1, targets[:, None])[:, 0]
        self.tokens += len(targets)
        self.loss += float(losses.sum())
        self.squares += float(losses.square().sum())
        if teacher is None:
            return
        log_p = torch.log_softmax(teacher.double(), -1)
        self.compared += len(targets)
        self.teacher_loss -= float(log_p.gather(1, targets[:, None]).sum())
        self.forward += float((log_p.exp() * (log_p - log_q)).sum())
        self.reverse += float((log_q.exp() * (log_q - log_p)).sum())
        self.same_top += int((logits.argmax(-1) == teacher.argmax(-1)).sum())

    @property
    def mean(self) -> float | None:
        """The mean loss."""
        return self.loss / self.tokens if self.tokens else None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: perplexity with its standard error, as if tokens were independent, and means."""
        mean = self.mean
        error = None
        if mean is not None and self.tokens > 1:
            variance = max(0.0, self.squares / self.tokens - mean * mean)
            error = perplexity_of(mean) * math.sqrt(variance / (self.tokens - 1))
        found: dict[str, Any] = {
            "tokens": self.tokens,
            "loss": mean,
            "ppl": None if mean is None else perplexity_of(mean),
            "ppl_error": error,
        }
        if n := self.compared:
            found |= {
                "kl": self.forward / n,
                "reverse_kl": self.reverse / n,
                "same_top": self.same_top / n,
                "teacher_ppl": perplexity_of(self.teacher_loss / n),
            }
        return found


def perplexity_of(mean_loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is too large for a number."""
    return math.exp(mean_loss) if mean_loss <= _LARGEST else math.inf


def pooled(tallies: Iterable[Tally]) -> Tally:
    """All tokens of several tallies as one."""
    total = Tally()
    for one in tallies:
        for name, value in vars(one).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def balanced(tallies: Iterable[Tally]) -> dict[str, float | None]:
    """Domains weighted alike: "loss", the mean of their mean losses, "ppl", its exp, "kl" and "reverse_kl" likewise."""
    some = [one for one in tallies if one.tokens]
    if not some:
        return {"loss": None, "ppl": None, "kl": None, "reverse_kl": None}
    loss = sum(one.loss / one.tokens for one in some) / len(some)
    compared = all(one.compared for one in some)
    return {
        "loss": loss,
        "ppl": perplexity_of(loss),
        "kl": sum(one.forward / one.compared for one in some) / len(some) if compared else None,
        "reverse_kl": sum(one.reverse / one.compared for one in some) / len(some) if compared else None,
    }
