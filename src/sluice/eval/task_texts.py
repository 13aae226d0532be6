"""What two modes' predictions are compared on, beside their scores: a task's items as tokens. Knows no task, no engine.

Of each item there is what was asked and the right answer, or, of answers that are written, what the reference wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sluice.eval.task_run import Item

Encode = Callable[[str], list[int]]


def texts_of(items: Sequence[Item], encode: Encode, *, most: int, longest: int) -> dict[str, list[int]]:
    """Tokens of items evenly from all of them, at most `most` together, each at most its last `longest`.

    `encode` adds no BOS. Items of fewer than two tokens are left out, as nothing predicts the first.
    """
    found: dict[str, list[int]] = {}
    left = most
    for item in _evenly(items):
        ids = encode(item.context + item.reference)[-longest:]
        if len(ids) < 2:
            continue
        if len(ids) > left:
            break
        found[str(item.id)] = ids
        left -= len(ids)
    return found


def _evenly(items: Sequence[Item]) -> list[Item]:
    """`items` in an order of which every beginning is spread over all of them: by their places' bits, reversed."""
    bits = max(1, (len(items) - 1).bit_length())
    places = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [items[place] for place in places if place < len(items)]
