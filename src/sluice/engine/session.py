"""One conversation's place in an engine: its stream, and the tokens whose keys and values are kept. Knows no text."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from sluice.errors import ContextError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice.engine.engine import Engine


class Session:
    """A stream of an engine; a context manager that gives the stream back, as the last reference to it does.

    `tokens` are those that have been fed, `number` is this session's alone as long as the engine lives. Feeding is
    deterministic in what was fed how: a prompt's chunks end at absolute multiples of the chunk size. A model with
    recurrent layers can't go on after a step that failed half way: the session is then `broken` until it is rewound.
    """

    def __init__(self, engine: Engine, stream: int, number: int = 0) -> None:
        self.engine = engine
        self.stream = stream
        self.number = number
        self.tokens: list[int] = []
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

    def rewind(self, n: int) -> None:
        """Forget all but the first `n` tokens. Raises InputError for a negative `n`.

        What recurrent layers remember can't be taken back: with them, the tokens kept are fed again as a prompt.
        """
        if n < 0:
            raise InputError(f"can't keep {n} tokens: give 0 or more")
        if not self.engine.spec.recurrent:
            del self.tokens[n:]
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
