"""What the tests of reply formats share: tiny vocabularies with a format's tokens, and replies cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from sluice.server.formats import Format, check_tools
from sluice.server.splitter import Delta, Splitter
from sluice.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
EOS = "<|im_end|>"
WORDS = (
    '{"', '":', '": "', '", "', "name", "arguments", " the", "\n\n", "    ", "true", "false", "0", "12", '"}', "}}",
    "é",
)  # fmt: skip


def _alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    stand_in = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return [stand_in[b] for b in range(256)]


@lru_cache(maxsize=64)
def tokenizer(control: tuple[str, ...] = (), user: tuple[str, ...] = (), *, spaces: bool = False) -> Tokenizer:
    """Single bytes, a few words, EOS, and special tokens with these texts; `spaces`: as SentencePiece writes them."""
    if spaces:
        words = [word.replace(" ", "\u2581") for word in (*WORDS, " ", *map(chr, range(33, 127)))]
        tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *dict.fromkeys(words)]
        kinds = [UNKNOWN, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 257)]
    else:
        alphabet = _alphabet()
        words = ["".join(alphabet[b] for b in word.encode()) for word in WORDS]
        tokens = list(dict.fromkeys([*alphabet, *words]))
        kinds = [NORMAL] * len(tokens)
    special = [(EOS, CONTROL), *((text, CONTROL) for text in control), *((text, USER_DEFINED) for text in user)]
    tokens += [text for text, _ in special]
    kinds += [kind for _, kind in special]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if spaces else "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": tokens.index(EOS),
    }
    if spaces:
        metadata["tokenizer.ggml.scores"] = [-float(i) for i in range(len(tokens))]
        metadata["tokenizer.ggml.bos_token_id"] = metadata["tokenizer.ggml.unknown_token_id"] = 0
    else:
        metadata["tokenizer.ggml.merges"] = []
    return Tokenizer.from_metadata(metadata)


def function(name: str, properties: dict[str, Any], required: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


WEATHER = function("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, ["city"])
WRITE = function(
    "write_file",
    {"path": {"type": "string"}, "text": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    ["path", "text"],
)
TOOLS = check_tools([WEATHER, WRITE])


@dataclass
class Reply:
    """What a splitter made of a reply."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def take(self, deltas: Iterable[Delta]) -> None:
        for kind, text, index, id in deltas:
            if kind == "content":
                self.content += text
            elif kind == "reasoning":
                self.reasoning += text
            elif kind == "name":
                assert index == len(self.calls)
                self.calls.append((text, ""))
                self.ids.append(id)
            else:
                name, arguments = self.calls[index]
                self.calls[index] = (name, arguments + text)

    @property
    def parts(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.content, self.reasoning, self.calls


def split(splitter: Splitter, pieces: Iterable[str]) -> Reply:
    reply = Reply()
    for piece in pieces:
        reply.take(splitter.push(piece))
    reply.take(splitter.finish())
    assert splitter.called == bool(reply.calls)
    return reply


def cuts(text: str, seed: int) -> list[str]:
    """`text` in pieces: seed 0 whole, 1 character by character, else at random."""
    if seed == 0:
        return [text]
    if seed == 1:
        return list(text)
    rng = np.random.default_rng(seed)
    at = sorted(rng.choice(len(text) + 1, size=int(rng.integers(1, max(2, len(text) // 3))), replace=True))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def replies(format: Format, text: str, *, tail: str = "", tools: Any = TOOLS, seeds: int = 12) -> Reply:
    """The reply in every cutting; all must be the same."""
    vocabulary = tokenizer()

    def one(seed: int) -> Reply:
        return split(format.splitter(vocabulary, prompt_tail=tail, tools=tools), cuts(text, seed))

    first = one(0)
    for seed in range(1, seeds):
        assert one(seed).parts == first.parts, f"cut {seed}: {cuts(text, seed)}"
    return first


def sample(
    mask: Any, vocabulary: Tokenizer, rng: np.random.Generator, most: int = 600, *, special: float = 6
) -> tuple[str, bool]:
    """Draws tokens that `mask` allows, at temperature 1.5 from random logits; the text, and whether it came to an end.

    Special tokens and what closes JSON become likelier as time passes, as with a model that wants to end;
    the former by 1 in `special` steps.
    """
    out: list[int] = []
    for step in range(most):
        if mask.ended:
            return _text(vocabulary, out), True
        logits = rng.normal(scale=2, size=vocabulary.n_vocab).astype(np.float32)
        for text, bonus in (('"', 6), ("}", 6), ("]", 6), (">", 3), ("<", 3)):
            logits[vocabulary.encode(text, bos=False)[-1]] += bonus * step / 60
        logits[_first_special(vocabulary) :] += step / special
        mask.allow(logits)
        assert np.isfinite(logits).any()
        weights = np.exp((logits - logits.max()) / 1.5)
        token = int(rng.choice(weights.size, p=weights / weights.sum()))
        mask.accept(token)
        if token in vocabulary.eos_ids:
            return _text(vocabulary, out), True
        out.append(token)
    return _text(vocabulary, out), False


def _first_special(vocabulary: Tokenizer) -> int:
    return vocabulary.encode(EOS, special=True, bos=False)[0]


def _text(vocabulary: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(vocabulary.token_bytes(i) for i in ids).decode("utf-8", "replace")
