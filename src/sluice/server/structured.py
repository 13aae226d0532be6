"""Keeps generated tokens inside a grammar, with llguidance. It knows JSON schemas and vocabularies, no chat format.

A grammar is text in llguidance's Lark dialect, built with `Grammar`, compiled once per request and copied for each
choice. A schema is the client's and may be hostile: its size and depth are checked here before llguidance sees it,
references leave no document, and llguidance works within limits of its own (LIMITS); what it refuses is an InputError.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sluice.errors import InputError, SluiceError
from sluice.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_BYTES = 128 << 10
MAX_SCHEMA_NODES = 4096  # objects, lists and values of a schema
MAX_SCHEMA_DEPTH = 64
# llguidance recurses through schemas, along their references too, at 5 to 8 KB a value, and has no limit to that. A
# thread's usual stack may be as small as 512 KiB; this one's holds all the values that a schema may have.
_STACK_BYTES = 128 << 20
# What compiling and one token may cost: most schemas compile within milliseconds, the worst known in about a second.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# White space between JSON's parts: a blank or two, or one line break and some indentation. A model can't spend its
# answer on more.
JSON_SPACE = r"[ ]{1,2}|\r?\n[ \t]{0,32}"
_ANY = r"(?s:.*)"  # any text; reserved tokens are none
_MARKER = re.compile(rb"<\|[^<>]+\|>|<\xef\xbd\x9c[^<>]+\xef\xbd\x9c>")  # the latter with DeepSeek's wide bars
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

_building, _starting = threading.Lock(), threading.Lock()
T = TypeVar("T")


class GrammarMask:
    """What may come next in one continuation, for the sampler. Not for several threads at a time."""

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab

    @property
    def ended(self) -> bool:
        """Whether the grammar is complete and nothing but the end of the text may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allow(self, logits: np.ndarray) -> None:
        """Sets what may not come next to -inf in `logits`, [n_vocab or more] floats, in place.

        Tokens that end the text stay only where the grammar may end. Raises InputError when the grammar has become
        too large to follow (LIMITS), or when no token of the vocabulary can continue it.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise InputError(f"the grammar can't be followed any further: {_first_line(self._matcher.get_error())}")
        allowed = np.unpackbits(bits, bitorder="little")[: self._n_vocab].view(bool)
        if not allowed.any():
            raise InputError("the grammar allows nothing that the model's vocabulary can spell; simplify the schema")
        np.copyto(logits[: allowed.size], -np.inf, where=~allowed)
        logits[allowed.size :] = -np.inf

    def accept(self, token: int) -> None:
        """Take in the token chosen. Raises InputError for one that `allow` ruled out, and past LIMITS."""
        if self.ended:
            return  # the end of the text
        if not self._matcher.consume_token(token):
            said = _first_line(self._matcher.get_error())
            raise InputError(f"the grammar can't be followed past token {token}: {said}")


class TriggeredMask:
    """Everything is allowed until the token `trigger` comes; from it on a grammar that begins with it, to its end.

    `reasoning`: the tokens that open and close a stretch in which the trigger is only text, and whether it is open.
    """

    def __init__(
        self, start: Callable[[], GrammarMask], trigger: int, *, reasoning: tuple[int | None, int | None, bool]
    ) -> None:
        self._start, self._trigger = start, trigger
        self._open, self._close, self._within = reasoning
        self._mask: GrammarMask | None = None

    ended = False

    def allow(self, logits: np.ndarray) -> None:
        """As GrammarMask's."""
        if self._mask is not None:
            self._mask.allow(logits)

    def accept(self, token: int) -> None:
        """As GrammarMask's."""
        if self._mask is None:
            if token in (self._open, self._close):
                self._within = token == self._open
            elif token == self._trigger and not self._within:
                self._mask = self._start()
        if self._mask is not None:
            self._mask.accept(token)
            if self._mask.ended:
                self._mask = None


class Grammar:
    """Rules in llguidance's Lark dialect for one tokenizer. Every method returns an expression to use in others."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._rules: list[str] = []

    def text(self, text: str) -> str:
        """Exactly this text, spelt in tokens that are content."""
        return json.dumps(text, ensure_ascii=False) if text else '""'

    def marker(self, text: str) -> str:
        """This text as the model writes it: its reserved token if the vocabulary has one, else the text."""
        token = reserved_token(self.tokenizer, text)
        return self.text(text) if token is None else f"<[{token}]>"

    def rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def until(self, marker: str, *, text: str = _ANY) -> str:
        """Text that the regular expression `text` matches, up to the first `marker`, and that marker."""
        if reserved_token(self.tokenizer, marker) is not None:
            return f"({self.rule(f'/{text}/')} {self.marker(marker)})"
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: /{text}/ {self.text(marker)}")
        return self.rule(name, lazy=True)

    def space(self, most: int) -> str:
        """White space, at most so many characters, perhaps none."""
        return f"/[ \\n\\r\\t]{{0,{most}}}/"

    def json(
        self, schema: Mapping[str, Any] | bool, *, strict: bool = False, fallback: bool = False,
        what: str = "the schema",
    ) -> str:  # fmt: skip
        """A JSON value that `schema` allows.

        `strict` refuses keywords that can't be enforced; without it they are left out of account. `fallback`: where
        nothing of the schema can be enforced, any value of its type. Raises InputError, its text beginning with `what`.
        """
        from llguidance import LLMatcher, LLParserLimits

        check_schema(schema, what)
        body: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {"allOf": [schema]}
        body["x-guidance"] = {"whitespace_pattern": JSON_SPACE, "lenient": not strict, "coerce_one_of": True}
        rule = f"%json {json.dumps(body, ensure_ascii=False)}"
        limits = LLParserLimits(**LIMITS)
        error = _on_a_deep_stack(lambda: LLMatcher.validate_grammar(f"start: {rule}", limits=limits))
        if error and not fallback:
            raise InputError(f"{what} can't be enforced: {_first_line(error)}")
        if error:
            kind = body.get("type")
            rule = f"%json {json.dumps({'type': kind} if kind in _TYPES else {})}"
        return self.rule(rule)

    def recursive(self, body: Callable[[str], str]) -> str:
        """A rule whose `body` is given the rule's own name."""
        at = len(self._rules)
        self._rules.append("")
        self._rules[at] = f"r{at}: {body(f'r{at}')}"
        return f"r{at}"

    def compiled(self, start: str, what: str = "the schema") -> Callable[[], GrammarMask]:
        """Makes masks for text that `start` matches. Raises InputError, its text beginning with `what`."""
        from llguidance import LLMatcher, LLParserLimits

        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        seen, limits, n_vocab = vocabulary(self.tokenizer), LLParserLimits(**LIMITS), self.tokenizer.n_vocab
        matcher = _on_a_deep_stack(lambda: LLMatcher(seen, lark, log_level=0, limits=limits))
        if not matcher.is_error():
            matcher.compute_bitmask()  # some contradictions show at the first step only
        if matcher.is_error():
            raise InputError(f"{what} can't be enforced: {_first_line(matcher.get_error())}")
        return lambda: GrammarMask(matcher.deep_copy(), n_vocab)


def check_schema(schema: object, what: str = "the schema") -> None:
    """Raises InputError when `schema` is no JSON schema in outline, or larger or deeper than is taken."""
    if not isinstance(schema, (Mapping, bool)):
        raise InputError(f"{what} is no JSON schema; give an object")
    nodes = 0
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        following: list[Any] = []
        for value in level:
            nodes += 1
            if isinstance(value, Mapping):
                following += value.values()
                if "x-guidance" in value and value is schema:
                    raise InputError(f"{what} holds x-guidance, which is not for clients; leave it out")
            elif isinstance(value, (list, tuple)):
                following += value
        if nodes + len(following) > MAX_SCHEMA_NODES:
            raise InputError(f"{what} holds more than {MAX_SCHEMA_NODES:,} values; simplify it")
        level = following
        if not level:
            break
    else:
        raise InputError(f"{what} nests more than {MAX_SCHEMA_DEPTH} deep; flatten it")
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError):
        raise InputError(f"{what} holds something that is not JSON; give plain JSON") from None
    if size > MAX_SCHEMA_BYTES:
        raise InputError(f"{what} is {size:,} bytes of JSON; give at most {MAX_SCHEMA_BYTES:,}")


@lru_cache(maxsize=4096)
def reserved_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The token with this text that is no content, or the marker of a format; None if the vocabulary has none."""
    token = single_token(tokenizer, text)
    return token if token is not None and _reserved(tokenizer, token) else None


def _reserved(tokenizer: Tokenizer, token: int) -> bool:
    """Whether grammars let this token come only where they name it: control tokens, and those that look like some
    (`<|channel|>`), which files may declare to be content so that they are shown."""
    return tokenizer.is_control(token) or _MARKER.fullmatch(tokenizer.token_bytes(token)) is not None


def single_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The token of any kind that a model writes `text` with; None if it takes several."""
    ids = tokenizer.encode(text, special=True, bos=False) if text else []
    return ids[0] if len(ids) == 1 and tokenizer.token_bytes(ids[0]) == text.encode() else None


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """llguidance's view of `tokenizer`, built when first asked for (about a second for 150,000 tokens) and kept.

    Raises InputError when llguidance is not installed.
    """
    with _building:
        return _vocabulary(tokenizer)


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise InputError("structured output needs llguidance: pip install 'sluice[serve]'") from None
    ends = sorted(tokenizer.eos_ids) or [tokenizer.n_vocab]  # without any, one that no model can choose
    return LLTokenizer(_Wrapped(tokenizer, ends[0]), n_vocab=None, eos_token=ends)  # type: ignore[arg-type]


class _Wrapped:
    """What llguidance asks of a tokenizer (its TokenizerWrapper, by shape): token bytes, special ids, encoding."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        self._tokenizer = tokenizer
        n = tokenizer.n_vocab
        self.eos_token_id = eos
        self.special_token_ids = [i for i in range(n) if _reserved(tokenizer, i) or i in tokenizer.eos_ids]
        self.tokens = [tokenizer.token_bytes(i) for i in range(n)]
        if eos == n:
            self.tokens.append(b"<end>")
            self.special_token_ids.append(n)
        first = next(iter(tokenizer.encode("a", bos=False)), None)
        # Some vocabularies put a space before text; a line break before it takes that and is cut off again.
        self._lead = "\n" if first is not None and self.tokens[first].startswith(b" ") else ""
        self._ids: dict[bytes, int] | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of `text` in the middle of other text, which together are its bytes exactly."""
        raw = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode(self._lead + raw.decode("utf-8", "replace"), bos=False)
        if self._lead:
            heads = [b"".join(self.tokens[i] for i in ids[:n]).lstrip(b" ") for n in range(3)]
            ids = ids[heads.index(b"\n") :] if b"\n" in heads else []
        return ids if b"".join(self.tokens[i] for i in ids) == raw else self._longest(raw)

    def _longest(self, raw: bytes) -> list[int]:
        """`raw` in the longest tokens there are, from the left; bytes that no token holds are left out."""
        if self._ids is None:
            special = set(self.special_token_ids)
            self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        out: list[int] = []
        at = 0
        while at < len(raw):
            size = next((n for n in range(min(64, len(raw) - at), 0, -1) if raw[at : at + n] in self._ids), 0)
            out += [self._ids[raw[at : at + size]]] if size else []
            at += size or 1
        return out


def _on_a_deep_stack(work: Callable[[], T]) -> T:
    """What `work` returns, called in a thread with _STACK_BYTES of stack, of which only what is used takes memory."""
    out: list[T] = []
    with _starting:  # the size is the whole process's
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: out.append(work()))
            thread.start()
        except RuntimeError:
            raise SluiceError("no thread could be started to compile a grammar; close other programs") from None
        finally:
            threading.stack_size(before)
    thread.join()
    if not out:
        raise SluiceError("compiling the grammar failed; simplify the schema")
    return out[0]


def _first_line(text: str) -> str:
    """An error of llguidance's, in one line of bounded length."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:300] or "unknown error"
