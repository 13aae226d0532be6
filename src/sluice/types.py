"""Frozen values that pass between the parts of Sluice. They know nothing but the standard library."""

from __future__ import annotations

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """One routed expert of one layer; orders by layer, then expert."""

    layer: int
    expert: int


class Read(NamedTuple):
    """One expert to be read from disk into one slot.

    `deadline` is a tick: steps × layers + layer, smaller is sooner. `serial` is unique in a cache's life, so a late
    completion of a read that was cancelled can't be mistaken for a newer read of the same expert.
    """

    key: ExpertKey
    slot: int
    deadline: int
    serial: int


class Segment(NamedTuple):
    """A contiguous run of bytes of a model file and where it belongs in the pool.

    `file` indexes the model's files (shards), `offset` and `n_bytes` are exact (unaligned), `dest` is a byte offset
    into the pool's buffer.
    """

    file: int
    offset: int
    n_bytes: int
    dest: int


class Completion(NamedTuple):
    """A read that has ended. `error` is None when all its bytes are in the slot."""

    read: Read
    error: Exception | None
