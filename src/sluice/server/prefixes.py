"""Decides which stream a new prompt gets and which kept tokens it begins with. Pure: knows token ids, no engine.

Keys and values are only good for another prompt bit for bit if they were made by whole chunks from the first token on:
what a stream has `reusable`, always whole chunks. At least one token is left to feed, whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """A stream's tokens, of which the first `reusable` may be taken over. `busy`: a request has it. Idle streams were
    last used at `used`, any count that grows."""

    tokens: Sequence[int]
    reusable: int
    busy: bool
    used: int


class Place(NamedTuple):
    """A prompt goes to stream `at` and begins with `n` tokens: of its own if `source` is `at`, else of `source`."""

    at: int
    source: int
    n: int


def shared(prompt: Sequence[int], held: Held, chunk: int) -> int:
    """How many tokens `prompt` can take over from `held`: whole chunks, fewer than it has. Both hold lists."""
    most = min(held.reusable, (len(prompt) - 1) // chunk * chunk)
    n = 0
    while n < most and held.tokens[n : n + chunk] == prompt[n : n + chunk]:
        n += chunk
    return n


def best(prompt: Sequence[int], held: Sequence[Held], chunk: int) -> tuple[int, int]:
    """The stream with most to take over, and how much; idle ones first, of those the one that loses least by it."""
    found = [(shared(prompt, one, chunk), not one.busy, -one.reusable, -i) for i, one in enumerate(held)]
    n, _, _, i = max(found)
    return -i, n


def place(prompt: Sequence[int], held: Sequence[Held], chunk: int) -> Place:
    """Where `prompt` goes; some stream must be idle.

    A stream whose kept tokens all continue in `prompt` is taken as it is, as in the next turn of a chat. Otherwise they
    are copied to the idle stream that is missed least (one without any first, then the least recently used), and what
    they are copied from stays.
    """
    source, n = best(prompt, held, chunk)
    idle = [i for i, one in enumerate(held) if not one.busy]
    if n and not held[source].busy and n == held[source].reusable:
        return Place(source, source, n)
    at = min(idle, key=lambda i: (held[i].reusable > 0, i == source and n > 0, held[i].used, i))
    return Place(at, source if n else at, n)
