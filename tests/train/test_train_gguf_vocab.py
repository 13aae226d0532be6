"""Tokenizers in exported files: the ids of `tokenizers` in Sluice and llama.cpp, and what GGUF can't say is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hf_models import spoilt
from oracles import llamacpp_tokenize
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer

from sluice.errors import InputError
from sluice.text.tokenizer import Tokenizer
from sluice.text.vocabulary import BYTE, CONTROL, UNKNOWN, UNUSED
from sluice.train.gguf_vocab import PATTERNS, Vocab, read_vocab
from sluice.train.tokenizer import CHAT_TEMPLATE, save_tokenizer, train_tokenizer

N_TOKENS, N_VOCAB = 400, 410
WORDS = ("the", " quick", "fox", "naïve", "Ärger", "日本語", "don't", "WE'LL", "x1", "1234567", "\n\n", "\t", "   ",
         "…", "🦙", "::", "()", "\r\n", "e\u0301", "a+b", " 42", "'s", "Ⅷ", "\u00a0")  # fmt: skip
TEXTS = ["".join(random.Random(i).choices(WORDS, k=30)) for i in range(60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(train_tokenizer(TEXTS, N_TOKENS), tmp_path)
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, Any]], Any], file: str = "tokenizer.json") -> None:
    said = json.loads((folder / file).read_text())
    edit(said)
    (folder / file).write_text(json.dumps(said))


def written(vocab: Vocab, path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    vocab.write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def assert_same_ids(folder: Path, vocab: Vocab, texts: Sequence[str] = TEXTS) -> None:
    path = written(vocab, folder / "vocab.gguf")
    engine = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    expected = [engine.encode(text, add_special_tokens=True).ids for text in texts]
    mine = Tokenizer.from_metadata(metadata(path))
    assert [mine.encode(text) for text in texts] == expected
    assert llamacpp_tokenize(path, texts, add_special=True) == expected


def test_ids_are_those_of_tokenizers(folder: Path) -> None:
    vocab = read_vocab(folder, {}, N_VOCAB)
    assert vocab.pre == "qwen2" and len(vocab.texts) == N_VOCAB
    assert_same_ids(folder, vocab)


SPACES = {
    "legacy": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "no prefix": (normalizers.Replace(" ", "▁"), None),
    "metaspace": (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
}


def save_pieces(folder: Path, spaces: str = "legacy") -> Path:
    """A SentencePiece vocabulary as `tokenizers` has converted ones: pieces that BPE found, each with all its pairs."""
    learnt = HfTokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    learnt.train_from_iterator(TEXTS[:40], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    found = json.loads(learnt.to_str())["model"]
    pieces = sorted(found["vocab"], key=found["vocab"].__getitem__)
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *pieces]
    vocab = {text: id for id, text in enumerate(texts)}
    merges = [
        (left, right)
        for piece in ("".join(pair) for pair in found["merges"])
        for left, right in ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        if left in found["vocab"] and right in found["vocab"]
    ]
    model = models.BPE(vocab, list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    whole = HfTokenizer(model)
    normalizer, cut = SPACES[spaces]
    if normalizer is not None:
        whole.normalizer = normalizer
    if cut is not None:
        whole.pre_tokenizer = cut
    whole.add_special_tokens(["<unk>", "<s>", "</s>"])
    whole.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    whole.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    ))  # fmt: skip
    return folder


@pytest.mark.parametrize("spaces", SPACES)
def test_ids_of_sentencepiece_are_those_of_tokenizers(tmp_path: Path, spaces: str) -> None:
    vocab = read_vocab(save_pieces(tmp_path, spaces), {}, 600)
    assert (vocab.doubt is not None) == (spaces in ("metaspace", "first"))
    assert_same_ids(tmp_path, vocab, [text for text in TEXTS if not (vocab.doubt and text.startswith(" "))])
    found = metadata(tmp_path / "vocab.gguf")
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_bos_token"]
    assert found["tokenizer.ggml.add_space_prefix"] == (spaces != "no prefix")
    kinds = found["tokenizer.ggml.token_type"]
    assert kinds[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE] and kinds[599] == UNUSED


def part_merges(merges: list[list[str]]) -> None:
    """Give two pairs that make the same token places far from each other."""
    first = next(i for i, (one, two) in enumerate(pairwise(merges)) if "".join(one) == "".join(two))
    merges.append(merges.pop(first))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda said: said["model"]["vocab"].pop("<0x41>"), "has no token <0x41>"),
        (lambda said: part_merges(said["model"]["merges"]), "at different ranks"),
        (lambda said: said["model"]["merges"].pop(5), "which no merge makes|does not merge"),
        (lambda said: said["model"]["merges"].append(["q", "q"]), "a part or the whole is no token"),
        (lambda said: said["model"]["vocab"].update({"zzz": 590}), "'zzz', which no merge makes"),
        (lambda said: said["normalizer"]["normalizers"].append({"type": "NFKC"}), "treats text by"),
        (lambda said: said.update(normalizer=None, pre_tokenizer={"type": "Whitespace"}), "treats text by"),
        (lambda said: said.update(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "▁"}),
         "replaces"),
        (lambda said: said.update(normalizer=None, pre_tokenizer={"type": "Metaspace", "replacement": "_"}),
         "cuts text by"),
    ],
)  # fmt: skip
def test_other_bpe_with_byte_fallback_is_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], says: str
) -> None:
    change(save_pieces(tmp_path), edit)
    with pytest.raises(InputError, match=says):
        read_vocab(tmp_path, {}, 600)


def test_special_tokens_and_template(folder: Path) -> None:
    found = metadata(written(read_vocab(folder, {"eos_token_id": 5}, N_VOCAB), folder / "vocab.gguf"))
    names = found["tokenizer.ggml.tokens"]
    ids = {name: found[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot", "padding")}
    assert {name: names[id] for name, id in ids.items()} == {
        "bos": "<|endoftext|>", "eos": "<|endoftext|>", "eot": "<|im_end|>", "padding": "<|endoftext|>"
    }  # fmt: skip
    assert found["tokenizer.ggml.add_bos_token"] is False and found["tokenizer.ggml.add_eos_token"] is False
    assert found["tokenizer.chat_template"] == CHAT_TEMPLATE
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == "qwen2"
    kinds = found["tokenizer.ggml.token_type"]
    assert kinds[:4] == [3, 3, 3, 1] and kinds[N_TOKENS:] == [5] * 10 and names[-1] == "[PAD409]"
    mine = Tokenizer.from_metadata(found)
    assert mine.eos_ids == {0, 2}


def test_a_model_names_its_ends_where_the_tokenizer_does_not(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "pad_token_id": 9}))
    assert dict(read_vocab(folder, {"eos_token_id": 7, "bos_token_id": None}, N_VOCAB).special) == {
        "eos": 7, "pad": 9, "eot": 8
    }  # fmt: skip
    assert read_vocab(folder, {}, N_VOCAB).special["eos"] == 7
    assert read_vocab(folder, {"eos_token_id": 10**9}, N_VOCAB).special["eos"] == 7


def test_templates_in_a_file_and_by_name(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert read_vocab(folder, {}, N_VOCAB).template == "{{ messages }}"
    (folder / "chat_template.jinja").unlink()
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    change(folder, lambda said: said.update(chat_template=listed), "tokenizer_config.json")
    found = metadata(written(read_vocab(folder, {}, N_VOCAB), folder / "vocab.gguf"))
    assert found["tokenizer.chat_template"] == "a" and found["tokenizer.chat_template.tool_use"] == "b"
    (folder / "tokenizer_config.json").unlink()
    assert read_vocab(folder, {}, N_VOCAB).template is None


def test_a_text_gets_the_tokens_that_the_template_puts_around_it(folder: Path) -> None:
    token = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing", "single": [token, text], "pair": [token, text],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }  # fmt: skip
    change(folder, lambda said: said.update(post_processor=processor))
    vocab = read_vocab(folder, {}, N_VOCAB)
    assert dict(vocab.adds) == {"bos": True, "eos": False}
    assert_same_ids(folder, vocab)
    processor["single"] = [token, token, text]
    change(folder, lambda said: said.update(post_processor=processor))
    with pytest.raises(InputError, match="around texts: GGUF can put one bos_token"):
        read_vocab(folder, {}, N_VOCAB)


def learnt(steps: list[Any], **model: Any) -> HfTokenizer:
    engine = HfTokenizer(models.BPE(**model))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=N_TOKENS, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    engine.train_from_iterator(TEXTS, trainer)
    return engine


def byte_level(regex: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)


@pytest.mark.parametrize(
    ("pre", "before"),
    [("gpt-2", []), ("smollm", [pre_tokenizers.Digits(individual_digits=True)])],
)
def test_gpt2s_pattern(pre: str, before: list[Any], tmp_path: Path) -> None:
    save_tokenizer(learnt([*before, byte_level(True)]), tmp_path)
    vocab = read_vocab(tmp_path, {}, N_VOCAB)
    assert vocab.pre == pre
    assert_same_ids(tmp_path, vocab)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: PATTERNS[pattern])
def test_each_pattern_with_a_name(pattern: str, tmp_path: Path) -> None:
    ignores = PATTERNS[pattern] == "llama-bpe"
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    save_tokenizer(learnt([split, byte_level(False)], ignore_merges=ignores), tmp_path)
    vocab = read_vocab(tmp_path, {}, N_VOCAB)
    assert vocab.pre == PATTERNS[pattern] and vocab.adds["bos"] is False  # llama-bpe's own default is a start
    assert_same_ids(tmp_path, vocab)


Edit = Callable[[dict[str, Any]], Any]
SPLIT = {"type": "Split", "pattern": {"Regex": "a|b"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda said: said["model"].update(type="Unigram"), "is no BPE"),
        (lambda said: said.update(model=7), "is no BPE"),
        (lambda said: said.update(normalizer={"type": "Lowercase"}), "normalises text by ['Lowercase']"),
        (lambda said: said.update(pre_tokenizer=None), "is no byte-level BPE"),
        (lambda said: said.update(pre_tokenizer={"type": "Metaspace"}), "is no byte-level BPE"),
        (lambda said: said["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "a space before texts"),
        (lambda said: said["pre_tokenizer"]["pretokenizers"].insert(0, SPLIT), "cuts text by 'a|b', which has no name"),
        (lambda said: said["pre_tokenizer"]["pretokenizers"].pop(0), "cuts text by nothing in turn"),
        (lambda said: said["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True), "qwen2, gpt-2 in turn"),
        (lambda said: said["model"].update(ignore_merges=True), "ignores merges, which GGUF's qwen2 doesn't"),
        (lambda said: said["model"].update(merges=["a b c"]), "holds merges that are no pairs"),
        (lambda said: said["model"].update(merges=[["a ", "b"]]), "merges texts with spaces"),
        (lambda said: said["model"]["vocab"].update(more=410), "has the token 'more' with id 410, and the model 410"),
        (lambda said: said["model"]["vocab"].update(more=400.5), "is damaged"),
        (lambda said: said["model"]["vocab"].update(more=5), "has two tokens with id 5"),
        (lambda said: said["model"]["vocab"].update({"[PAD401]": 400}), "has two tokens of one text"),
        (lambda said: said["model"]["vocab"].update({"\ud800": 401}), "is damaged"),
        (lambda said: said["model"].update(merges=7), "is damaged"),
        (lambda said: said["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": []}), "has no name in GGUF"),
        (lambda said: said.update(added_tokens="abc"), "is damaged"),
        (lambda said: said["added_tokens"].append(3), "is damaged"),
        (lambda said: said["added_tokens"].append({"id": None, "content": "x"}), "is damaged"),
    ],
)
def test_what_gguf_cannot_say_is_refused(edit: Edit, says: str, folder: Path) -> None:
    change(folder, edit)
    with pytest.raises(InputError) as caught:
        read_vocab(folder, {}, N_VOCAB)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_spoilt_tokenizer_is_refused_in_a_line_or_written(folder: Path) -> None:
    rng, refused = random.Random(1), 0
    files = {name: json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")}
    files["generation_config.json"] = {"eos_token_id": [1, 2], "bos_token_id": 0}
    for _ in range(300):
        for name, said in files.items():
            (folder / name).write_text(json.dumps(spoilt(said, rng) if rng.random() < 0.5 else said))
        try:
            config = spoilt({"eos_token_id": 1, "pad_token_id": [2]}, rng)
            written(read_vocab(folder, config, N_VOCAB), folder / "v.gguf")
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert 30 < refused < 300


def test_a_named_token_that_is_not_there(folder: Path) -> None:
    change(folder, lambda said: said.update(eos_token={"content": "</s>"}), "tokenizer_config.json")
    with pytest.raises(InputError, match=r"has no token '</s>', which tokenizer_config\.json calls eos_token"):
        read_vocab(folder, {}, N_VOCAB)
    change(folder, lambda said: said.update(eos_token=None, chat_template=[3]), "tokenizer_config.json")
    with pytest.raises(InputError, match="chat_template is neither a text nor a list"):
        read_vocab(folder, {}, N_VOCAB)
