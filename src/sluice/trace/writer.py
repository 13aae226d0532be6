"""Writes a trace to disk as routes are chosen; knows no engine, and keeps no more rows than one block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.new_file import check_out
from sluice.trace.schema import PHASES, TraceInfo, pyarrow, schema

BLOCK_BYTES = 1 << 20  # of rows kept before they are written; a row group
MAX_BLOCK_ROWS = 1 << 20
ENCODER_BYTES = 32 << 20  # what pyarrow takes beside a block of that size once it writes some

Array = np.ndarray[Any, Any]


class TraceWriter:
    """Writes a trace as routes are chosen; a context manager. At most one block of rows is in memory.

    Of each step: `begin_step`, then for each layer `chose` and, once weights are known, `weighed`. It writes to
    PATH.partial and renames that in `close`, so PATH is a whole trace or isn't there; one without rows isn't written.
    `domains` maps sequences to labels. `weights` and `scores` say whether rows have them. `least_rows` is the most that
    one `chose` will bring, if it is known. Its memory is there from the start; encoding takes ENCODER_BYTES more.
    Raises InputError where PATH exists and not `force`, or can't be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], info: TraceInfo, *, weights: bool = True, scores: bool = False,
        force: bool = False, block_bytes: int = BLOCK_BYTES, least_rows: int = 256,
    ) -> None:  # fmt: skip
        self._pa = pa = pyarrow()
        self.path, self.info = Path(os.path.expanduser(path)), info  # noqa: PTH111  (Path's raises for an unknown user)
        self._partial = self.path.with_name(self.path.name + ".partial") if self.path.name else self.path
        self._force = force
        check_out(self.path, force=force, made="the trace")
        self.domains: dict[int, str] = {}
        self.n_rows = 0
        self._labels: dict[str, int] = {}
        row_bytes = 27 + info.top_k * (2 + 4 * weights) + 4 * info.n_expert * scores
        n = self._size = max(1, least_rows, min(block_bytes // row_bytes, MAX_BLOCK_ROWS))
        self._step = np.ones(n, np.int64)  # ones, not zeros or empty: memory that is there, and is counted, from now on
        self._sequence, self._position = np.ones(n, np.int32), np.ones(n, np.int32)
        self._decode, self._layer = np.ones(n, np.bool_), np.ones(n, np.int16)
        self._domain, self._experts = np.full(n, -1, np.int32), np.ones((n, info.top_k), np.int16)
        self._weights = np.ones((n, info.top_k), np.float32) if weights else None
        self._scores = np.ones((n, info.n_expert), np.float32) if scores else None
        self._at = self._weighed = 0  # rows, and those of them that are complete
        self._columns: tuple[int, bool, Array, Array, Array] | None = None
        self._failed = self._closed = False
        self._schema = schema(info)
        self._sink: Any = None
        self._file: Any = None
        with self._writer(pa.BufferOutputStream()) as rehearsal:  # loads what pyarrow loads with its first table
            rehearsal.write_table(self._table(1))
        try:
            self._sink = pa.OSFile(os.fspath(self._partial), "wb")
            self._file = self._writer(self._sink)
        except (OSError, ValueError, pa.ArrowException) as error:
            self.abandon()
            raise InputError(f"{self.path}: can't be written ({_cause(error)}): name another place") from None

    def _writer(self, sink: Any) -> Any:
        coded = ["step", "sequence", "phase", "layer", "domain", "experts.list.element"]
        return self._pa.parquet.ParquetWriter(
            sink, self._schema, compression="zstd", use_dictionary=coded, write_page_checksum=True
        )

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def keeps_scores(self) -> bool:
        return self._scores is not None

    def begin_step(self, step: int, phase: str, sequences: Array, positions: Array) -> None:
        """A step begins; `sequences` and `positions` [n_columns] say whose token each column of the batch is."""
        self._at = self._weighed  # a step that failed half way leaves a layer without weights
        labels = np.full(len(sequences), -1, np.int32)
        if self.domains:
            for column, sequence in enumerate(sequences.tolist()):
                if (label := self.domains.get(sequence)) is not None:
                    labels[column] = self._labels.setdefault(label, len(self._labels))
        self._columns = (step, phase == PHASES[1], sequences, positions, labels)

    def chose(self, layer: int, experts: Array, scores: Array | None = None, columns: Array | None = None) -> None:
        """`layer` executes `experts` [n, top_k] for `columns` of the batch (all if None).

        `scores` [n, n_expert] are given if the trace keeps them. All arrays are copied.
        """
        assert self._columns is not None, "chose before begin_step"
        assert scores is not None or self._scores is None, "a trace with scores, and none given"
        step, decode, sequences, positions, labels = self._columns
        if columns is not None:
            sequences, positions, labels = sequences[columns], positions[columns], labels[columns]
        n = len(experts)
        if self._at + n > self._size:
            self._flush()
            if self._at + n > self._size:
                self._grow(self._at + n)
        rows = slice(self._at, self._at + n)
        self._step[rows], self._decode[rows], self._layer[rows] = step, decode, layer
        self._sequence[rows], self._position[rows], self._domain[rows] = sequences, positions, labels
        self._experts[rows] = experts
        if self._scores is not None:
            self._scores[rows] = scores
        self._at += n

    def weighed(self, weights: Array | None = None) -> None:
        """The routing weights [n, top_k] of the layer that `chose` was last told of; none in a trace without."""
        if self._weights is not None:
            assert weights is not None, "a trace with weights, and none given"
            self._weights[self._weighed : self._at] = weights
        self._weighed = self._at

    def _blocks(self) -> dict[str, Array]:
        """The arrays of rows, by attribute."""
        names = ("_step", "_sequence", "_position", "_decode", "_layer", "_domain", "_experts", "_weights", "_scores")
        return {name: block for name in names if (block := getattr(self, name)) is not None}

    def _grow(self, size: int) -> None:
        self._size = size
        for name, block in self._blocks().items():
            more = np.ones((size, *block.shape[1:]), block.dtype)
            more[: self._at] = block[: self._at]
            setattr(self, name, more)

    def _flush(self) -> None:
        """Write the complete rows, and move what else there is, a layer without weights, to the front."""
        n, rest = self._weighed, self._at - self._weighed
        if n:
            table = self._table(n)
            # forgotten first: an interrupt (Ctrl-C) around the writing loses rows rather than write them twice
            self._at = self._weighed = 0
            with self._writing():
                self._file.write_table(table, row_group_size=n)
            self.n_rows += n
            for block in self._blocks().values():
                block[:rest] = block[n : n + rest]
            self._at = rest

    def _table(self, n: int) -> Any:
        pa = self._pa

        def lists(rows: Array) -> Any:
            """Rows [n, k] as an arrow list array over the same memory."""
            k = rows.shape[1]
            return pa.ListArray.from_arrays(np.arange(n + 1, dtype=np.int32) * k, rows.ravel())

        absent = pa.nulls(n, pa.list_(pa.float32()))
        domain = self._domain[:n]
        labels = pa.array(list(self._labels), pa.string())
        return pa.table(
            {
                "step": self._step[:n],
                "sequence": self._sequence[:n],
                "position": self._position[:n],
                "phase": pa.DictionaryArray.from_arrays(
                    self._decode[:n].astype(np.int8), pa.array(PHASES, pa.string())
                ).cast(pa.string()),
                "layer": self._layer[:n],
                "experts": lists(self._experts[:n]),
                "weights": absent if self._weights is None else lists(self._weights[:n]),
                "scores": absent if self._scores is None else lists(self._scores[:n]),
                "domain": pa.DictionaryArray.from_arrays(pa.array(domain, mask=domain < 0), labels).cast(pa.string()),
            },
            schema=self._schema,
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, self._pa.ArrowException) as error:
            self._failed = True
            remedy = "free space, or name another place"
            raise InputError(f"{self.path}: can't be written ({_cause(error)}): {remedy}") from error

    def close(self) -> None:
        """Write what is left and give the file its name. May be called again.

        Raises InputError where that can't be done, or where PATH has appeared meanwhile and not `force`.
        """
        if self._closed:
            return
        if self._failed:
            self.abandon()
            return
        try:
            self._at = self._weighed
            self._flush()
        except BaseException:
            self.abandon()
            raise
        if not self.n_rows:
            self.abandon()
            return
        self._closed = True
        with self._writing():
            self._file.close()
            self._sink.close()
        if os.path.lexists(self.path) and not self._force:
            raise InputError(f"{self.path}: appeared while the trace was recorded, which is in {self._partial}")
        with self._writing():
            self._partial.replace(self.path)

    def abandon(self) -> None:
        """Give the trace up: nothing of it stays. May be called again, and after `close`, when it does nothing."""
        if self._closed:
            return
        self._closed = True
        for each in (self._file, self._sink):
            with suppress(OSError, self._pa.ArrowException):
                if each is not None:
                    each.close()
        with suppress(OSError, ValueError):
            self._partial.unlink(missing_ok=True)


def _cause(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    said = os.strerror(number) if isinstance(number, int) else str(error)
    return (said.splitlines() or [type(error).__name__])[0][:200]
