"""The learnt tokenizer: the same ids in `tokenizers`, in Sluice and in llama.cpp, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter
from text.llamacpp_vocab import LlamaCppVocab
from text.parity_texts import parity_texts
from tokenizers import Tokenizer as Engine
from tokenizers import models

from sluice.errors import InputError
from sluice.text.tokenizer import Tokenizer
from sluice.text.vocabulary import CONTROL, NORMAL
from sluice.train.tokenizer import (
    CHAT_TEMPLATE,
    CONFIG_FILE,
    END,
    FILE,
    MIN_VOCAB,
    PRE,
    SPECIAL,
    encode,
    fingerprint,
    open_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

VOCAB = 1500


@pytest.fixture(scope="module")
def engine() -> Engine:
    return train_tokenizer(parity_texts(900, seed=1), VOCAB)


def write_gguf(path: Path, engine: Engine) -> Path:
    """A file with nothing but the vocabulary of `engine`, from its tokenizer.json."""
    saved = json.loads(engine.to_str())
    vocab = saved["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if text in SPECIAL else NORMAL for text in tokens])
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    writer.add_bos_token_id(vocab[END])
    writer.add_eos_token_id(vocab[END])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("vocabulary") / "vocabulary.gguf", engine)


def test_sluice_has_the_same_ids_from_gguf(engine: Engine, gguf: Path) -> None:
    fields = GGUFReader(gguf).fields.items()
    ours = Tokenizer.from_metadata({key: each.contents() for key, each in fields if not key.startswith("GGUF.")})
    assert ours.n_vocab == engine.get_vocab_size() == VOCAB
    texts = parity_texts(1500)
    for text, ids in zip(texts, encode(engine, texts), strict=True):
        assert ids.tolist() == ours.encode(text), text
        assert ours.decode(ids) == text


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is the oracle for token ids")
def test_llamacpp_has_the_same_ids_from_gguf(engine: Engine, gguf: Path) -> None:
    texts = parity_texts(1000)
    with LlamaCppVocab(gguf) as theirs:
        for text, ids in zip(texts, encode(engine, texts), strict=True):
            assert ids.tolist() == theirs.encode(text, special=False, bos=True), text


def test_saved_files_open_in_transformers_with_the_same_ids(engine: Engine, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(engine, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token, theirs.bos_token, len(theirs)) == (END, END, VOCAB)
    texts = [text for text in parity_texts(500) if "<|" not in text]  # it takes those for special tokens
    assert [ids.tolist() for ids in encode(engine, texts)] == [theirs(text)["input_ids"] for text in texts]
    chat = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    theirs.save_pretrained(tmp_path / "again")
    assert fingerprint(open_tokenizer(tmp_path / "again")) == fingerprint(engine)


def test_documents_can_not_hold_special_tokens(engine: Engine) -> None:
    (ids,) = encode(engine, [f"a{END}b <|im_start|>"])
    assert {engine.token_to_id(text) for text in SPECIAL}.isdisjoint(ids.tolist())
    assert engine.encode(f"a{END}").ids[-1] == engine.token_to_id(END)  # as elsewhere, where they are asked for


def test_same_texts_give_the_same_tokenizer_in_any_order(engine: Engine) -> None:
    again = train_tokenizer(reversed(parity_texts(900, seed=1)), VOCAB)
    assert fingerprint(again) == fingerprint(engine)
    assert fingerprint(train_tokenizer(parity_texts(900, seed=2), VOCAB)) != fingerprint(engine)


def test_special_tokens_come_first_then_bytes(engine: Engine) -> None:
    assert [engine.id_to_token(i) for i in range(3)] == list(SPECIAL)
    every_byte = train_tokenizer(["no pairs"], MIN_VOCAB)
    assert [len(ids) for ids in encode(every_byte, ["abc", "\u4e00", "\U0001f600", ""])] == [3, 3, 4, 0]


@pytest.mark.parametrize(
    ("texts", "vocab", "words"),
    [
        (["aa aa"], MIN_VOCAB - 1, "out of range: give 259 to"),
        (["aa aa"], 1 << 40, "out of range"),
        (["aaaa aaaa"], 400, "gives a vocabulary of 26[0-9] tokens, not 400"),
        ([], 300, "gives a vocabulary of 259 tokens, not 300"),
    ],
)
def test_vocabulary_that_can_not_be_is_refused(texts: list[str], vocab: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        train_tokenizer(texts, vocab)


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{FILE}: can't be read"):
        open_tokenizer(tmp_path)
    broken = tmp_path / FILE
    for data in (b"", b"{", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'):
        broken.write_bytes(data)
        with pytest.raises(InputError, match=f"{FILE}: is no tokenizer.json") as caught:
            open_tokenizer(broken)
        assert "\n" not in str(caught.value)
    broken.write_text(Engine(models.BPE()).to_str())
    with pytest.raises(InputError, match=r"has no token <\|endoftext\|>"):
        open_tokenizer(tmp_path)


def test_config_names_what_ends_text(engine: Engine, tmp_path: Path) -> None:
    save_tokenizer(engine, tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert (config["eos_token"], config["bos_token"], config["add_bos_token"]) == (END, END, False)
    assert fingerprint(open_tokenizer(tmp_path / FILE)) == fingerprint(engine)
