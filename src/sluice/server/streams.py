"""An engine's streams, given to prompts and taken back, with what they keep of earlier ones. Knows sessions, no jobs.

A stream stays open when its request has ended: its keys and values serve prompts that begin alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sluice.engine import Engine, Session
from sluice.engine.workspace import CHUNK
from sluice.server.prefixes import Held, best, place


class Streams:
    """All streams of `engine`, by number, until `close`; used by the thread that runs it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions = [engine.session() for _ in range(engine.config.streams)]
        self._used = [0] * len(self._sessions)
        self._busy: set[int] = set()
        self._uses = itertools.count(1)

    def __getitem__(self, at: int) -> Session:
        return self._sessions[at]

    @property
    def kept_tokens(self) -> int:
        """How many tokens, of all streams together, prompts could take over."""
        return sum(session.reusable for session in self._sessions)

    def take(self, prompt: list[int]) -> int:
        """A stream for `prompt`, which holds as much of its beginning as any one did; some stream must be idle."""
        at, source, n = place(prompt, self._held(), CHUNK)
        if source == at and n:
            self._sessions[at].rewind(n)
        else:
            self._sessions[at].close()
            self._sessions[at] = self._engine.session()
            if n:
                self._sessions[at].copy(self._sessions[source], n)
        self._busy.add(at)
        return at

    def give_back(self, at: int) -> None:
        """A request has ended: stream `at` is idle and keeps what it has."""
        self._busy.discard(at)
        self._used[at] = next(self._uses)

    def catch_up(self, at: int, prompt: list[int]) -> bool:
        """Whether another stream has come further in `prompt` than `at`, which has taken that over."""
        source, n = best(prompt, self._held(), CHUNK)
        if n <= len(self._sessions[at].tokens):
            return False
        self._sessions[at].rewind(0)
        self._sessions[at].copy(self._sessions[source], n)
        return True

    def copy(self, at: int, source: int) -> None:
        """Stream `at` takes over all that `source` holds."""
        self._sessions[at].rewind(0)
        self._sessions[at].copy(self._sessions[source])

    def close(self) -> None:
        """Give all of them back to the engine."""
        for session in self._sessions:
            session.close()

    def _held(self) -> Sequence[Held]:
        return [
            Held(session.tokens, session.reusable, at in self._busy, self._used[at])
            for at, session in enumerate(self._sessions)
        ]
