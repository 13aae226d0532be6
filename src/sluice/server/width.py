"""How many streams may decode together so that a step keeps to a time, as measured so far. Knows numbers only."""

from __future__ import annotations

from typing import NamedTuple

MEMORY = 1 - 1 / 128  # weight that a step's measurement keeps with each later one
BASE = 0.5  # of a step's time, taken not to depend on its width as long as nothing else is known
PULL = 0.25  # how much that counts, in steps: decides where the width has hardly varied
GROWTH = 2  # the limit goes at most so far past the widest step that the measurements remember


class Fit(NamedTuple):
    """Seconds of a step = `base_s` + width × `each_s`."""

    base_s: float
    each_s: float


class WidthLimit:
    """A limit from 1 to `most` on the width of decode steps, so that they take `max_step_s`; None: always `most`.

    A line is fitted to the steps taken, later ones counting more, by least squares, with a pull towards a base of half
    the mean time: as long as steps have had one width, nothing says how much a stream more will cost, and only trying
    does. Reading makes the true curve bend down (the wider the batch, the fewer of its experts are new), so past the
    widths that were measured the line errs on the side of too few streams.
    """

    def __init__(self, most: int, max_step_s: float | None = None) -> None:
        assert most > 0 and (max_step_s is None or max_step_s > 0)
        self.most = most
        self.max_step_s = max_step_s
        self.least = most if max_step_s is None else 1  # that the limit ever is
        self.limit = self.least
        self._n = self._w = self._ww = self._t = self._wt = 0.0  # decayed sums of 1, width, width², seconds, width × s
        self._widest = 0.0

    def took(self, width: int, seconds: float) -> None:
        """A decode step of `width` streams took `seconds`."""
        if self.max_step_s is None:
            return
        sums = (1.0, width, width * width, seconds, width * seconds)
        kept = (self._n, self._w, self._ww, self._t, self._wt)
        self._n, self._w, self._ww, self._t, self._wt = (MEMORY * k + s for k, s in zip(kept, sums, strict=True))
        self._widest = max(float(width), MEMORY * self._widest)
        base_s, each_s = self.fit
        room = self.max_step_s - base_s
        fits = self.most if room >= each_s * self.most else max(1, int(room / each_s)) if room > 0 else 1
        self.limit = min(self.most, fits, max(1, int(GROWTH * self._widest)))

    @property
    def fit(self) -> Fit:
        """The line as it is now; all zero before the first step."""
        if not self._n:
            return Fit(0.0, 0.0)
        # minimise Σ (t - a - b w)² + PULL (a - BASE mean t)²: the normal equations of a and b
        prior = BASE * self._t / self._n
        n, t = self._n + PULL, self._t + PULL * prior
        det = n * self._ww - self._w * self._w
        base = (t * self._ww - self._w * self._wt) / det
        each = (n * self._wt - self._w * t) / det
        if each <= 0:  # noise: steps seen so far took no longer for being wider
            return Fit(prior, (1 - BASE) * self._t / self._w)
        return Fit(base, each) if base >= 0 else Fit(0.0, self._wt / self._ww)
