"""Log-probabilities of an answer's tokens, packed until they are told. Knows neither texts nor shapes of answers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence

Figure = tuple[int, float | None, list[tuple[int, float]]]


class Figures:
    """Of each token its id, its log-probability in nats (None: it has none), and those likeliest in its place.

    One takes 12 bytes here; as Python's objects, or in JSON, it takes ten to thirty times as much.
    """

    def __init__(self) -> None:
        self._ids = array("i")
        self._values = array("d")
        self._ends = array("q")  # of each token's stretch of the above

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, id: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> None:
        """The next token."""
        self._ids.append(id)
        self._values.append(math.nan if logprob is None else logprob)
        self._ids.extend(other for other, _ in top)
        self._values.extend(value for _, value in top)
        self._ends.append(len(self._ids))

    def __iter__(self) -> Iterator[Figure]:
        start = 0
        for end in self._ends:
            value = self._values[start]
            top = list(zip(self._ids[start + 1 : end], self._values[start + 1 : end], strict=True))
            yield self._ids[start], None if math.isnan(value) else value, top
            start = end

    def clear(self) -> None:
        """Forget all of them: they have been told."""
        del self._ids[:], self._values[:], self._ends[:]
