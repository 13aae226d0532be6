"""What is left of an adapter's effect on predictions when it was merged: three engines on the same tokens, in turn.

Of every scored token there are the log-probabilities p of the model alone, u with the adapter beside it, m with the
adapter merged. The share that survives is <m - p, u - p> / <u - p, u - p>, summed over tokens, the inner product of two
changes being their covariance under the model's own probabilities: the share of the adapter's change that the merged
model makes, by least squares, where a token's log-probability counts as much as the token is likely. (Half of
<u - p, u - p> is KL(p || u) for small changes, so this is the share of effect in the metric of that divergence.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sluice.errors import SluiceError
from sluice.eval.divergence import Recorded
from sluice.eval.windows import Progress, Row, Score, each_scored, log_softmax

if TYPE_CHECKING:
    from sluice.engine import Engine


@dataclass
class Effect:
    """Sums over `tokens`; the divergences in nats."""

    tokens: int = 0
    along: float = 0.0  # <m - p, u - p>
    square: float = 0.0  # <u - p, u - p>
    kl_unmerged: float = 0.0  # KL(p || u)
    kl_merged: float = 0.0  # KL(p || m)
    kl_apart: float = 0.0  # KL(u || m)

    def add(self, alone: Row, unmerged: Row, merged: Row) -> None:
        """One token's log-probabilities [n_vocab]."""
        p, u, m = np.exp(alone), unmerged - alone, merged - alone
        mean_u, mean_m = float(p @ u), float(p @ m)
        self.tokens += 1
        self.along += float(p @ (u * m)) - mean_u * mean_m
        self.square += float(p @ (u * u)) - mean_u * mean_u
        self.kl_unmerged -= mean_u
        self.kl_merged -= mean_m
        self.kl_apart += float(np.exp(unmerged) @ (unmerged - merged))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: means over tokens. The share is None where the adapter changes nothing."""
        kl = {"unmerged": self.kl_unmerged, "merged": self.kl_merged, "unmerged_to_merged": self.kl_apart}
        return {
            "tokens": self.tokens,
            "share": self.along / self.square if self.square > 0 else None,
            "kl": {name: max(0.0, value) / self.tokens for name, value in kl.items()},
        }


def merged_effect(engine: Engine, alone: Recorded, unmerged: Recorded, progress: Progress | None = None) -> Effect:
    """How `engine`, which has the adapter merged, stands to the recorded predictions of the model alone and with the
    adapter beside it. Raises SluiceError where those end too early."""
    effect, n_bytes = Effect(), engine.spec.n_vocab * 4
    for recorded in (alone, unmerged):
        recorded.file.seek(0)

    def use(name: str) -> Score:
        def score(token: int, logits: Row) -> None:
            effect.add(log_softmax(_next(alone, n_bytes)), log_softmax(_next(unmerged, n_bytes)), log_softmax(logits))

        return score

    each_scored(engine, alone.texts, use, lead=alone.lead, progress=progress)
    return effect


def _next(recorded: Recorded, n_bytes: int) -> Row:
    raw = recorded.file.read(n_bytes)
    if len(raw) < n_bytes:
        raise SluiceError("recorded logits in a temporary file end too early: run it again")
    return np.frombuffer(raw, np.float32)
