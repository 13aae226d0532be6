"""Which rows of which domains make the batches of a run, the same ones for the same seed. Knows no model.

A row is length + 1 ids that follow each other in a domain's shard; rows overlap by one id, so that in an epoch of a
domain every token is predicted once, but for the remainder at the ends. Each epoch starts at another offset and has
another order. Which rows a domain gives depends on the seed, its name and its own ids: other domains beside it, a
resume or more processes don't change them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sluice.errors import InputError
from sluice.train.shards import Ids, Tokens

_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _key(*parts: object) -> int:
    """64 bits that `parts` decide."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "little")


def _order(n: int, key: int) -> np.ndarray:
    """A permutation of 0 … n - 1: the order of splitmix64's numbers after `key`, the same in every numpy."""
    z = np.uint64(key) + _GOLDEN * np.arange(1, n + 1, dtype=np.uint64)  # wraps around
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


class _Rows:
    """The rows of one domain, for ever."""

    def __init__(self, ids: np.ndarray, length: int, *identity: object) -> None:
        self._ids, self._length, self._identity = ids, length, identity
        self._epoch, self._first, self._end = -1, 0, 0  # rows counted over all epochs: the current one's range
        self._offset, self._permutation = 0, np.zeros(0, np.int64)

    def row(self, i: int) -> Ids:
        """Row `i`, counted over all epochs: int64 [length + 1]. Cheapest in ascending order."""
        if i < self._first:
            self._epoch, self._first, self._end = -1, 0, 0
        while i >= self._end:
            self._epoch, self._first = self._epoch + 1, self._end
            room = len(self._ids) - 1 - self._length  # offsets at which a row still fits, less one
            self._offset = _key(*self._identity, self._epoch, "offset") % (min(room, self._length - 1) + 1)
            self._end += (len(self._ids) - 1 - self._offset) // self._length
            self._permutation = np.zeros(0, np.int64)
        if not len(self._permutation):
            self._permutation = _order(self._end - self._first, _key(*self._identity, self._epoch, "order"))
        start = self._offset + int(self._permutation[i - self._first]) * self._length
        return self._ids[start : start + self._length + 1].astype(np.int64)


class Batches:
    """Batches of a split, from chosen domains (all) in chosen proportions (equal).

    `batch` rows a step over all processes; this process, `rank` of `world`, gets its even share. Where `batch` is a
    multiple of the number of domains, and proportions are equal, so many rows of each are in every batch.
    """

    def __init__(
        self, tokens: Tokens, split: str, batch: int, length: int, seed: int, *, domains: Sequence[str] | None = None,
        weights: Mapping[str, float] | None = None, rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        """Raises InputError for unknown names, a domain too short for a row, and numbers that make no batches."""
        if batch < 1 or length < 1:
            raise InputError(f"a batch of {batch} rows of {length} tokens is none: give at least 1 of each")
        if batch % world:
            raise InputError(f"a batch of {batch} rows can't be shared evenly by {world} processes: give a multiple")
        self.domains = tuple(dict.fromkeys(tokens.domains if domains is None else domains))
        if not self.domains:
            raise InputError(f"no domain is chosen: choose of {', '.join(tokens.domains)}")
        for domain in self.domains:
            if tokens.shard(domain, split).tokens < length + 1:
                raise InputError(
                    f"domain {domain}: its {split} split has {tokens.shard(domain, split).tokens} tokens, fewer than a "
                    f"row of {length + 1}: give it more text, or shorter rows"
                )
        self._weights = _shares(self.domains, weights)
        self._index = np.array([tokens.domains.index(domain) for domain in self.domains], np.int64)
        self._rows = [_Rows(tokens.ids(domain, split), length, seed, split, domain) for domain in self.domains]
        self._identity: dict[str, Any] = {
            "data": tokens.fingerprint, "split": split, "batch": batch, "length": length, "seed": seed,
            "domains": list(self.domains), "weights": self._weights,
        }  # fmt: skip
        self._batch, self._share, self._rank = batch, batch // world, rank
        self._given = [0] * len(self.domains)  # rows so far, over all processes

    def next(self) -> tuple[Ids, Ids]:
        """The next batch: ids [batch / world, length + 1], and of each row the domain's index in `Tokens.domains`."""
        mine = range(self._rank * self._share, (self._rank + 1) * self._share)
        rows: list[Ids] = []
        whose: list[int] = []
        for i in range(self._batch):
            d = self._turn()
            if i in mine:
                rows.append(self._rows[d].row(self._given[d]))
                whose.append(d)
            self._given[d] += 1
        return np.stack(rows), self._index[whose]

    def _turn(self) -> int:
        """The domain whose turn it is: the one most behind its share; of several, the first."""
        n = sum(self._given) + 1
        behind = [weight * n - given for weight, given in zip(self._weights, self._given, strict=True)]
        return behind.index(max(behind))

    def state(self) -> dict[str, Any]:
        """Where the batches stand, as JSON-able values; the same on every process."""
        return {**self._identity, "given": list(self._given)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises InputError for that of other batches, naming what differs."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise InputError(
                    f"the checkpoint's batches differ in {name} ({state.get(name)!r}, not {value!r}): start another run"
                )
        given = state.get("given")
        if (
            not isinstance(given, list)
            or len(given) != len(self._given)
            or any(type(n) is not int or n < 0 for n in given)
        ):
            raise InputError("the checkpoint does not say where its batches stand: start another run")
        self._given = list(given)


def _shares(domains: Sequence[str], weights: Mapping[str, float] | None) -> list[float]:
    """Of each domain, the share of rows; they sum to 1."""
    if weights is None:
        return [1 / len(domains)] * len(domains)
    if set(weights) != set(domains):
        raise InputError(f"weights are for {', '.join(sorted(weights))}: give one for each of {', '.join(domains)}")
    total = sum(weights.values())
    if not all(0 < weight < float("inf") for weight in weights.values()):
        raise InputError("a domain's weight is not a positive number: leave the domain out, or give it one")
    return [weights[domain] / total for domain in domains]
