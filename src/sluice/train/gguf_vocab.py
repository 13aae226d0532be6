"""A Hugging Face directory's tokenizer as GGUF metadata: tokens, merges, special ids, chat template. Knows no weights.

GGUF names how text is cut before a byte-level BPE (`tokenizer.ggml.pre`) instead of carrying it, so a tokenizer is
refused where it cuts by a pattern that has no such name: its ids would be others in llama.cpp and Sluice. One with byte
fallback is a SentencePiece vocabulary (gguf_pieces.py).
Formats: tokenizer.json of https://github.com/huggingface/tokenizers, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import gguf

from sluice.errors import InputError
from sluice.text.pretokenizers import PRE_TOKENIZERS
from sluice.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from sluice.train.gguf_pieces import BYTES, NotPieces, scores, space_prefix
from sluice.train.hf_directory import read_json

FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
MAX_TEMPLATE_BYTES = 1 << 20
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# How the original tokenizers spell the patterns that GGUF has names for; Sluice's own spelling counts too.
PATTERNS = {
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}": "qwen2",
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}":
        "qwen35",
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}": "llama-bpe",
    **{PRE_TOKENIZERS[name].splits[0]: name for name in ("qwen2", "qwen35", "llama-bpe", "gpt-2")},
}  # fmt: skip


@dataclass(frozen=True)
class Vocab:
    """A BPE vocabulary. `texts[id]` and `kinds[id]` are a token's; `special` ids by "bos", "eos", "eot", …

    SentencePiece's have `scores` instead of merges, `pre` "default", and say whether texts get a space in front.
    `doubt` is where ids may differ from the tokenizer's own.
    """

    pre: str
    texts: Sequence[str]
    kinds: Sequence[int]
    merges: Sequence[str]
    special: Mapping[str, int]
    adds: Mapping[str, bool]  # whether "bos" or "eos" is put around a text
    template: str | list[dict[str, str]] | None = None
    scores: Sequence[float] | None = None
    space_prefix: bool = False
    doubt: str | None = None

    def write(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2" if self.scores is None else "llama")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(self.texts))
        writer.add_token_types(list(self.kinds))
        if self.scores is None:
            writer.add_token_merges(list(self.merges))
        else:
            writer.add_token_scores(list(self.scores))
            writer.add_add_space_prefix(self.space_prefix)
        for name, id in self.special.items():
            getattr(writer, f"add_{name}_token_id")(id)
        for name, added in self.adds.items():
            getattr(writer, f"add_add_{name}_token")(added)
        if self.template is not None:
            writer.add_chat_template(self.template)


@dataclass
class _Reading:
    """One directory's files, and what has been understood of them."""

    folder: Path
    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    n_vocab: int
    added: dict[str, int] = field(default_factory=dict)

    def fail(self, what: str) -> NoReturn:
        raise InputError(f"{self.folder / FILE}: {what}")

    def listed(self, said: Mapping[str, Any], key: str) -> list[Any]:
        """The list under `key`, empty where nothing is said."""
        found = said.get(key)
        if found is not None and not isinstance(found, list):
            self.fail("is damaged: save it again")
        return found or []


def read_vocab(folder: Path, config: Mapping[str, Any], n_vocab: int) -> Vocab:
    """The tokenizer in `folder` of a model with `n_vocab` rows of embeddings, whose configuration is `config`.

    Rows without a token become unused ones. Raises InputError where there is no tokenizer, or one that GGUF can't say.
    """
    said = read_json(folder / FILE, "a model to export needs its tokenizer")
    optional = folder / CONFIG_FILE
    r = _Reading(folder, said, read_json(optional, "") if optional.exists() else {}, said.get("model") or {}, n_vocab)
    vocab = r.model.get("vocab") if isinstance(r.model, Mapping) and r.model.get("type") == "BPE" else None
    if not isinstance(vocab, Mapping):
        r.fail("is no BPE, the only kind that is exported: train a byte-level BPE")
    if r.model.get("byte_fallback"):
        return _pieces(r, config)
    pre = _pre(r)
    texts, kinds = _tokens(r)
    special = _special(r, config)
    merges = [" ".join(pair) for pair in _merges(r)]
    return Vocab(pre, texts, kinds, merges, special, _adds(r, special), _template(r))


def _pieces(r: _Reading, config: Mapping[str, Any]) -> Vocab:
    """A SentencePiece vocabulary."""
    texts, kinds = _tokens(r)
    for id, text in enumerate(texts):
        if kinds[id] == NORMAL and text in BYTES:
            kinds[id] = BYTE
        elif text == r.model.get("unk_token"):
            kinds[id] = UNKNOWN
    normal = frozenset(id for id, kind in enumerate(kinds) if kind == NORMAL)
    special = _special(r, config)
    try:
        prefix, doubt = space_prefix(
            _steps(r, r.tokenizer.get("normalizer"), "normalizers"),
            _steps(r, r.tokenizer.get("pre_tokenizer"), "pretokenizers"),
        )
        ranked = scores(texts, normal, _merges(r))
    except NotPieces as error:
        r.fail(f"{error}: it is no SentencePiece vocabulary, and other BPE with byte fallback is not exported")
    return Vocab(
        "default", texts, kinds, (), special, _adds(r, special), _template(r), ranked, prefix, doubt
    )  # fmt: skip


def _pre(r: _Reading) -> str:
    """GGUF's name for how text is cut."""
    normalizer = r.tokenizer.get("normalizer")
    kinds = [step.get("type") for step in _steps(r, normalizer, "normalizers")]
    if any(kind != "NFC" for kind in kinds):
        r.fail(f"normalises text by {ascii(kinds)[:60]}, which GGUF's BPE doesn't: train it without")
    steps = _steps(r, r.tokenizer.get("pre_tokenizer"), "pretokenizers")
    bytes_last = bool(steps) and steps[-1].get("type") == "ByteLevel"
    if not bytes_last:
        r.fail("is no byte-level BPE, and has no byte fallback: train one")
    if steps[-1].get("add_prefix_space"):
        r.fail("puts a space before texts (add_prefix_space), which GGUF's BPE doesn't: train it without")
    cuts = ["gpt-2"] if steps[-1].get("use_regex", True) else []
    for step in reversed(steps[:-1]):
        if step.get("type") == "Digits" and step.get("individual_digits") and cuts == ["gpt-2"]:
            cuts = ["smollm"]  # digits apart, then GPT-2's pattern
            continue
        pattern = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        whole = step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
        if not whole or not isinstance(regex, str) or regex not in PATTERNS:
            said = ascii(regex or step.get("type"))[:90]
            r.fail(f"cuts text by {said}, which has no name in GGUF: use qwen2's pattern")
        cuts.insert(0, PATTERNS[regex])
    if len(cuts) != 1:
        r.fail(f"cuts text by {', '.join(cuts) or 'nothing'} in turn, which has no name in GGUF: use qwen2's pattern")
    if r.model.get("ignore_merges") and not PRE_TOKENIZERS[cuts[0]].ignore_merges:
        r.fail(f"ignores merges, which GGUF's {cuts[0]} doesn't: train it without")
    return cuts[0]


def _steps(r: _Reading, said: object, inner: str) -> list[Mapping[str, Any]]:
    """A pre-tokenizer or normalizer as the steps it has."""
    steps = said.get(inner) if isinstance(said, Mapping) and said.get("type") == "Sequence" else said
    if steps is None:
        return []
    found: list[Any] = steps if isinstance(steps, list) else [steps]
    if not all(isinstance(step, Mapping) for step in found):
        r.fail("is damaged: save it again")
    return found


def _tokens(r: _Reading) -> tuple[list[str], list[int]]:
    """Texts and kinds by id; notes the added tokens' ids."""
    texts: list[str | None] = [None] * r.n_vocab
    kinds = [UNUSED] * r.n_vocab

    def put(text: Any, id: object, kind: int) -> None:
        if not _is_text(text) or isinstance(id, bool) or not isinstance(id, int) or id < 0:
            r.fail("is damaged: save it again")
        if id >= r.n_vocab:
            r.fail(f"has the token {ascii(text)[:40]} with id {id}, and the model {r.n_vocab} rows of embeddings")
        if texts[id] not in (None, text):
            r.fail(f"has two tokens with id {id}: it is damaged, save it again")
        texts[id], kinds[id] = text, kind

    for text, id in r.model["vocab"].items():
        put(text, id, NORMAL)
    for token in r.listed(r.tokenizer, "added_tokens"):
        if not isinstance(token, Mapping):
            r.fail("is damaged: save it again")
        text, id = token.get("content"), token.get("id")
        looks = isinstance(text, str) and text.startswith("<|") and text.endswith("|>")
        put(text, id, CONTROL if token.get("special") or looks else USER_DEFINED)
        assert isinstance(text, str) and isinstance(id, int)  # `put` has seen to it
        r.added[text] = id
    named = [f"[PAD{id}]" if text is None else text for id, text in enumerate(texts)]
    if len(set(named)) < len(named):
        r.fail("has two tokens of one text: it is damaged, save it again")
    return named, kinds


def _merges(r: _Reading) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for merge in r.listed(r.model, "merges"):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(_is_text(part) for part in pair):
            r.fail("holds merges that are no pairs: it is damaged, save it again")
        if any(" " in part or not part for part in pair):
            r.fail("merges texts with spaces, which GGUF can't say: train a byte-level BPE")
        found.append((pair[0], pair[1]))
    return found


def _special(r: _Reading, config: Mapping[str, Any]) -> dict[str, int]:
    """Special tokens' ids: as the tokenizer's configuration names them, else as the model's numbers them.

    A turn ends with the first further end that the generation configuration has, or a token that does so elsewhere.
    """
    ids = dict(r.model["vocab"]) | r.added
    found: dict[str, int] = {}
    generation = r.folder / "generation_config.json"
    said = read_json(generation, "") if generation.exists() else {}
    for name in SPECIAL:
        token = r.config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        numbered: list[Any] = [where.get(f"{name}_token_id") for where in (config, said)]
        numbered = [id[0] if isinstance(id, list) and id else id for id in numbered]
        if isinstance(text, str):
            if text not in ids:
                r.fail(f"has no token {ascii(text)[:60]}, which {CONFIG_FILE} calls {name}_token: save both again")
            found[name] = ids[text]
        elif (id := next((id for id in numbered if _is_id(id, r.n_vocab)), None)) is not None:
            found[name] = id
    ends = said.get("eos_token_id")
    ends = [id for id in ends if _is_id(id, r.n_vocab)] if isinstance(ends, list) else []
    ends += [r.added[text] for text in END_OF_TURN if text in r.added]
    turn = next((id for id in ends if id != found.get("eos")), None)
    if turn is not None and "eos" in found:
        found["eot"] = turn
    return found


def _is_text(value: object) -> bool:
    """Whether `value` is text that a file can hold: half of a surrogate pair is none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_id(id: object, n_vocab: int) -> bool:
    return isinstance(id, int) and not isinstance(id, bool) and 0 <= id < n_vocab


def _adds(r: _Reading, special: Mapping[str, int]) -> dict[str, bool]:
    """Whether the start and the end of a text get a token: as the template after BPE does it."""
    processor = r.tokenizer.get("post_processor")
    around: dict[str, bool] = {"bos": False, "eos": False}
    for step in _steps(r, processor, "processors"):
        if step.get("type") != "TemplateProcessing":
            continue
        names = [_special_text(part) for part in r.listed(step, "single")]
        text = names.index(None) if None in names else len(names)
        before, after = names[:text], names[text + 1 :]
        for where, put in (("bos", before), ("eos", after)):
            if not put:
                continue
            own = where in special and r.added.get(put[0] or "") == special[where]
            if len(put) > 1 or not own:
                r.fail(f"puts {ascii(put)[:60]} around texts: GGUF can put one {where}_token of {CONFIG_FILE}")
            around[where] = True
    return around


def _special_text(part: object) -> str | None:
    """What a part of a template puts there; None for the text itself."""
    token = part.get("SpecialToken") if isinstance(part, Mapping) else None
    return str(token.get("id")) if isinstance(token, Mapping) else None


def _template(r: _Reading) -> str | list[dict[str, str]] | None:
    """The chat template: `chat_template.jinja`, or as the tokenizer's configuration has it."""
    path = r.folder / "chat_template.jinja"
    if path.exists():
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: can't be read ({error}): save the tokenizer again") from None
    else:
        template = r.config.get("chat_template")
    if template is None:
        return None
    listed = template if isinstance(template, list) else [{"name": "default", "template": template}]
    named = [each for each in listed if isinstance(each, Mapping)]
    texts = [each.get(key) for each in named for key in ("name", "template")]
    if len(named) < len(listed) or not all(_is_text(text) for text in texts):
        raise InputError(f"{r.folder / CONFIG_FILE}: chat_template is neither a text nor a list of named ones")
    if sum(len(each["template"]) for each in named) > MAX_TEMPLATE_BYTES:
        raise InputError(f"{r.folder}: a chat template of more than {MAX_TEMPLATE_BYTES >> 20} MiB: shorten it")
    return template
