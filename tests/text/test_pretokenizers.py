"""Each pre-tokenizer cuts text where llama.cpp does, seen through the ids of a vocabulary that joins across cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
from llamacpp_vocab import LlamaCppVocab
from parity_texts import parity_texts
from tiny_vocabularies import metadata, write_bpe

from sluice.text.pretokenizers import PRE_TOKENIZERS
from sluice.text.tokenizer import Tokenizer

pytest.importorskip("xllamacpp", reason="xllamacpp is the oracle for token ids")

# Names that stand for the same settings: the first is compared on all texts, the others on some.
_FIRST = {pre: name for name, pre in reversed(PRE_TOKENIZERS.items())}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_same_ids_as_llamacpp(name: str, tmp_path: Path) -> None:
    pre = PRE_TOKENIZERS[name]
    texts = parity_texts(520)
    if _FIRST[pre] != name:
        texts = texts[::9]
    path = write_bpe(tmp_path / "vocabulary.gguf", name, byte_level=pre.byte_level)
    ours = Tokenizer.from_metadata(metadata(path))
    with LlamaCppVocab(path) as theirs:
        for text in texts:
            assert ours.encode(text) == theirs.encode(text, special=False, bos=True), text


@pytest.mark.parametrize("name", sorted(_FIRST.values()))
def test_long_runs_are_cut_without_trouble(name: str, tmp_path: Path) -> None:
    path = write_bpe(tmp_path / "vocabulary.gguf", name, byte_level=PRE_TOKENIZERS[name].byte_level)
    tokenizer = Tokenizer.from_metadata(metadata(path))
    runs = (" " * 20_000 + "x", "1" * 3_000, "\n" * 20_000, "aA" * 10_000, "'" * 20_000, "世" * 10_000, "\t " * 9_999)
    for text in runs:
        assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text
