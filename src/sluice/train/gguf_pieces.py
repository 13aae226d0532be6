"""SentencePiece vocabularies that tokenizer.json spells as BPE with byte fallback, as GGUF has them: by scores.

`tokenizers` merges by a list of pairs, SentencePiece whatever neighbours make the token with the best score. A list
says the same as scores do where every pair of tokens that makes a token is in it, and pairs that make the same one
stand together. Converted SentencePiece models are like that; another list is refused. Knows no files and no special
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SPACE = "\u2581"
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
NEVER = -1e9  # the score of what no merge makes: single characters, which need none


_SPACED = "a text that begins with a space gets no other in front, which it does in GGUF"
_ALIKE = {"always": _SPACED, "first": f"{_SPACED}; nor does text after a control token"}


class NotPieces(ValueError):
    """What keeps a BPE from being a SentencePiece vocabulary, as the end of "the tokenizer …"."""


def scores(texts: Sequence[str], normal: frozenset[int], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Each token's score: minus its place among the tokens that merges make. `normal` are the ids that text may become.

    Raises NotPieces.
    """
    ids = {texts[id]: id for id in normal}
    there = set(texts)
    if missing := [byte for byte in BYTES if byte not in there]:
        raise NotPieces(f"has no token {missing[0]}: a character that it doesn't know has no spelling")
    places: dict[str, int] = {}
    last: str | None = None
    for left, right in merges:
        made = left + right
        if any(part not in ids for part in (left, right, made)):
            raise NotPieces(f"merges {ascii(made)[:40]}, of which a part or the whole is no token")
        if made != last and made in places:
            raise NotPieces(f"merges pairs that make {ascii(made)[:40]} at different ranks")
        places.setdefault(made, len(places))
        last = made
    listed = {(left, right) for left, right in merges}
    for text in ids:
        if len(text) > 1 and text not in places:
            raise NotPieces(f"has the token {ascii(text)[:40]}, which no merge makes")
        for i in range(1, len(text)):
            if text[:i] in ids and text[i:] in ids and (text[:i], text[i:]) not in listed:
                raise NotPieces(f"does not merge {ascii(text[:i])[:40]} and {ascii(text[i:])[:40]}, which make a token")
    return [-float(places[text]) if text in places else NEVER for text in texts]


def space_prefix(normalizer: Sequence[Mapping[str, Any]], cuts: Sequence[Mapping[str, Any]]) -> tuple[bool, str | None]:
    """Of a normaliser's and a pre-tokenizer's steps: whether texts get a space in front, and where GGUF does otherwise.

    Raises NotPieces for steps that do more than SentencePiece's treatment of spaces.
    """
    kinds = [step.get("type") for step in (*normalizer, *cuts)]
    if kinds == ["Metaspace"]:
        (step,) = cuts
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        if step.get("replacement") != SPACE or step.get("split", True) or scheme not in ("always", "first", "never"):
            raise NotPieces(f"cuts text by {ascii(dict(step))[:90]}, which GGUF has no name for")
        return scheme != "never", _ALIKE.get(scheme)
    prepends = kinds[:1] == ["Prepend"] and normalizer[0].get("prepend") == SPACE
    replaces = bool(kinds) and kinds[-1] == "Replace" and not cuts
    if not replaces or len(kinds) != 1 + prepends:
        raise NotPieces(f"treats text by {ascii(kinds)[:60]}, which GGUF has no name for")
    step = normalizer[-1]
    if step.get("pattern") != {"String": " "} or step.get("content") != SPACE:
        raise NotPieces(f"replaces {ascii(step.get('pattern'))[:40]} in texts, which GGUF has no name for")
    return prepends, None
