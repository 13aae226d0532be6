"""Finds faster settings by short real runs: what is tried next, and what counts as faster. It runs nothing itself.

Each knob's values are climbed from where it stands: a neighbour that wins is gone on from, in its direction, so a peak
between two values is found, and more of anything is never assumed to be better. A candidate and the settings so far are
measured in turns, in pairs. It wins if the mean of its pairs' log ratios is above 0 by more than chance makes likely:
one-sided 95 %, Student's t, with the spread pooled over all comparisons, as a few runs say little of their own. After
so many comparisons one may win by luck, so at last the start and the best are compared once more, on new pairs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sluice.errors import InputError

Settings = Mapping[str, Any]
LEAST_GAIN = 0.02  # what is worth another setting than the default
LEAST_SPREAD = 0.01  # of a pair's log ratio: no machine is quieter
CLEARLY_WORSE = -0.10  # in a first pair, which then needs no second
PAIRS, LAST_PAIRS = 4, 3
# Student's t, one-sided 95 %, for 1, 2, … degrees of freedom, and for more than are listed
QUANTILES, NORMAL = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812), 1.75


@dataclass(frozen=True)
class Knob:
    """A setting and the values it may have. `ordered`: neighbours are alike, and are tried; else all are."""

    name: str
    values: tuple[Any, ...]
    ordered: bool = True


@dataclass(frozen=True)
class Sample:
    """One run: the settings, how fast it decoded, how long all of it took, and what it wrote."""

    settings: Settings
    tok_per_s: float
    took_s: float
    tokens: Sequence[int] = ()


@dataclass(frozen=True)
class Comparison:
    """What came of a candidate: log ratios of its pairs, and "faster", "not faster", or why it was dropped."""

    knob: str
    value: Any
    ratios: tuple[float, ...]
    verdict: str

    @property
    def gain(self) -> float | None:
        """How much faster it was, as a share; None if it was never measured."""
        return math.expm1(sum(self.ratios) / len(self.ratios)) if self.ratios else None


@dataclass
class Found:
    """What a search came to. `confirmed`: the best won the last comparison; else `best` is the start, unless the search
    was `stopped` before that. `gain` is the last comparison's, None without one."""

    start: Settings
    best: Settings
    confirmed: bool = False
    gain: float | None = None
    stopped: str | None = None  # what ended it early
    tried: list[Comparison] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


NO_TIME = "the time was up"


class _Other(Exception):
    """A run wrote other tokens than the start's."""


class Stopped(Exception):
    """Raised by `measure` to end a search with what it has so far; the text says why."""


class Search:
    """One search. `measure` runs with settings; `left_s` says how much time is left, in which it tries to end.

    `measure` raises InputError for settings that can't be run, which drops them. A candidate that writes other tokens
    than the start is dropped too.
    """

    def __init__(
        self, start: Settings, knobs: Sequence[Knob], measure: Callable[[Settings], Sample],
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:  # fmt: skip
        self._measure, self._left_s = measure, left_s
        self._knobs = knobs
        self.found = Found(dict(start), dict(start))
        self._tokens: Sequence[int] | None = None
        self._spread: list[tuple[float, int]] = []  # squares around each comparison's mean, and degrees of freedom
        self._beaten: set[str] = set()

    def run(self) -> Found:
        """Search to the end, or until there is no time or no wish. Raises InputError if the start can't be run."""
        found = self.found
        try:
            self._tokens = self._run(found.start).tokens
            moved = True
            while moved:
                moved = False
                for knob in self._knobs:
                    moved |= self._climb(knob)
            self._confirm()
        except Stopped as why:
            found.stopped = str(why)
            if found.stopped == NO_TIME and found.gain is None:  # there is time for the last comparison
                with suppress(Stopped):
                    self._confirm()
        return found

    def gain_so_far(self) -> float:
        """How much faster the best was than the start by the comparisons that it won, as a share."""
        won = [one for one in self.found.tried if one.verdict == "faster"]
        return math.expm1(sum(math.log1p(one.gain or 0.0) for one in won))

    # --- runs

    def _run(self, settings: Settings) -> Sample:
        sample = self._measure(settings)
        self.found.samples.append(sample)
        return sample

    def _check_time(self, pairs: int) -> None:
        """Raise Stopped where `pairs` more pairs, and the last comparison after them, would take too long."""
        longest = max(sample.took_s for sample in self.found.samples)
        if self._left_s() < longest * 2 * (pairs + LAST_PAIRS):
            raise Stopped(NO_TIME)

    # --- comparisons

    def _pairs(self, candidate: Settings, against: Settings, most: int) -> Iterator[float]:
        """Log ratios of pairs of runs, whose order alternates. Raises _Other where the output differs."""
        for i in range(most):
            order = (candidate, against) if i % 2 else (against, candidate)
            speeds = {}
            for settings in order:
                sample = self._run(settings)
                if list(sample.tokens) != list(self._tokens or ()):
                    raise _Other
                speeds[settings is candidate] = sample.tok_per_s
            yield math.log(speeds[True] / speeds[False])

    def _bounds(self, ratios: Sequence[float]) -> tuple[float, float]:
        """Lower and upper bound of the mean of `ratios`."""
        n, mean = len(ratios), sum(ratios) / len(ratios)
        squares = sum(s for s, _ in self._spread) + sum((r - mean) ** 2 for r in ratios)
        freedom = sum(f for _, f in self._spread) + n - 1
        if not freedom:
            return -math.inf, math.inf
        t = QUANTILES[freedom - 1] if freedom <= len(QUANTILES) else NORMAL
        half = t * max(LEAST_SPREAD, math.sqrt(squares / freedom)) / math.sqrt(n)
        return mean - half, mean + half

    def _compare(self, knob: str, value: Any, candidate: Settings) -> bool:
        """Whether `candidate` beats the best so far."""
        ratios: list[float] = []
        verdict = "not faster"
        try:
            for ratio in self._pairs(candidate, self.found.best, PAIRS):
                ratios.append(ratio)
                if len(ratios) == 1 and ratio < CLEARLY_WORSE:
                    break
                lower, upper = self._bounds(ratios)
                if len(ratios) > 1 and lower > 0 and sum(ratios) / len(ratios) >= math.log1p(LEAST_GAIN):
                    verdict = "faster"
                    break
                if len(ratios) > 1 and upper < math.log1p(LEAST_GAIN):
                    break
        except _Other:
            verdict = "dropped: it changed the output"
        except InputError as error:
            verdict = f"dropped: {error}"
        self._note(ratios)
        self.found.tried.append(Comparison(knob, value, tuple(ratios), verdict))
        return verdict == "faster"

    def _note(self, ratios: Sequence[float]) -> None:
        if len(ratios) > 1:
            mean = sum(ratios) / len(ratios)
            self._spread.append((sum((r - mean) ** 2 for r in ratios), len(ratios) - 1))

    def _climb(self, knob: Knob) -> bool:
        """Move one knob as far as it gets better; whether it was moved."""
        start = self.found.best[knob.name]
        if not knob.ordered:
            for value in knob.values:
                if value != self.found.best[knob.name]:
                    self._better(knob, value)
            return self.found.best[knob.name] != start
        begun = knob.values.index(start)
        for way in (-1, +1):
            at = begun
            while 0 <= at + way < len(knob.values) and self._better(knob, knob.values[at + way]):
                at += way
            if at != begun:
                return True  # the other way is where it came from
        return False

    def _better(self, knob: Knob, value: Any) -> bool:
        best, candidate = self.found.best, {**self.found.best, knob.name: value}
        if _key(candidate) in self._beaten:
            return False
        self._check_time(PAIRS)
        won = self._compare(knob.name, value, candidate)
        self._beaten.add(_key(best if won else candidate))
        self.found.best = candidate if won else best
        return won

    def _confirm(self) -> None:
        """The best against the start, on new pairs alone; where it doesn't win, the start is the best."""
        found = self.found
        if found.best == found.start:
            return
        try:
            ratios = list(self._pairs(found.best, found.start, LAST_PAIRS))
        except _Other:
            found.best = found.start
            return
        lower, _ = self._bounds(ratios)
        found.gain = math.expm1(sum(ratios) / len(ratios))
        found.confirmed = lower > 0 and found.gain >= LEAST_GAIN
        if not found.confirmed:
            found.best = found.start


def _key(settings: Settings) -> str:
    return repr(sorted(settings.items(), key=lambda item: item[0]))
