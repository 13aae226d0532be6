"""Makes a data folder of text: learns or takes a tokenizer, parts each domain's documents, writes their ids.

Whether a document is held out is decided by its own hash, so it stays on its side when others come and go, and no
document is on both sides. A document that a domain has twice counts once. Documents stand in the order of their hashes,
which mixes sources. Files are read three times (hashes, vocabulary, ids) rather than kept: memory is for a few
megabytes of text and a few numbers a document.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sluice.errors import InputError
from sluice.train.documents import find_files, read_documents
from sluice.train.shards import META, SPLITS, Meta, Shard, check_domain, ids_file, ids_type, sha256, starts_file
from sluice.train.tokenizer import encode, end_id, fingerprint, open_tokenizer, save_tokenizer, train_tokenizer

LEARN_FROM = 1 << 24  # characters of each domain that a vocabulary is learnt on, at most
_AT_ONCE = 1 << 22  # characters encoded in one call

Progress = Callable[[float, float], None]  # (done, total), in any one unit


@dataclass
class _Domain:
    """A domain's files, and which of its documents are held out, by hash."""

    name: str
    files: list[Path]
    held_out: dict[bytes, bool] = field(default_factory=dict)
    duplicates: int = 0

    @classmethod
    def scan(cls, name: str, paths: Sequence[str | Path], seed: int, valid_share: float) -> _Domain:
        """Reads all files once. Raises InputError for a domain with too few documents to hold one out."""
        self = cls(check_domain(name), find_files(paths))
        limit = int(valid_share * (1 << 64))
        ranks: dict[bytes, int] = {}
        for _, text in _documents(self.files):
            digest = _digest(text)
            if digest in ranks:
                self.duplicates += 1
            ranks[digest] = int.from_bytes(hashlib.sha256(b"%d " % seed + digest).digest()[:8], "big")
        if len(ranks) < 2:
            what = "no document" if not ranks else "a single document, of which none could be held out"
            raise InputError(f"domain {name}: holds {what}: give it more text")
        self.held_out = {digest: rank < limit for digest, rank in ranks.items()}
        if not any(self.held_out.values()):  # too few for chance to part them
            self.held_out[min(ranks, key=ranks.__getitem__)] = True
        elif all(self.held_out.values()):
            self.held_out[max(ranks, key=ranks.__getitem__)] = False
        return self

    def documents(self) -> Iterator[tuple[Path, bytes, str]]:
        """(file, hash, text) of each document, once. Raises InputError where files changed since they were scanned."""
        seen: set[bytes] = set()
        for file, text in _documents(self.files):
            digest = _digest(text)
            if digest not in self.held_out:
                raise InputError(f"{file}: changed while it was read: try again")
            if digest not in seen:
                seen.add(digest)
                yield file, digest, text

    def learnable(self) -> Iterator[str]:
        """Documents to learn a vocabulary on: none that is held out."""
        room = LEARN_FROM
        for _, digest, text in self.documents():
            if not self.held_out[digest]:
                yield text[:room]
                room -= len(text)
                if room <= 0:
                    return


def prepare(
    out: str | Path, domains: Mapping[str, Sequence[str | Path]], *, vocab: int | None = None,
    tokenizer: str | Path | None = None, valid_share: float = 0.05, seed: int = 0, force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Meta:  # fmt: skip
    """Write the data folder `out` of each domain's files and folders (documents.find_files), whole or not at all.

    `vocab`: learn a tokenizer of so many tokens; or `tokenizer`: take that of a model's or data folder, or a
    tokenizer.json. `valid_share` of the documents are held out, at least one of each domain. `force` replaces a data
    folder. Raises InputError, naming the domain or file, for what can't be made into one.
    """
    out = Path(out)
    _check(out, domains, vocab, tokenizer, valid_share, force)
    engine = None if tokenizer is None else open_tokenizer(Path(tokenizer))
    found = [_Domain.scan(name, paths, seed, valid_share) for name, paths in domains.items()]
    if engine is None:
        assert vocab is not None
        engine = train_tokenizer((text for domain in found for text in domain.learnable()), vocab)
    temporary = out.absolute().with_name(f".sluice-data-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        save_tokenizer(engine, temporary)
        total = float(sum(file.stat().st_size for domain in found for file in domain.files))
        done = 0.0
        shards: dict[str, dict[str, Shard]] = {}
        for domain in found:
            size = float(sum(file.stat().st_size for file in domain.files))
            shards[domain.name] = _write_domain(
                temporary, domain, engine, lambda share, done=done, size=size: progress(done + share * size, total)
            )
            done += size
        duplicates = {domain.name: domain.duplicates for domain in found}
        meta = Meta(
            engine.get_vocab_size(), end_id(engine), fingerprint(engine), seed, valid_share, duplicates, shards
        )  # fmt: skip
        meta.write(temporary)
        _take_place(temporary, out)
    except OSError as error:
        raise InputError(f"{out}: can't be written ({error.strerror}): name another place") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # a complete folder no longer has this name
    return meta


def _check(
    out: Path, domains: Mapping[str, Sequence[str | Path]], vocab: int | None, tokenizer: str | Path | None,
    valid_share: float, force: bool,
) -> None:  # fmt: skip
    """Raise InputError where `prepare` could not succeed, as far as can be said before reading text."""
    if not domains:
        raise InputError("no domain is given: name at least one, and its text")
    if len({name.casefold() for name in domains}) < len(domains):
        raise InputError("two domains differ in case alone: give them different names")
    if (vocab is None) == (tokenizer is None):
        raise InputError("give either the size of a vocabulary to learn or a tokenizer to take")
    if not 0 < valid_share < 1:
        raise InputError(f"a held-out share of {valid_share} is out of range: give more than 0 and less than 1")
    if not out.name or not out.absolute().parent.is_dir():
        raise InputError(f"{out}: there is no directory {out.absolute().parent}: make it first")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise InputError(f"{out}: exists already: name another folder, or overwrite it with --force")
        if not (out / META).is_file():
            raise InputError(f"{out}: is not a data folder, so it is not overwritten: name another")
    elif out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file: name a folder to make")


def _take_place(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; a data folder that is there goes, and comes back if that fails."""
    old = folder.with_name(folder.name + "-old")
    if out.exists():
        out.rename(old)
    try:
        folder.rename(out)
    except OSError:
        with suppress(OSError):
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _documents(files: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    for file in files:
        for text in read_documents(file):
            yield file, text


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def _write_domain(
    folder: Path, domain: _Domain, engine: Tokenizer, progress: Callable[[float], None]
) -> dict[str, Shard]:  # fmt: skip
    """Write both splits of a domain. `progress` is told the share of its documents that are done."""
    kind = ids_type(engine.get_vocab_size())
    spools = {split: folder / f"{split}.spool" for split in SPLITS}  # ids in the order in which they are read
    index: dict[str, list[tuple[bytes, int, int]]] = {split: [] for split in SPLITS}  # hash, tokens, bytes
    with ExitStack() as stack:
        files = {split: stack.enter_context(path.open("wb")) for split, path in spools.items()}
        done = 0
        for part in _chunks(domain.documents()):
            for (digest, text), ids in zip(part, encode(engine, [text for _, text in part]), strict=True):
                split = SPLITS[domain.held_out[digest]]
                index[split].append((digest, len(ids), len(text.encode())))
                files[split].write(ids.astype(kind).tobytes())
            done += len(part)
            progress(done / len(domain.held_out))
    made: dict[str, Shard] = {}
    for split, spool in spools.items():
        made[split] = _write_split(folder, domain.name, split, spool, index[split], end_id(engine), kind)
        spool.unlink()
    return made


def _write_split(
    folder: Path, domain: str, split: str, spool: Path, index: Sequence[tuple[bytes, int, int]], end: int, kind: type
) -> Shard:  # fmt: skip
    """Write a split's documents, which `spool` holds in the order of `index`, in the order of their hashes."""
    lengths = np.array([n for _, n, _ in index], np.int64)
    at = np.concatenate([[0], np.cumsum(lengths)])  # where each document stands in the spool
    order = sorted(range(len(index)), key=lambda i: index[i][0])
    starts = np.concatenate([[0], np.cumsum(lengths[order] + 1)])
    ids_path, starts_path = folder / ids_file(domain, split), folder / starts_file(domain, split)
    ids = np.lib.format.open_memmap(ids_path, mode="w+", dtype=kind, shape=(int(starts[-1]) + 1,))
    read = np.memmap(spool, dtype=kind, mode="r") if at[-1] else np.zeros(0, kind)
    for i, start in zip(order, starts[:-1], strict=True):
        ids[start] = end
        ids[start + 1 : start + 1 + lengths[i]] = read[at[i] : at[i + 1]]
    ids[starts[-1]] = end
    ids.flush()
    n_tokens = len(ids)
    del ids, read  # or the files could not be renamed everywhere
    np.save(starts_path, starts.astype(np.int64))
    return Shard(n_tokens, len(index), sum(n for _, _, n in index), sha256(ids_path), sha256(starts_path))


def _chunks(documents: Iterator[tuple[Path, bytes, str]]) -> Iterator[list[tuple[bytes, str]]]:
    """(hash, text) in lists of about _AT_ONCE characters."""
    part: list[tuple[bytes, str]] = []
    size = 0
    for _, digest, text in documents:
        part.append((digest, text))
        size += len(text)
        if size >= _AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part
