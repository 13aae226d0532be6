"""Vocabulary-only GGUF files, small enough to write in a test, that llama.cpp and Sluice both load.

Their merges are learnt on uncut text, so they join characters across every border a pre-tokenizer could draw: a border
drawn in the wrong place shows in the ids.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from gguf import GGUFReader, GGUFWriter
from parity_texts import parity_texts
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = {
    "<unk>": UNKNOWN,
    "<s>": CONTROL,
    "</s>": CONTROL,
    "<|endoftext|>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<|im_end|>end": USER_DEFINED,
    "<|user|>": USER_DEFINED,
}


@lru_cache
def _learnt(byte_level: bool) -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens, merges) of a BPE of 2,500 tokens; without `byte_level` over characters, spaces being U+2581."""
    engine = HfTokenizer(models.BPE())
    alphabet: list[str] = []
    # Texts of special tokens stay out: llama.cpp's merges may arrive at a control token, Sluice's must not.
    texts = [text for text in parity_texts(900, seed=1) if not any(mark in text for mark in ("<|", "s>", "<unk"))]
    if byte_level:
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        texts = [text.replace(" ", "\u2581") for text in texts if "\x00" not in text]  # llama.cpp cuts tokens at NUL
    # A small limit on the alphabet leaves rare characters to byte tokens.
    trainer = trainers.BpeTrainer(
        vocab_size=2500,
        limit_alphabet=256 if byte_level else 300,
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=16,
    )
    engine.train_from_iterator(texts, trainer)
    vocab = engine.get_vocab()
    state = engine.model.__getstate__()

    merges = [tuple(merge) for merge in json.loads(state)["merges"]]
    return sorted(vocab, key=vocab.__getitem__), merges


def _write(path: Path, model: str, tokens: list[str], kinds: list[int], **more: object) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_unk_token_id(tokens.index("<unk>"))
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_bpe(path: Path, pre: str, *, byte_level: bool = True, **more: object) -> Path:
    """A "gpt2" vocabulary with the pre-tokenizer `pre`."""
    tokens, merges = _learnt(byte_level)
    tokens, kinds = list(tokens), [NORMAL] * len(tokens)
    if not byte_level:
        tokens += [f"<0x{b:02X}>" for b in range(256)]
        kinds += [BYTE] * 256
        runs = [run for run in ("\n\n", "\n\n\n\n") if run not in tokens]
        tokens += runs
        kinds += [NORMAL] * len(runs)
    new = {text: kind for text, kind in SPECIAL.items() if text not in tokens}
    tokens += new
    kinds += new.values()
    return _write(path, "gpt2", tokens, kinds, tokenizer_pre=pre, token_merges=[f"{a} {b}" for a, b in merges], **more)


def write_spm(path: Path, *, equal_scores: int = 1, **more: object) -> Path:
    """A "llama" vocabulary; `equal_scores` tokens at a time share a score, so that position has to decide."""
    learnt, _ = _learnt(False)
    tokens = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *(text for text in learnt if text not in SPECIAL)]
    kinds = [*SPECIAL.values(), *[BYTE] * 256]
    kinds += [NORMAL] * (len(tokens) - len(kinds))
    scores = [0.0 if kind != NORMAL else -float(i // equal_scores) for i, kind in enumerate(kinds)]
    return _write(path, "llama", tokens, kinds, token_scores=scores, **more)


def metadata(path: Path) -> dict[str, object]:
    """The key/value pairs of a GGUF file as Python values."""
    return {key: field.contents() for key, field in GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
