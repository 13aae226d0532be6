"""Routes that a trace has recorded, for replaying them as if they had been predicted; knows no engine and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sluice.errors import InputError
from sluice.trace import TraceReader


class RecordedRoutes:
    """The decoded tokens' routes in the trace at `path`, by sequence and position.

    Raises InputError for a trace of another model (see sluice.models.fingerprint), one with another number of experts a
    token, or one that has a layer of a token twice or not at all.
    """

    def __init__(self, path: Path, *, fingerprint: str, moe_layers: Sequence[int], n_expert: int, top_k: int) -> None:
        self._ids: dict[tuple[int, int], np.ndarray] = {}
        with TraceReader(path) as reader:
            info = reader.info
            shape = info.fingerprint, info.moe_layers, info.n_expert  # the fingerprint is only what the file claims
            if shape != (fingerprint, tuple(moe_layers), n_expert):
                raise InputError(f"{path} was recorded on another model: record one on this")
            if info.top_k != top_k:
                raise InputError(f"{path} has {info.top_k} experts a token, not {top_k}: record one with as many")
            index = {layer: i for i, layer in enumerate(info.moe_layers)}
            missing: dict[tuple[int, int], set[int]] = {}
            sequences = {0}
            for batch in reader.batches():
                for row in np.flatnonzero(batch.decode).tolist():
                    experts = batch.experts[batch.offsets[row] : batch.offsets[row + 1]]
                    place = int(batch.sequence[row]), int(batch.position[row])
                    sequences.add(place[0])
                    if len(experts) != top_k:
                        raise InputError(f"{path}: {len(experts)} experts in a row, not {top_k}: record it again")
                    if place not in self._ids:
                        self._ids[place] = np.zeros((len(index), top_k), np.int32)
                        missing[place] = set(range(len(index)))
                    i, left = index[int(batch.layer[row])], missing.get(place, set())
                    if i not in left:
                        raise InputError(f"{path}: a layer of a token is there twice: record the trace again")
                    self._ids[place][i] = experts
                    left.remove(i)
                    if not left:
                        del missing[place]
        if missing:
            raise InputError(f"{path}: some tokens lack layers: record the trace again")
        self._n_sequences = max(sequences) + 1

    def ids(self, sequence: int, position: int) -> np.ndarray | None:
        """[n_moe_layers, top_k] int32: the experts of the token there; None where the trace ends.

        A sequence after the trace's last is its first again, and so on: a repeat of what was recorded.
        """
        return self._ids.get((sequence % self._n_sequences, position))
