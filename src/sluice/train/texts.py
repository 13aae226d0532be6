"""A folder of texts that a teacher wrote, as token ids with their prompts' lengths, and its batches. Knows no model.

meta.json                Meta: counts, hashes, whose ids these are, who wrote them
SPLIT.ids.npy            [n_ids] uint16, or uint32 for more than 65,536 tokens: text after text, prompt first
SPLIT.starts.npy         [n_texts + 1] int64: where each begins; last, where the last one ends
SPLIT.prompts.npy        [n_texts] int64: how many of a text's ids are its prompt
SPLIT.domains.npy        [n_texts] int64: its domain's place in `Meta.domains`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sluice.errors import InputError
from sluice.train.checkpoint import write_json
from sluice.train.shards import SPLITS, ids_type, sha256

META, FORMAT, VERSION = "meta.json", "sluice-texts", 1
MAX_META_BYTES = 1 << 20
PARTS = ("ids", "starts", "prompts", "domains")


class Text(NamedTuple):
    """`ids` [n], of which the first `n_prompt` were given and a teacher wrote the others; at least one of each."""

    ids: np.ndarray
    n_prompt: int
    domain: int


@dataclass(frozen=True)
class Meta:
    """What meta.json says. `end`: the id that ends a text; `tokenizer`: its fingerprint; `teacher`: who wrote, and how.

    `sha256` is by SPLIT.part.
    """

    n_vocab: int
    end: int
    tokenizer: str
    domains: Sequence[str]
    teacher: Mapping[str, Any]
    sha256: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """A sha256 that two folders share if they hold the same texts, of the same tokenizer."""
        return hashlib.sha256(json.dumps([self.tokenizer, dict(sorted(self.sha256.items()))]).encode()).hexdigest()


class Texts:
    """An open folder of texts; its ids are mapped, not read."""

    def __init__(self, folder: str | Path) -> None:
        """Raises InputError for what is no such folder, and where its files are not as its meta.json says."""
        self.folder = Path(folder)
        self.meta = _read_meta(self.folder)
        self.fingerprint = self.meta.fingerprint
        self._parts: dict[str, dict[str, np.ndarray]] = {}
        for split in SPLITS:
            parts = {part: self._open(f"{split}.{part}") for part in PARTS}
            self._check(split, parts)
            self._parts[split] = parts

    def _open(self, name: str) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            same = sha256(path) == self.meta.sha256.get(name)
        except OSError as error:
            raise InputError(f"{path}: can't be read ({error.strerror or error}): write the texts again") from None
        except (ValueError, EOFError):
            same, array = False, np.zeros(0)
        wanted = ids_type(self.meta.n_vocab) if name.endswith(".ids") else np.int64
        if not same or array.dtype != wanted or array.ndim != 1:
            raise InputError(f"{path}: is not what {META} says (changed or cut short): write the texts again")
        return array

    def _check(self, split: str, parts: Mapping[str, np.ndarray]) -> None:
        """Raise InputError unless the parts fit each other: each text has a prompt and an answer, of known ids."""
        ids, starts, prompts, domains = (parts[part] for part in PARTS)
        n = len(prompts)
        right = n > 0 and len(starts) == n + 1 and len(domains) == n and starts[0] == 0 and starts[-1] == len(ids)
        right = right and bool((prompts >= 1).all() and (np.diff(starts) > prompts).all())
        right = right and bool((domains >= 0).all() and (domains < len(self.meta.domains)).all())
        if not (right and int(ids.max()) < self.meta.n_vocab):
            raise InputError(f"{self.folder}: its {split} texts don't fit each other: write the texts again")

    def n_texts(self, split: str) -> int:
        return len(self._parts[split]["prompts"])

    def n_ids(self, split: str) -> int:
        return len(self._parts[split]["ids"])

    def fitting(self, split: str, length: int) -> list[int]:
        """The texts of a split whose prompt leaves room for an answer within `length` ids."""
        return np.flatnonzero(self._parts[split]["prompts"] < length).tolist()

    def text(self, split: str, i: int) -> Text:
        """Text `i` of a split, its ids int64."""
        parts = self._parts[split]
        first, last = int(parts["starts"][i]), int(parts["starts"][i + 1])
        return Text(parts["ids"][first:last].astype(np.int64), int(parts["prompts"][i]), int(parts["domains"][i]))


def write_texts(
    folder: Path, splits: Mapping[str, Sequence[Text]], *, n_vocab: int, end: int, tokenizer: str,
    domains: Sequence[str], teacher: Mapping[str, Any],
) -> Meta:  # fmt: skip
    """Write texts of both splits into `folder`, meta.json last, so that a folder with one is whole.

    Raises InputError where a split has no text.
    """
    digests: dict[str, str] = {}
    for split in SPLITS:
        texts = splits[split]
        if not texts:
            raise InputError(f"{folder}: there is no text in the {split} split: ask for more prompts")
        starts = np.concatenate([[0], np.cumsum([len(text.ids) for text in texts])]).astype(np.int64)
        arrays = {
            "ids": np.concatenate([text.ids for text in texts]).astype(ids_type(n_vocab)),
            "starts": starts,
            "prompts": np.array([text.n_prompt for text in texts], np.int64),
            "domains": np.array([text.domain for text in texts], np.int64),
        }
        for part, array in arrays.items():
            path = folder / f"{split}.{part}.npy"
            np.save(path, array, allow_pickle=False)
            digests[f"{split}.{part}"] = sha256(path)
    meta = Meta(n_vocab, end, tokenizer, list(domains), dict(teacher), digests)
    write_json(folder / META, {"format": FORMAT, "version": VERSION, **asdict(meta)})
    return meta


def _read_meta(folder: Path) -> Meta:
    path, remedy = folder / META, "write one with `sluice train text`"
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_META_BYTES + 1)
        value = json.loads(raw) if len(raw) <= MAX_META_BYTES else None
    except OSError as error:
        raise InputError(f"{folder}: is no folder of a teacher's texts ({META}: {error.strerror}): {remedy}") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT or value.pop("version", None) != VERSION:
        raise InputError(f"{path}: is not {FORMAT} {VERSION}: {remedy}")
    try:
        meta = Meta(**value)
        numbers = type(meta.n_vocab) is int and type(meta.end) is int and 0 <= meta.end < meta.n_vocab
        named = isinstance(meta.domains, list) and meta.domains and all(isinstance(name, str) for name in meta.domains)
        if not (numbers and named and isinstance(meta.sha256, dict) and isinstance(meta.teacher, dict)):
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(f"{path}: is broken: {remedy}") from None
    return meta


@dataclass(frozen=True)
class TextBatch:
    """B texts side by side, filled up at the right. All on one device.

    `ids` [B, T]; `n_prompt` and `n` [B]: how many ids of a row are its prompt, and its text; `domain` [B].
    """

    ids: Tensor
    n_prompt: Tensor
    n: Tensor
    domain: Tensor

    @property
    def native(self) -> Tensor:
        """[B, T]: the prompt and the first token after it, which are routed natively."""
        return self._places <= self.n_prompt[:, None]

    @property
    def answered(self) -> Tensor:
        """[B, T]: positions whose next token the teacher wrote."""
        return (self._places >= self.n_prompt[:, None] - 1) & (self._places < self.n[:, None] - 1)

    @property
    def targets(self) -> Tensor:
        """[n_answered]: the token after each of the positions `answered`, in their order."""
        return torch.roll(self.ids, -1, dims=1)[self.answered]

    def to(self, device: torch.device) -> TextBatch:
        """The batch on `device`."""
        return TextBatch(*(part.to(device) for part in (self.ids, self.n_prompt, self.n, self.domain)))

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.ids.shape[1], device=self.ids.device)[None]


def text_batch(texts: Sequence[Text], length: int, fill: int) -> TextBatch:
    """`texts`, each cut to `length` ids, as one batch as wide as the longest."""
    n = [min(len(text.ids), length) for text in texts]
    ids = torch.full((len(texts), max(n)), fill, dtype=torch.long)
    for row, text, width in zip(ids, texts, n, strict=True):
        row[:width] = torch.from_numpy(text.ids[:width])
    return TextBatch(
        ids,
        torch.tensor([text.n_prompt for text in texts]),
        torch.tensor(n),
        torch.tensor([text.domain for text in texts]),
    )


class TextBatches:
    """Batches of a split's texts in an order that `seed` decides, epoch after epoch; each process gets its share.

    Texts whose prompt leaves no room for an answer within `length` are passed over.
    """

    def __init__(
        self, texts: Texts, split: str, batch: int, length: int, seed: int, *, rank: int = 0, world: int = 1
    ) -> None:
        """Raises InputError for numbers that make no batches, and where no text fits."""
        if batch < 1 or batch % world:
            raise InputError(f"a batch of {batch} texts can't be shared by {world} processes: give a multiple of that")
        fitting = texts.fitting(split, length)
        if not fitting:
            raise InputError(f"{texts.folder}: no prompt of its {split} texts is shorter than {length}: give a length "
                             "that leaves room for answers")  # fmt: skip
        self._texts, self._split, self._length = texts, split, length
        self._fitting, self._seed, self._batch = fitting, seed, batch
        self._mine = range(rank * batch // world, (rank + 1) * batch // world)
        self._given = 0  # texts, over all processes
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))  # of an epoch
        self._identity: dict[str, Any] = {
            "texts": texts.fingerprint, "split": split, "batch": batch, "length": length, "seed": seed,
        }  # fmt: skip

    def next(self) -> TextBatch:
        """The next batch, this process's part of it."""
        rows = [self._row(self._given + i) for i in self._mine]
        self._given += self._batch
        return text_batch(rows, self._length, self._texts.meta.end)

    def _row(self, i: int) -> Text:
        epoch, at = divmod(i, len(self._fitting))
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._fitting))
        return self._texts.text(self._split, self._fitting[int(self._order[1][at])])

    def state(self) -> dict[str, Any]:
        """Where the batches stand, JSON-like."""
        return {**self._identity, "given": self._given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises InputError for that of other batches, naming what differs."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise InputError(
                    f"the checkpoint's batches differ in {name} ({state.get(name)!r}, not {value!r}): start another run"
                )
        given = state.get("given")
        if type(given) is not int or given < 0:
            raise InputError("the checkpoint does not say where its batches stand: start another run")
        self._given = given


def held_out(texts: Texts, n: int, batch: int, length: int) -> list[TextBatch]:
    """Up to `n` held-out texts, evenly spread, in batches of `batch`; the same ones each time."""
    fitting = texts.fitting("valid", length)
    if not fitting:
        raise InputError(f"{texts.folder}: no held-out prompt is shorter than {length}: give a greater length")
    chosen = [fitting[i] for i in np.unique(np.linspace(0, len(fitting) - 1, min(n, len(fitting))).astype(int))]
    rows = [texts.text("valid", i) for i in chosen]
    return [text_batch(rows[at : at + batch], length, texts.meta.end) for at in range(0, len(rows), batch)]
