"""A vocabulary as GGUF metadata describe it: pieces, kinds, special ids. It knows nothing of how text becomes ids.

Source: the GGUF page's `tokenizer.ggml.*` keys, and llama.cpp's llama-vocab.cpp for what those keys leave unsaid
(defaults per tokenizer model, tokens recognised by their text).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.errors import ModelFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Texts that end a turn or a document, whatever ids the file names.
_END_OF_GENERATION = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<\uff5cend\u2581of\u2581sentence\uff5c> [e~["
)
# Fill-in-the-middle tokens. Of each group the first one in the vocabulary counts, unless the file names one by id.
_FILL_IN = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
    "<|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|> "
    "<|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|> "
    "<|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
_ENDING_FILL_IN = ("fim_pad", "fim_rep", "fim_sep")
_DEPRECATED_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss: control-typed, but content

_SURROGATES = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """`text` with every lone surrogate (what undecodable bytes become in a str) as U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _malformed(key: str, want: str) -> ModelFileError:
    return ModelFileError(f"tokenizer metadata: {key} is not {want}; download or convert the file again")


def _array(meta: Mapping[str, object], key: str) -> Sequence[Any] | None:
    value = meta.get(key)
    if value is None:
        return None
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise _malformed(key, "an array")
    return value  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Vocabulary:
    """`texts[id]` is a token's text as the file spells it; `kinds[id]` one of the kinds above.

    `ids` is the inverse of `texts`. `strip_after` holds special tokens that swallow the white space after them.
    """

    model: str
    texts: list[str]
    kinds: list[int]
    scores: list[float]
    ids: dict[str, int]
    bos_id: int | None
    unk_id: int | None
    eos_ids: frozenset[int]
    strip_after: frozenset[int]

    @property
    def special_ids(self) -> list[int]:
        """Tokens that are found in text before anything else happens to it, longest text first (in bytes)."""
        found = [i for i, kind in enumerate(self.kinds) if kind in (CONTROL, USER_DEFINED, UNKNOWN)]
        return sorted(found, key=lambda i: -len(self.texts[i].encode()))

    @classmethod
    def from_metadata(cls, meta: Mapping[str, object]) -> Vocabulary:
        """Raises ModelFileError when the metadata hold no usable vocabulary."""
        model = meta.get("tokenizer.ggml.model")
        raw = _array(meta, "tokenizer.ggml.tokens")
        if not isinstance(model, str) or raw is None or len(raw) == 0:
            raise ModelFileError("the file holds no tokenizer (tokenizer.ggml.model, .tokens); convert the model again")
        texts: list[str] = []
        ids: dict[str, int] = {}
        for i, text in enumerate(raw):
            if not isinstance(text, str):
                raise _malformed("tokenizer.ggml.tokens", "an array of strings")
            clean = replace_surrogates(text) or f"[EMPTY_{i}]"
            if "\ufffd" in clean and clean in ids:
                clean = f"[INVALID_{i}]"  # was not UTF-8 in the file; what replaced its bytes names another token
            if ids.setdefault(clean, i) != i:
                raise ModelFileError(
                    f"tokens {ids[clean]} and {i} of the vocabulary are the same text; convert the model again"
                )
            texts.append(clean)
        n = len(texts)
        kinds = cls._numbers(meta, "tokenizer.ggml.token_type", n, int) or [NORMAL] * n
        scores = cls._numbers(meta, "tokenizer.ggml.scores", n, float) or [0.0] * n
        special = {name: cls._special_id(meta, name, n) for name in ("bos", "eos", "eot", "eom", "unknown")}
        if model == "llama":
            for name, default in (("bos", 1), ("eos", 2), ("unknown", 0)):
                if special[name] is None and default < n:
                    special[name] = default
        ends = {special[name] for name in ("eos", "eot", "eom")}
        for name, candidates in _FILL_IN.items():
            found = cls._special_id(meta, name, n)
            if found is None and name in _DEPRECATED_KEYS:
                found = cls._special_id(meta, _DEPRECATED_KEYS[name], n)
            if found is None:
                found = next((ids[text] for text in candidates.split() if text in ids), None)
                if found is not None:
                    kinds[found] = CONTROL
            if name in _ENDING_FILL_IN:
                ends.add(found)
        for text in _END_OF_GENERATION.split():
            if text in ids:
                ends.add(ids[text])
                kinds[ids[text]] = CONTROL
        for text in _ALWAYS_SHOWN:
            if text in ids:
                kinds[ids[text]] = USER_DEFINED
        eos_ids = frozenset(i for i in ends if i is not None)
        eos_ids = cls._drop_false_ends(ids, kinds, eos_ids)
        strip_after: frozenset[int] = frozenset()
        name = str(meta.get("general.name", "")).lower()
        if "phi-3" in name or "phi3" in name:  # their added tokens have rstrip set, which GGUF can't say
            keep = {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
            kept = (CONTROL, USER_DEFINED, UNKNOWN)
            strip_after = frozenset(i for i, kind in enumerate(kinds) if kind in kept and i not in keep)
        return cls(model, texts, kinds, scores, ids, special["bos"], special["unknown"], eos_ids, strip_after)

    @staticmethod
    def _drop_false_ends(ids: dict[str, int], kinds: list[int], eos_ids: frozenset[int]) -> frozenset[int]:
        """Takes out texts that end a turn in other models and not in this one; changes their kind in `kinds`."""

        def has(*texts: str) -> bool:
            return any(ids.get(text) in eos_ids for text in texts)

        call = has("<|call|>", "<|calls|>")
        if has("<|end|>") and call and (has("<|return|>") or has("<|flush|>")):  # gpt-oss, solar: ends a message only
            kinds[ids["<|end|>"]] = USER_DEFINED
            eos_ids -= {ids["<|end|>"]}
        if has("</s>") and has("<|tool_response>"):  # gemma 4: an HTML tag like any other
            kinds[ids["</s>"]] = NORMAL
            eos_ids -= {ids["</s>"]}
        return eos_ids

    @staticmethod
    def _numbers(meta: Mapping[str, object], key: str, n: int, kind: type) -> list[Any] | None:
        values = _array(meta, key)
        if values is None:
            return None
        if len(values) < n:
            raise _malformed(key, f"as long as the vocabulary ({len(values)} of {n})")
        try:
            return [kind(values[i]) for i in range(n)]
        except (TypeError, ValueError, OverflowError):
            raise _malformed(key, "an array of numbers") from None

    @staticmethod
    def _special_id(meta: Mapping[str, object], name: str, n: int) -> int | None:
        """The id under a special token's key; None when absent or outside the vocabulary, as llama.cpp reads it."""
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        try:
            value = int(value)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError, OverflowError):
            raise _malformed(f"tokenizer.ggml.{name}_token_id", "a number") from None
        return value if 0 <= value < n else None
