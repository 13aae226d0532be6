"""One conversation's place in an engine: its stream, and the tokens whose keys and values are kept. Knows no text."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from sluice.engine.workspace import CHUNK
from sluice.errors import ContextError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice.engine.engine import Engine


class Session:
    """A stream of an engine; a context manager that gives the stream back, as the last reference to it does.

    `tokens` are those that have been fed, `number` is this session's alone as long as the engine lives. Feeding is
    deterministic in what was fed how: a prompt's chunks end at absolute multiples of the chunk size. A model with
    recurrent layers can't go on after a step that failed half way: the session is then `broken` until it is rewound.
    `reusable`: that many of its first tokens were fed as whole chunks, so that what is kept of them is bit for bit what
    any prompt with the same beginning makes.
    """

    def __init__(self, engine: Engine, stream: int, number: int = 0) -> None:
        self.engine = engine
        self.stream = stream
        self.number = number
        self.tokens: list[int] = []
        self.reusable = 0
        self.broken = False
        self._give_back = weakref.finalize(self, engine.free_streams.append, stream)
        self._give_back.atexit = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def n_left(self) -> int:
        """Positions left in the context."""
        return self.engine.n_ctx - len(self.tokens)

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append a prompt; logits [n_vocab] after its last token, valid until the next step. Raises ContextError."""
        self.check_room(ids)
        return self.engine.prefill(self, ids)

    def check_room(self, ids: Sequence[int]) -> None:
        """Raise ContextError unless `ids` are some and fit what is left of the context."""
        if len(ids) == 0:  # numpy arrays too
            raise ContextError("nothing to feed: give at least one token")
        if len(ids) > self.n_left:
            raise ContextError(
                f"{len(ids)} tokens do not fit: {len(self.tokens)} of {self.engine.n_ctx} positions are taken; "
                "raise --ctx"
            )

    def took(self, ids: Sequence[int], *, prompt: bool) -> None:
        """Note that a step has fed `ids`, as a chunk of a prompt or one by one."""
        if prompt and len(ids) == CHUNK and len(self.tokens) == self.reusable and not self.engine.spec.recurrent:
            self.reusable += CHUNK
        self.tokens.extend(ids)

    def copy(self, other: Session, n: int | None = None) -> None:
        """Begin with the first `n` tokens of `other`, by default all; it keeps them, and nothing is computed.

        All of them continue bit for bit as `other` would. Raises InputError if this session has begun, `other` is
        another engine's, or `n` is more than it has `reusable` or cuts a chunk.
        """
        if self.tokens or self.engine is not other.engine or -1 in (self.stream, other.stream) or other.broken:
            raise InputError("a session takes tokens from another open one of its engine before it has any of its own")
        if n is not None and (not 0 <= n <= other.reusable or n % CHUNK):
            raise InputError(f"can't take {n} tokens: {other.reusable} are reusable, in chunks of {CHUNK}")
        kept = other.tokens[:n]
        self.engine.copy_kept(other.stream, self.stream, len(kept))
        self.tokens.extend(kept)
        self.reusable = other.reusable if n is None else n

    def rewind(self, n: int) -> None:
        """Forget all but the first `n` tokens. Raises InputError for a negative `n`.

        What recurrent layers remember can't be taken back: with them, the tokens kept are fed again as a prompt.
        """
        if n < 0:
            raise InputError(f"can't keep {n} tokens: give 0 or more")
        if not self.engine.spec.recurrent:
            del self.tokens[n:]
            self.reusable = min(self.reusable, n // CHUNK * CHUNK)
            return
        if n >= len(self.tokens) and not self.broken:
            return
        kept = self.tokens[:n]
        self.tokens.clear()
        self.broken = False
        if kept:
            self.engine.prefill(self, kept)

    def close(self) -> None:
        """May be called again."""
        self._give_back()
        self.stream = -1
