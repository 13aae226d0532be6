"""Turns a trace's rows into what a cache was asked for: one demand set per execution of a layer. Knows no cache.

Executions come in the order in which the engine ran them. The demands of one are its distinct experts in ascending
order; its tick is step × layers + layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sluice.errors import InputError
from sluice.trace import TraceBatch, TraceInfo, TraceReader
from sluice.types import ExpertKey

Array = np.ndarray[Any, Any]

PHASES = ("all", "prefill", "decode")
_BLOCK = 1 << 14  # executions made into Python objects at once


class Execution(NamedTuple):
    """One layer, run once for all tokens of a step."""

    step: int
    phase: str  # "prefill" or "decode"
    layer: int
    tick: int
    keys: list[ExpertKey]  # distinct, ascending; equal keys are one object throughout
    n_rows: int  # tokens that this layer ran for
    n_tokens: int  # of the step
    n_sequences: int  # of the step
    token_demands: int  # experts chosen, counted for each token

    @property
    def scan(self) -> bool:
        """A sweep over the layer, which the engine asks the cache to keep from flushing the working set."""
        return self.phase == "prefill" and self.n_tokens > self.n_sequences


@dataclass(frozen=True)
class Demands:
    """All executions of a trace as arrays. Execution i demands ids[offsets[i] : offsets[i + 1]], indices of `experts`.

    About 5 bytes a demand and 50 an execution.
    """

    info: TraceInfo
    experts: list[ExpertKey]  # all that are demanded, ascending
    ids: Array  # [n_demands] int32
    offsets: Array  # [n + 1] int64
    step: Array  # [n] int64
    layer: Array  # [n] int16
    decode: Array  # [n] bool
    n_rows: Array  # [n] int32
    n_tokens: Array  # [n] int32, of the step
    n_sequences: Array  # [n] int32, of the step
    token_demands: Array  # [n] int64

    @classmethod
    def of(cls, reader: TraceReader) -> Demands:
        """Reads the whole trace. Raises InputError for one without rows, and as `TraceReader.batches` does."""
        blocks = list(_blocks(reader))
        if not blocks:
            raise InputError(f"{reader.path}: the trace has no rows: record something")
        codes = np.concatenate([block.codes for block in blocks])
        distinct, ids = np.unique(codes, return_inverse=True)
        counts = np.concatenate([block.counts for block in blocks])
        n_expert = reader.info.n_expert
        columns = {
            name: np.concatenate([getattr(block, name) for block in blocks])
            for name in ("step", "layer", "decode", "n_rows", "n_tokens", "n_sequences", "token_demands")
        }
        experts = [ExpertKey(*divmod(code, n_expert)) for code in distinct.tolist()]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return cls(reader.info, experts, ids.astype(np.int32), offsets, **columns)

    def __len__(self) -> int:
        """Executions."""
        return len(self.step)

    @property
    def counts(self) -> Array:
        """[n]: distinct experts of each execution."""
        return np.diff(self.offsets)

    @property
    def scan(self) -> Array:
        """[n] bool: which are sweeps (Execution.scan)."""
        return ~self.decode & (self.n_tokens > self.n_sequences)

    @property
    def n_experts(self) -> int:
        """Experts of the model, demanded or not."""
        return len(self.info.moe_layers) * self.info.n_expert

    @cached_property
    def expert_bytes(self) -> Array:
        """[n]: the size of one expert of each execution's layer."""
        sizes = np.zeros(self.info.n_layers, np.int64)
        sizes[list(self.info.moe_layers)] = self.info.expert_bytes
        return sizes[self.layer]

    def of_phase(self, phase: str) -> Array:
        """[n] bool: executions of "prefill", "decode", or "all"."""
        assert phase in PHASES
        return np.ones(len(self), np.bool_) if phase == "all" else self.decode == (phase == "decode")

    def tokens(self, phase: str = "all") -> int:
        """Tokens that the steps of a phase ran."""
        first = np.concatenate([[True], np.diff(self.step) != 0])  # each step's first execution
        return int(self.n_tokens[first & self.of_phase(phase)].sum())

    def head(self, n_demands: int) -> Demands:
        """The first executions, as many as have at most `n_demands` demands, but at least one."""
        n = max(1, int(np.searchsorted(self.offsets, n_demands, side="right")) - 1)
        columns = ("step", "layer", "decode", "n_rows", "n_tokens", "n_sequences", "token_demands")
        first = {name: getattr(self, name)[:n] for name in columns}
        return replace(self, ids=self.ids[: self.offsets[n]], offsets=self.offsets[: n + 1], **first)

    def by_step(self, values: Array, phase: str) -> Array:
        """`values` [n] of a phase as [steps, layers with experts]; 0 where a step did not run a layer."""
        mine = self.of_phase(phase)
        step = self.step[mine]
        row = np.cumsum(np.diff(step, prepend=step[:1]) != 0)
        table = np.zeros((int(row[-1]) + 1 if len(row) else 0, len(self.info.moe_layers)), values.dtype)
        table[row, np.searchsorted(self.info.moe_layers, self.layer[mine])] = values[mine]
        return table

    def keys(self) -> Iterator[ExpertKey]:
        """Every demand, in order."""
        for first in range(0, len(self.ids), _BLOCK):
            yield from map(self.experts.__getitem__, self.ids[first : first + _BLOCK].tolist())

    def __iter__(self) -> Iterator[Execution]:
        n_layers, experts = self.info.n_layers, self.experts
        for first in range(0, len(self), _BLOCK):
            part = slice(first, first + _BLOCK)
            offsets = self.offsets[first : first + _BLOCK + 1]
            keys = [experts[i] for i in self.ids[offsets[0] : offsets[-1]].tolist()]
            at = (offsets - offsets[0]).tolist()
            step, layer = self.step[part], self.layer[part]
            tick = step * n_layers + layer
            columns = (step, self.decode[part], layer, tick, self.n_rows[part], self.n_tokens[part],
                       self.n_sequences[part], self.token_demands[part])  # fmt: skip
            for i, (s, decode, of_layer, t, rows, tokens, sequences, demands) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            ):
                phase = "decode" if decode else "prefill"
                yield Execution(s, phase, of_layer, t, keys[at[i] : at[i + 1]], rows, tokens, sequences, demands)


def executions(reader: TraceReader) -> Iterator[Execution]:
    """The executions of a trace that is read as they are asked for."""
    n_expert, n_layers = reader.info.n_expert, reader.info.n_layers
    interned: dict[int, ExpertKey] = {}
    for block in _blocks(reader):
        codes, at = block.codes.tolist(), 0
        for code in set(codes):
            if code not in interned:
                interned[code] = ExpertKey(*divmod(code, n_expert))
        columns = (block.step, block.decode, block.layer, block.counts, block.n_rows, block.n_tokens,
                   block.n_sequences, block.token_demands)  # fmt: skip
        for step, decode, layer, n, *numbers in zip(*(column.tolist() for column in columns), strict=True):
            keys = [interned[code] for code in codes[at : at + n]]
            at += n
            yield Execution(step, "decode" if decode else "prefill", layer, step * n_layers + layer, keys, *numbers)


class _Rows(NamedTuple):
    """Rows of a trace; `experts` has lengths[i] ids for row i."""

    step: Array
    layer: Array
    decode: Array
    sequence: Array
    lengths: Array
    experts: Array

    @classmethod
    def of(cls, batch: TraceBatch) -> _Rows:
        return cls(batch.step, batch.layer, batch.decode, batch.sequence, np.diff(batch.offsets), batch.experts)

    def cut(self, at: int) -> tuple[_Rows, _Rows]:
        """The first `at` rows, and the rest, copied so that they don't keep the batch in memory."""
        ids = int(self.lengths[:at].sum())
        *columns, experts = self
        step, layer, decode, sequence, lengths = columns
        first = _Rows(step[:at], layer[:at], decode[:at], sequence[:at], lengths[:at], experts[:ids])
        later = (column[at:].copy() for column in columns)
        return first, _Rows._make((*later, experts[ids:].copy()))

    def then(self, later: _Rows) -> _Rows:
        return _Rows._make(np.concatenate(pair) for pair in zip(self, later, strict=True))


class _Block(NamedTuple):
    """Whole executions. `codes`: layer × experts of a layer + expert, `counts` of them for each execution."""

    step: Array
    layer: Array
    decode: Array
    counts: Array
    n_rows: Array
    n_tokens: Array
    n_sequences: Array
    token_demands: Array
    codes: Array


def _blocks(reader: TraceReader) -> Iterator[_Block]:
    """Executions, put together again where row groups cut them."""
    rest: _Rows | None = None
    step = (-1, 0, 0)  # the newest step, its tokens, its sequences
    for batch in reader.batches():
        rows = _Rows.of(batch) if rest is None else rest.then(_Rows.of(batch))
        same = (rows.step == rows.step[-1]) & (rows.layer == rows.layer[-1])
        whole, rest = rows.cut(len(same) - int(np.argmin(same[::-1])) if not same.all() else 0)
        if len(whole.step):
            block = _fold(whole, step, reader.info.n_expert)
            step = (int(block.step[-1]), int(block.n_tokens[-1]), int(block.n_sequences[-1]))
            yield block
    if rest is not None:
        yield _fold(rest, step, reader.info.n_expert)


def _fold(rows: _Rows, before: tuple[int, int, int], n_expert: int) -> _Block:
    """Rows of whole executions as executions; `before` is the step that the first may belong to.

    A step's tokens and sequences are those of its first execution: only a model's last layer leaves tokens out.
    """
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(rows.step) != 0) | (np.diff(rows.layer) != 0)]))
    n = len(starts)
    n_rows = np.diff(np.append(starts, len(rows.step)))
    of_row = np.repeat(np.arange(n), n_rows)
    step, layer, decode = rows.step[starts], rows.layer[starts], rows.decode[starts]

    pairs = np.unique(of_row.astype(np.int64) << 32 | (rows.sequence.astype(np.int64) & 0xFFFFFFFF))
    n_sequences = np.bincount(pairs >> 32, minlength=n)
    opening = np.concatenate([[True], np.diff(step) != 0])  # of steps
    opener = np.maximum.accumulate(np.where(opening, np.arange(n), 0))
    n_tokens, n_sequences = n_rows[opener], n_sequences[opener]
    if before[0] == step[0]:
        going_on = step == step[0]
        n_tokens[going_on], n_sequences[going_on] = before[1:]

    of_id = np.repeat(of_row, rows.lengths)
    distinct = np.unique(of_id * n_expert + rows.experts)
    of_demand = distinct // n_expert
    codes = (distinct % n_expert + layer[of_demand].astype(np.int64) * n_expert).astype(np.int32)
    return _Block(
        step, layer, decode, np.bincount(of_demand, minlength=n), n_rows.astype(np.int32), n_tokens.astype(np.int32),
        n_sequences.astype(np.int32), np.bincount(of_row, rows.lengths, minlength=n).astype(np.int64), codes,
    )  # fmt: skip
