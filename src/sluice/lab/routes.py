"""Traces of one model as one table in memory, and a layer's rows of it in the order of its tokens. Measures nothing.

A row takes 2 bytes an expert and 34 more: 5 million demands of top 8 are 31 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.trace import TraceBatch, TraceInfo, TraceReader, same_model

Array = np.ndarray[Any, Any]

MAX_COUNTERS = 1 << 21  # layers × experts that are counted; real models have up to 50,000
MAX_STEP = 1 << 47  # so that steps of joined traces, times layers, are still whole numbers of 64 bits
_CELLS = 1 << 22  # of a one-hot matrix made at once
_COLUMNS = ("step", "sequence", "position", "layer", "domain")
_NONE = -1  # fills the rows that have fewer experts than the longest


@dataclass(frozen=True)
class LayerRows:
    """The rows of one layer; those of a sequence are consecutive and in the order of its tokens."""

    layer: int
    n_expert: int
    sequence: Array  # [n] int64, distinct over all traces
    position: Array  # [n] int32
    domain: Array  # [n] int32, -1: none
    experts: Array  # [n, width] int16, -1 past a row's end

    def __len__(self) -> int:
        return len(self.sequence)

    @cached_property
    def lengths(self) -> Array:
        """[n]: how many experts a row has."""
        return (self.experts != _NONE).sum(axis=1)

    @cached_property
    def runs(self) -> Array:
        """[n_runs + 1]: where runs of consecutive positions of one sequence begin, and the end of the last."""
        if not len(self):
            return np.zeros(1, np.int64)
        broken = (np.diff(self.sequence) != 0) | (np.diff(self.position.astype(np.int64)) != 1)
        return np.concatenate([[0], np.flatnonzero(broken) + 1, [len(self)]])

    def one_hot(self, first: int, end: int) -> Array:
        """[rows, n_expert] uint8 of the rows first … end - 1: 1 where a token chose an expert."""
        experts = self.experts[first:end]
        cells = np.zeros((len(experts), self.n_expert + 1), np.uint8)
        cells[np.arange(len(experts))[:, None], experts] = 1  # -1, the filling, is the last column
        return cells[:, :-1]

    def chunks(self, overlap: int = 0) -> Iterator[tuple[int, Array]]:
        """(first row, one-hot of it and the next ones), each chunk beginning with the last `overlap` rows of the one
        before; so every run of overlap + 1 rows is in exactly one chunk, whole."""
        size = max(_CELLS // self.n_expert, 1)
        for first in range(0, len(self) - overlap, size):
            yield first, self.one_hot(first, min(first + size + overlap, len(self)))


@dataclass(frozen=True)
class Routes:
    """All rows of traces of one model."""

    info: TraceInfo  # of the first trace; top_k is the largest of all
    layers: tuple[int, ...]  # those that have rows, ascending
    domains: tuple[str, ...]
    step: Array  # [n] int64, ascending
    sequence: Array  # [n] int64, distinct over all traces
    position: Array  # [n] int32
    layer: Array  # [n] int16
    domain: Array  # [n] int32, index of `domains`, -1: none
    experts: Array  # [n, width] int16, -1 past a row's end
    n_decode: int  # rows of decode
    _order: Array  # rows by layer, sequence, then time
    _bounds: Array  # [n_layers + 1], into _order

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def n_tokens(self) -> int:
        """Tokens of the layer that has most: a prompt's last layer computes few."""
        return int(np.diff(self._bounds).max(initial=0))

    @property
    def n_steps(self) -> int:
        return int((np.diff(self.step) != 0).sum()) + 1

    @property
    def n_sequences(self) -> int:
        return len(np.unique(self.sequence))

    @cached_property
    def n_choices(self) -> int:
        """Experts chosen by all tokens in all layers (token demands)."""
        return int((self.experts != _NONE).sum())

    @property
    def token(self) -> Array:
        """[n] int64: the number of each row's token, counted by sequences, in each in the order of time."""
        order = np.lexsort((self.position, self.step, self.sequence))
        columns = (column[order] for column in (self.sequence, self.step, self.position))
        new = np.logical_or.reduce([np.diff(column) != 0 for column in columns])
        token = np.empty(len(order), np.int64)
        token[order] = np.concatenate([[0], np.cumsum(new)])
        return token

    def by_layer(self) -> Iterator[LayerRows]:
        for i, layer in enumerate(self.layers):
            rows = self._order[self._bounds[i] : self._bounds[i + 1]]
            columns = (column[rows] for column in (self.sequence, self.position, self.domain, self.experts))
            yield LayerRows(layer, self.info.n_expert, *columns)


class Joined:
    """Traces of one model as one: their rows one trace after the other, with ascending steps and own sequences.

    Raises InputError for traces of different models. `path` names them all.
    """

    def __init__(self, readers: Sequence[TraceReader]) -> None:
        infos = [reader.info for reader in readers]
        files = [reader.path.resolve() for reader in readers]
        if twice := [file for i, file in enumerate(files) if file in files[:i]]:
            raise InputError(f"{twice[0]} is given twice, and its tokens would count twice: give it once")
        same_model(infos, [reader.path for reader in readers])
        self._readers = readers
        self.info = replace(infos[0], top_k=max(info.top_k for info in infos))
        self.path = ", ".join(str(reader.path) for reader in readers)
        self.domains: list[str] = []

    def batches(self) -> Iterator[TraceBatch]:
        labels: dict[str, int] = {}
        next_step = next_sequence = 0
        for reader in self._readers:
            first_step, first_sequence = next_step, next_sequence
            for batch in reader.batches():
                places = np.array([labels.setdefault(name, len(labels)) for name in reader.domains] + [-1], np.int32)
                self.domains = list(labels)
                sequence, last = batch.sequence.astype(np.int64), int(batch.step[-1])
                if int(sequence.min()) < 0 or last > MAX_STEP:
                    raise InputError(
                        f"{reader.path}: the trace is damaged (sequence {sequence.min()}, step {last}): record it again"
                    )
                next_step = max(next_step, first_step + last + 1)
                next_sequence = max(next_sequence, first_sequence + int(sequence.max()) + 1)
                yield replace(
                    batch, step=batch.step + first_step, sequence=sequence + first_sequence, domain=places[batch.domain]
                )


def load(trace: Joined) -> Routes:
    """Read traces. Raises InputError for those without rows, or of impossible shape."""
    n_expert = trace.info.n_expert
    columns: dict[str, list[Array]] = {name: [] for name in (*_COLUMNS, "lengths")}
    flat: list[Array] = []
    n_decode = 0
    for batch in trace.batches():
        for name in _COLUMNS:
            columns[name].append(getattr(batch, name))
        columns["lengths"].append(np.diff(batch.offsets))
        flat.append(batch.experts)
        n_decode += int(batch.decode.sum())
    if not flat:
        raise InputError(f"{trace.path}: no rows to report on: record a trace that has some")
    joined = {name: np.concatenate(columns.pop(name)) for name in list(columns)}
    experts = _padded(np.concatenate(flat), joined["lengths"])
    layers = np.unique(joined["layer"])
    if len(trace.info.moe_layers) * n_expert > MAX_COUNTERS:
        raise InputError(
            f"{trace.path}: {len(trace.info.moe_layers)} layers of {n_expert} experts are more than can be counted "
            f"({MAX_COUNTERS}): report on a trace of a smaller model"
        )
    order = np.lexsort((joined["sequence"], joined["layer"]))  # stable: rows of a sequence stay in order of time
    bounds = np.append(np.searchsorted(joined["layer"][order], layers), len(order))
    return Routes(
        trace.info, tuple(layers.tolist()), tuple(trace.domains), **{name: joined[name] for name in _COLUMNS},
        experts=experts, n_decode=n_decode, _order=order, _bounds=bounds,
    )  # fmt: skip


def _padded(flat: Array, lengths: Array) -> Array:
    """Rows of `lengths` experts each as [n, longest], filled with -1."""
    width = int(lengths.max())
    if width * len(lengths) == len(flat):
        return flat.reshape(len(lengths), width)
    if width * len(lengths) > 8 * len(flat) + (1 << 20):  # a few long rows must not take memory for all
        raise InputError(f"the trace has rows of {width} experts among much shorter ones: record it again")
    rows = np.full((len(lengths), width), _NONE, np.int16)
    rows[np.arange(width) < lengths[:, None]] = flat
    return rows
