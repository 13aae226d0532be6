"""A data folder: documents as token ids, per domain and split, with hashes of all of it. Knows no text and no model.

meta.json               Meta: counts, hashes, whose ids these are
tokenizer.json, …       the tokenizer
NAME.SPLIT.ids.npy      [n] uint16, or uint32 for more than 65,536 tokens: END d0 END d1 … END
NAME.SPLIT.starts.npy   [documents + 1] int64: where the END before each document stands; last, the one after all
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from sluice.errors import InputError
from sluice.train.tokenizer import fingerprint, open_tokenizer

META = "meta.json"
FORMAT, VERSION = "sluice-tokens", 1
SPLITS = ("train", "valid")
MAX_META_BYTES = 1 << 24
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shard:
    """A split of a domain. `tokens` counts END too; `bytes` are the documents' as UTF-8; hashes are of whole files."""

    tokens: int
    documents: int
    bytes: int
    ids_sha256: str
    starts_sha256: str


@dataclass(frozen=True)
class Meta:
    """What meta.json says. `end`: the id of END. `tokenizer`: its fingerprint. `duplicates`: left out, by domain."""

    n_vocab: int
    end: int
    tokenizer: str
    seed: int
    valid_share: float
    duplicates: Mapping[str, int]
    domains: Mapping[str, Mapping[str, Shard]]

    @property
    def fingerprint(self) -> str:
        """A sha256 that two folders share if they hold the same ids under the same names, of the same tokenizer."""
        shards = {name: [asdict(splits[split]) for split in SPLITS] for name, splits in self.domains.items()}
        return hashlib.sha256(json.dumps([self.tokenizer, shards], sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        value = {"format": FORMAT, "version": VERSION, **asdict(self)}
        (folder / META).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Meta:
        """Raises InputError where the folder is no data folder, or its meta.json is broken."""
        path = folder / META
        try:
            with path.open("rb") as file:
                data = file.read(MAX_META_BYTES + 1)
            value = json.loads(data) if len(data) <= MAX_META_BYTES else None
        except OSError as error:
            raise InputError(
                f"{folder}: is no data folder ({META}: {error.strerror}): make one with `sluice train data`"
            ) from None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT or value.pop("version", 0) != VERSION:
            raise InputError(f"{path}: is not {FORMAT} {VERSION}: make the folder again with `sluice train data`")
        try:
            domains = {
                check_domain(name): {split: _shard(splits[split]) for split in SPLITS}
                for name, splits in value.pop("domains").items()
            }
            meta = cls(**value, domains=domains)
            whole = type(meta.end) is type(meta.n_vocab) is int and 0 <= meta.end < meta.n_vocab <= 1 << 32
            if not (domains and whole and isinstance(meta.tokenizer, str)):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(f"{path}: is broken: make the folder again with `sluice train data`") from None
        return meta


def _shard(value: Any) -> Shard:
    shard = Shard(**value)
    counts = (shard.tokens, shard.documents, shard.bytes)
    hashes = (shard.ids_sha256, shard.starts_sha256)
    if not (all(type(n) is int and n > 0 for n in counts) and all(isinstance(text, str) for text in hashes)):
        raise ValueError
    return shard


def check_domain(name: str) -> str:
    """`name`, which names files. Raises InputError for one that can't."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{name[:80]!r} can't name a domain: use up to 64 letters, digits, - and _")
    return name


def ids_file(domain: str, split: str) -> str:
    return f"{domain}.{split}.ids.npy"


def starts_file(domain: str, split: str) -> str:
    return f"{domain}.{split}.starts.npy"


def ids_type(n_vocab: int) -> type[np.uint16] | type[np.uint32]:
    """The type that shards of a vocabulary of `n_vocab` tokens have."""
    return np.uint16 if n_vocab <= 1 << 16 else np.uint32


def sha256(path: Path) -> str:
    """Of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Documents(Sequence[Ids]):
    """The documents of a split of a domain, in the folder's fixed order: int64 [n + 2], END before and after."""

    def __init__(self, ids: np.ndarray, starts: np.ndarray) -> None:
        self._ids, self._starts = ids, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, i: int) -> Ids: ...
    @overload
    def __getitem__(self, i: slice) -> list[Ids]: ...
    def __getitem__(self, i: int | slice) -> Ids | list[Ids]:
        if isinstance(i, slice):
            return [self[each] for each in range(*i.indices(len(self)))]
        at = range(len(self))[i]
        return self._ids[self._starts[at] : self._starts[at + 1] + 1].astype(np.int64)


class Tokens:
    """An open data folder. Shards are mapped, not read: opening takes no memory, only the time to hash the files.

    `domains`: their names, sorted. `fingerprint` identifies the data, tokenizer included.
    """

    def __init__(self, folder: str | Path, *, check: bool = True) -> None:
        """Raises InputError for what is no data folder, and where its files are not as its meta.json says.

        `check=False` leaves out the hashes: for a process beside one that has checked.
        """
        self.folder = Path(folder)
        self.meta = Meta.read(self.folder)
        self.domains = tuple(sorted(self.meta.domains))
        self.n_vocab, self.end, self.fingerprint = self.meta.n_vocab, self.meta.end, self.meta.fingerprint
        self._ids: dict[tuple[str, str], np.ndarray] = {}
        self._starts: dict[tuple[str, str], np.ndarray] = {}
        self._tokenizer: Tokenizer | None = None  # once it has been asked for
        for domain in self.domains:
            for split in SPLITS:
                shard = self.meta.domains[domain][split]
                self._ids[domain, split] = self._open(
                    ids_file(domain, split), ids_type(self.n_vocab), shard.tokens, shard.ids_sha256 if check else None
                )
                self._starts[domain, split] = self._open(
                    starts_file(domain, split), np.int64, shard.documents + 1, shard.starts_sha256 if check else None
                )
                if check:
                    self._check_numbers(domain, split)

    def _open(self, name: str, kind: type, n: int, digest: str | None) -> np.ndarray:
        path = self.folder / name
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            as_said = array.dtype == kind and array.shape == (n,) and (digest is None or sha256(path) == digest)
        except OSError as error:
            raise InputError(f"{path}: can't be read ({error.strerror or error}): make the data again") from None
        except (ValueError, EOFError):
            array, as_said = np.zeros(0), False
        if not as_said:
            raise InputError(f"{path}: is not what {META} says (changed or cut short): make the data folder again")
        return array

    def _check_numbers(self, domain: str, split: str) -> None:
        """Raise InputError for ids outside the vocabulary, and documents that don't stand between ENDs."""
        ids, starts = self._ids[domain, split], self._starts[domain, split]
        spans = starts[0] == 0 and starts[-1] == len(ids) - 1 and bool((np.diff(starts) > 0).all())
        if ids.max() >= self.n_vocab or not spans or (ids[starts] != self.end).any():
            raise InputError(f"{self.folder / ids_file(domain, split)}: holds no such documents: make the data again")

    def shard(self, domain: str, split: str) -> Shard:
        """The counts of a split. Raises InputError for names that the folder doesn't have."""
        self._known(domain, split)
        return self.meta.domains[domain][split]

    def ids(self, domain: str, split: str) -> np.ndarray:
        """All ids of a split, [n] uint16 or uint32, mapped: END before, between and after documents."""
        self._known(domain, split)
        return self._ids[domain, split]

    def documents(self, domain: str, split: str) -> Documents:
        """The documents of a split, for reading in order. Raises InputError for names that the folder doesn't have."""
        self._known(domain, split)
        return Documents(self._ids[domain, split], self._starts[domain, split])

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises InputError where it is not the one that the ids are of."""
        if self._tokenizer is None:
            found = open_tokenizer(self.folder)
            self.check_tokenizer(found, str(self.folder))
            self._tokenizer = found
        return self._tokenizer

    def check_tokenizer(self, other: Tokenizer, name: str) -> None:
        """Raise InputError unless `other`, which `name` says whose it is, gives the ids that this folder holds."""
        if fingerprint(other) != self.meta.tokenizer:
            raise InputError(
                f"{self.folder}: its data were made with another tokenizer than that of {name}: make them again with "
                "`sluice train data --tokenizer`"
            )

    def _known(self, domain: str, split: str) -> None:
        if domain not in self.meta.domains:
            raise InputError(f"{self.folder}: has no domain {domain!r}: choose of {', '.join(self.domains)}")
        if split not in SPLITS:
            raise InputError(f"there is no split {split!r}: choose of {', '.join(SPLITS)}")
