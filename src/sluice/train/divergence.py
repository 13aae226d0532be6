"""Decides when a run has gone wrong, from its losses and loads alone; knows no model and no file."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from sluice.errors import InputError

WINDOW = 100  # steps whose median loss is what is normal
JUMP, JUMP_STEPS = 2.0, 20  # a loss of so many times that, for so long, doesn't come back
EVENNESS, UNEVEN_STEPS = 0.1, 300  # of load, see Objective.loss; a fresh model may need 100 steps to spread its tokens


class DivergedError(InputError):
    """Training has gone wrong; the text names the step, the last good checkpoint and the cause."""


class Watch:
    """Sees every step's figures and says what is wrong with them, or None."""

    def __init__(self, window: int = WINDOW, jump_steps: int = JUMP_STEPS, uneven_steps: int = UNEVEN_STEPS) -> None:
        self._normal: deque[float] = deque(maxlen=window)
        self._jump_steps, self._uneven_steps = jump_steps, uneven_steps
        self._jumped = self._uneven = 0

    def loss(self, loss: float, load_entropy: float | None = None) -> str | None:
        """The cause to stop for, after a loss and the evenness of the least even layer's load."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        usual = median(self._normal) if len(self._normal) == self._normal.maxlen else math.inf
        self._jumped = self._jumped + 1 if 0 < usual < loss / JUMP else 0
        if not self._jumped:
            self._normal.append(loss)
        if self._jumped >= self._jump_steps:
            return f"the loss has been above {JUMP:g} times its median of {usual:.3g} for {self._jumped} steps"
        self._uneven = self._uneven + 1 if load_entropy is not None and load_entropy < EVENNESS else 0
        if self._uneven >= self._uneven_steps:
            return (
                f"the load has collapsed: a layer has sent almost all tokens to the same experts for {self._uneven} "
                "steps; raise the weight of balance, or lower that of locality"
            )
        return None

    def state(self) -> dict[str, Any]:
        return {"normal": list(self._normal), "jumped": self._jumped, "uneven": self._uneven}

    def restore(self, state: dict[str, Any]) -> None:
        self._normal.clear()
        self._normal.extend(state["normal"])
        self._jumped, self._uneven = state["jumped"], state["uneven"]
