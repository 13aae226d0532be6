"""Cuts held-out text into passages whose ids a text alone says again; knows no model.

Documents of a split follow each other within a passage with a blank line between them, so no passage needs special
tokens: a program that is given its text gets its ids. Passages of the domains take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sluice.errors import InputError
from sluice.train.shards import Ids, Tokens
from sluice.train.tokenizer import encode

LEAST = 16  # ids; a shorter passage says little
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class Passage:
    """`ids` [n] int64 are the tokenizer's of `text`, n at most the length asked for."""

    domain: str
    text: str
    ids: Ids


def passages(tokens: Tokens, split: str, per_domain: int, length: int) -> list[Passage]:
    """Up to `per_domain` passages of each domain of up to `length` ids, evenly spread over a split, domains in turn.

    The same for the same data. A split that holds fewer gives as many as it holds, without overlap. Raises InputError,
    naming the domain, for one too short for a passage.
    """
    if per_domain < 1 or length < LEAST:
        raise InputError(f"{per_domain} passages of {length} tokens are none: give at least 1, and {LEAST} tokens")
    found = {domain: _of_domain(tokens, domain, split, per_domain, length) for domain in tokens.domains}
    most = max(map(len, found.values()))
    return [some[i] for i in range(most) for some in found.values() if i < len(some)]


def _of_domain(tokens: Tokens, domain: str, split: str, per_domain: int, length: int) -> list[Passage]:
    ids, tokenizer = tokens.ids(domain, split), tokens.tokenizer()
    n = min(per_domain, len(ids) // length)
    if not n:
        raise InputError(
            f"domain {domain}: its {split} split has {len(ids)} tokens, too few for a passage of {length}: give it "
            "more text, or ask for shorter passages"
        )
    found: list[Passage] = []
    for start in np.linspace(0, len(ids) - length, n).astype(np.int64).tolist():
        pieces = np.split(raw := ids[start : start + length], np.flatnonzero(raw == tokens.end))
        texts = [tokenizer.decode([i for i in piece.tolist() if i != tokens.end]) for piece in pieces]
        # a passage may begin or end within a character
        text = _BETWEEN.join(text for each in texts if (text := each.strip("�"))).strip()
        (again,) = encode(tokenizer, [text])
        if len(again) > length:  # other cuts at the seams: end before the last
            text = tokenizer.decode(again[:length].tolist()).rstrip("�")
            (again,) = encode(tokenizer, [text])
        if LEAST <= len(again) <= length:
            found.append(Passage(domain, text, again.astype(np.int64)))
    if not found:
        raise InputError(f"domain {domain}: its {split} split gives no passage of {length} tokens: give it more text")
    return found


def write_passages(found: Sequence[Passage], folder: Path) -> list[tuple[str, Path]]:
    """Write each text to a file of its own in `folder`, which is made; returns (domain, file), in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[tuple[str, Path]] = []
    for i, passage in enumerate(found):
        file = folder / f"{i:03d}-{passage.domain}.txt"
        file.write_text(passage.text, encoding="utf-8", newline="\n")
        files.append((passage.domain, file))
    return files
