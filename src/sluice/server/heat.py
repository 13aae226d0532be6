"""Which experts are in an engine's pool and how much each is demanded lately. It listens, and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sluice.server.jobs import HEAT_HALF_LIFE_S, ExpertsState
from sluice.store import ExpertStore
from sluice.types import ExpertKey


class Heat:
    """Counts the demands on `store` from now until `close`; used by the thread that runs its engine.

    A demand costs an addition of Python's: about 30 µs a token for 48 layers of 8 experts.
    """

    def __init__(self, store: ExpertStore, layers: Sequence[int], n_expert: int, now: float) -> None:
        self._store = store
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._layers = tuple(layers)
        self._heat = np.zeros((len(layers), n_expert))
        self._new = [[0] * n_expert for _ in layers]
        self._at = now
        store.listener = self._count

    def _count(self, keys: Sequence[ExpertKey]) -> None:
        for layer, expert in keys:
            self._new[self._row[layer]][expert] += 1

    def pass_time(self, now: float) -> None:
        """Let what was counted until now cool down; call it every second or so."""
        self._heat *= 0.5 ** ((now - self._at) / HEAT_HALF_LIFE_S)
        self._heat += self._new
        self._at = now
        for row in self._new:
            row[:] = [0] * len(row)

    def state(self, now: float) -> ExpertsState:
        """As it is now, in arrays of its own."""
        self.pass_time(now)
        resident = np.zeros(self._heat.shape, np.uint8)
        keys = list(self._store.cache.keys_resident())
        resident[[self._row[key.layer] for key in keys], [key.expert for key in keys]] = 1
        return ExpertsState(self._layers, resident, self._heat.astype(np.float32))

    def close(self) -> None:
        """Stop listening."""
        self._store.listener = None
