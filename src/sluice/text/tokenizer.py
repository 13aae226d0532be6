"""Text to token ids and back, from GGUF metadata, with llama.cpp's ids. It knows no chat format and no model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsIndex

from tokenizers import Regex
from tokenizers import Tokenizer as _Engine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as _Sequence

from sluice.errors import InputError, ModelFileError
from sluice.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from sluice.text.spm import SPACE, SpmEncoder
from sluice.text.vocabulary import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary, replace_surrogates

_C_SPACES = " \t\n\v\f\r"  # what C's isspace() says in llama.cpp, which strips bytes
_BPE_MODELS = ("gpt2", "gemma4")
MODELS = (*_BPE_MODELS, "llama")
_NEWLINES = re.compile("(\n+)")
LONG_TEXT = 10_000  # characters that BPE takes some milliseconds for
_GUARD = "\udfff"  # a lone surrogate, which no text has once they are replaced


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself if printable Latin-1, else U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """A model file's tokenizer; build it with `from_metadata`.

    `n_vocab`: tokens in the file's list. `bos_id`: None when the file has none. `eos_ids`: every token that ends
    generation. `chat_template`: the file's Jinja source, None when it has none. `add_bos`: whether a prompt starts with
    BOS by default. Safe to use from several threads.
    """

    def __init__(
        self, vocabulary: Vocabulary, encoder: _BpeEncoder | SpmEncoder, *, add_bos: bool, spaces: bool, prefix: bool,
        chat_template: str | None,
    ) -> None:  # fmt: skip
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._spaces = spaces  # U+2581 stands for a space
        self._prefix = prefix  # text at the start, and after a special token, gets a space before it
        self._bytes = _byte_alphabet()
        kinds, texts = vocabulary.kinds, vocabulary.texts
        special = [(texts[i], i) for i in vocabulary.special_ids]
        self._special = special
        self._user_defined = [(text, i) for text, i in special if kinds[i] == USER_DEFINED]
        controls = (text for text, i in special if kinds[i] != USER_DEFINED and len(text) > 1)
        self._guarded = [(text, text[0] + _GUARD + text[1:]) for text in controls]
        self.add_bos = add_bos
        self.n_vocab = len(texts)
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.chat_template = chat_template

    @classmethod
    def from_metadata(cls, meta: Mapping[str, object]) -> Tokenizer:
        """Builds the tokenizer that GGUF key/value metadata describe (`tokenizer.ggml.*`, `tokenizer.chat_template`).

        Raises ModelFileError for a kind of tokenizer or a pre-tokenizer that Sluice does not know, and for metadata
        that contradict themselves.
        """
        vocabulary = Vocabulary.from_metadata(meta)
        template = meta.get("tokenizer.chat_template")
        template = template if isinstance(template, str) else None
        # Control tokens are found by their text before merging, or not at all: merges must never arrive at one.
        usable = {text: i for text, i in vocabulary.ids.items() if vocabulary.kinds[i] not in (CONTROL, UNKNOWN)}
        if vocabulary.model == "llama":
            return cls(
                vocabulary, SpmEncoder(usable, vocabulary.scores, vocabulary.unk_id),
                add_bos=_flag(meta, "add_bos_token", True), spaces=True, chat_template=template,
                prefix=_flag(meta, "add_space_prefix", True),
            )  # fmt: skip
        if vocabulary.model not in _BPE_MODELS:
            raise ModelFileError(
                f"tokenizer model {vocabulary.model!r} is not one Sluice knows: {', '.join(MODELS)}; use another model"
            )
        name = "gemma4" if vocabulary.model == "gemma4" else meta.get("tokenizer.ggml.pre") or "default"
        pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if pre is None:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise ModelFileError(f"pre-tokenizer {name!r} is not one Sluice knows: {known}; use another model")
        add_bos = _flag(meta, "add_bos_token", pre.add_bos) or pre.newline_runs  # gemma 4 files deny the BOS they need
        return cls(
            vocabulary, _BpeEncoder(usable, _merges(meta, usable), pre),
            add_bos=add_bos, spaces=not pre.byte_level, chat_template=template,
            prefix=_flag(meta, "add_space_prefix", False) and not pre.byte_level,
        )  # fmt: skip

    def encode(self, text: str, *, special: bool = False, bos: bool | None = None) -> list[int]:
        """The ids of `text`.

        `special`: the text of control tokens (`<|im_start|>`) stands for those tokens, as in a rendered chat template;
        without it such text is ordinary text, so what a user types can't inject them. User-defined tokens, which are
        content, are found either way. `bos`: put BOS first (None: as the file says). No EOS is ever added, whatever
        the file says: a prompt is there to be continued. Surrogates become U+FFFD. Raises InputError for `bos=True`
        when the vocabulary has no BOS.
        """
        out: list[int] = []
        if special:
            text = _GUARD.join(replace_surrogates(part) for part in text.split(_GUARD))
        else:
            text = replace_surrogates(text)
        if self.add_bos if bos is None else bos:
            if self.bos_id is not None:
                out.append(self.bos_id)
            elif bos:
                raise InputError("this model's vocabulary has no BOS token; leave bos unset")
        after_special = True
        for fragment in self._partition(text, self._special if special else self._user_defined):
            if isinstance(fragment, int):
                out.append(fragment)
                after_special = True
                continue
            fragment = fragment.replace(_GUARD, "")
            if self._prefix and after_special:
                fragment = " " + fragment
            if self._spaces:
                fragment = fragment.replace(" ", SPACE)
            out += self._encoder.encode(fragment)
            after_special = False
        return out

    def guarded(self, text: str) -> str:
        """`text`, marked so that control tokens it spells stay text in what `encode` with `special` is given."""
        text = replace_surrogates(text)
        for token, marked in self._guarded:
            text = text.replace(token, marked)
        return text

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        The inverse of `encode`: the space that it puts before text (SentencePiece-style files) is taken away again.
        `skip_special` leaves out control tokens. Raises InputError for an id outside the vocabulary.
        """
        out = bytearray()
        after_special = True
        for i in ids:
            piece = self.token_bytes(i)
            control = self.is_control(i)
            if self._prefix and after_special and not control:
                piece = piece.removeprefix(b" ")
            after_special = control or self._vocabulary.kinds[i] == USER_DEFINED
            if not (skip_special and control):
                out += piece
        return out.decode("utf-8", "replace")

    def token_bytes(self, i: SupportsIndex) -> bytes:
        """The exact bytes token `i` stands for; a special token's text. Raises InputError outside the vocabulary."""
        i = self._checked(i)
        text, kind = self._vocabulary.texts[i], self._vocabulary.kinds[i]
        if kind == BYTE:
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                return text.encode()
        if kind == UNUSED:
            return b""
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            return text.encode()
        if self._spaces:
            return text.replace(SPACE, " ").encode()
        table = self._bytes
        return b"".join(bytes([table[c]]) if c in table else c.encode() for c in text)

    def is_control(self, i: SupportsIndex) -> bool:
        """Whether token `i` steers the model and is no content. Raises InputError outside the vocabulary."""
        return self._vocabulary.kinds[self._checked(i)] in (CONTROL, UNKNOWN)

    def _checked(self, i: SupportsIndex) -> int:
        i = i.__index__()
        if not 0 <= i < self.n_vocab:
            raise InputError(f"token id {i} is outside the vocabulary; ids go from 0 to {self.n_vocab - 1}")
        return i

    def _partition(self, text: str, special: Sequence[tuple[str, int]]) -> list[str | int]:
        """`text` with the given tokens cut out: longest token first, each from the left, as llama.cpp does."""
        parts: list[str | int] = [text] if text else []
        for token, i in special:
            if token not in text:
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int) or token not in part:
                    cut.append(part)
                    continue
                while part:
                    head, found, part = part.partition(token)
                    if head:
                        cut.append(head)
                    if found:
                        cut.append(i)
                        if i in self._vocabulary.strip_after:
                            part = part.lstrip(_C_SPACES)
            parts = cut
        return parts


class _BpeEncoder:
    """BPE over pieces cut by a pre-tokenizer, done by `tokenizers`."""

    def __init__(self, ids: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer) -> None:
        self._ids = ids
        self._newline_runs = pre.newline_runs
        model = BPE(
            vocab=ids,
            merges=merges,
            ignore_merges=pre.ignore_merges,
            byte_fallback=not pre.byte_level,
        )
        self._engine = _Engine(model)
        steps: list[Split | ByteLevel] = [Split(Regex(pattern), behavior="isolated") for pattern in pre.splits]
        if pre.byte_level:
            steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
        self._engine.pre_tokenizer = _Sequence(steps)

    def encode(self, text: str) -> list[int]:
        if not self._newline_runs:
            return self._encode(text)
        out: list[int] = []
        for piece in filter(None, _NEWLINES.split(text)):
            whole = self._ids.get(piece) if piece[0] == "\n" else None
            out += [whole] if whole is not None else self._encode(piece)
        return out

    def _encode(self, text: str) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._engine.encode(text, add_special_tokens=False).ids
        # of the two, this lets other threads run meanwhile
        return self._engine.encode_batch([text], add_special_tokens=False)[0].ids


def _flag(meta: Mapping[str, object], name: str, default: bool) -> bool:
    value = meta.get(f"tokenizer.ggml.{name}")
    return default if value is None else bool(value)


def _merges(meta: Mapping[str, object], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merge list as pairs, from either spelling ("a b", or ["a", "b"]).

    Merges whose parts or union are no tokens are left out: nothing they make could be given an id.
    """
    raw = meta.get("tokenizer.ggml.merges")
    if raw is None or isinstance(raw, (str, bytes)) or not isinstance(raw, Iterable):
        raise ModelFileError("the file holds no BPE merges (tokenizer.ggml.merges); convert the model again")
    merges: dict[tuple[str, str], None] = {}  # a pair named twice counts where it is named first
    for merge in raw:
        if isinstance(merge, str):
            left, _, right = merge[1:].partition(" ")  # the left part may itself start with a space
            left = merge[:1] + left
        else:
            try:
                left, right = merge
            except (TypeError, ValueError):
                left = right = None
            if not (isinstance(left, str) and isinstance(right, str)):
                raise ModelFileError("tokenizer.ggml.merges holds something else than pairs; convert the model again")
        if left in ids and right in ids and left + right in ids:
            merges.setdefault((left, right))
    return list(merges)
