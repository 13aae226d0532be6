"""Learns a byte-level BPE that llama.cpp and Sluice cut text alike with, writes it, opens it. Knows no domains.

The pre-tokenizer is the one that GGUF files call `qwen2` (PRE): its pattern comes from the same table as the engine's,
so a tokenizer learnt here has the same ids in `tokenizers`, in Sluice and in llama.cpp. Texts of special tokens are
ordinary text in documents: `encode` never makes a special token of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.errors import InputError, words_of
from sluice.text.pretokenizers import PRE_TOKENIZERS

PRE = "qwen2"  # tokenizer.ggml.pre
END = "<|endoftext|>"  # stands before, between and after documents
SPECIAL = (END, "<|im_start|>", "<|im_end|>")
MIN_VOCAB = 256 + len(SPECIAL)
MAX_VOCAB = 1 << 20
FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
MAX_FILE_BYTES = 1 << 28  # of a tokenizer.json
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A BPE of exactly `vocab` tokens learnt on `texts`: SPECIAL first, then bytes, then merges.

    The same texts give the same tokenizer, in any order. Raises InputError where `vocab` is out of range, or the
    texts have too few pairs to merge for it.
    """
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        raise InputError(f"a vocabulary of {vocab} tokens is out of range: give {MIN_VOCAB} to {MAX_VOCAB}")
    engine = Tokenizer(models.BPE())
    (pattern,) = PRE_TOKENIZERS[PRE].splits
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    found = engine.get_vocab_size()
    if found != vocab:
        raise InputError(f"the text gives a vocabulary of {found} tokens, not {vocab}: give more text, or {found}")
    return engine


def save_tokenizer(engine: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the special tokens and a ChatML template, into `folder`."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / FILE).write_text(engine.to_str(pretty=True), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model's or a data folder, or of its tokenizer.json.

    Raises InputError where there is none, it is broken, or it has no END.
    """
    file = path / FILE if path.is_dir() else path
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{file}: more than {MAX_FILE_BYTES >> 20} MiB is no tokenizer: name another")
        engine = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{file}: can't be read ({error.strerror}): name a folder or file with a tokenizer.json"
        ) from None
    except InputError:
        raise
    except Exception as error:  # `tokenizers` raises Exception itself
        raise InputError(f"{file}: is no tokenizer.json ({words_of(error, 120)}): save it again") from None
    end_id(engine, file)
    return engine


def end_id(engine: Tokenizer, name: str | Path = "the tokenizer") -> int:
    """The id of END. Raises InputError where the tokenizer has no such token."""
    found = engine.token_to_id(END)
    if found is None:
        raise InputError(f"{name}: has no token {END}, which stands between documents: use another tokenizer")
    return found


def fingerprint(engine: Tokenizer) -> str:
    """A sha256 of what decides ids: tokens, merges, special tokens, how text is cut. Not of how the file is written."""
    parts = json.loads(engine.to_str())
    model = parts["model"]
    what = {
        "type": model["type"],
        "vocab": sorted(model["vocab"].items(), key=lambda item: item[1]),
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())],
        "added": sorted((each["id"], each["content"], each["special"]) for each in parts["added_tokens"]),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def encode(engine: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text, uint32 [n]; nothing is put before or after them."""
    before = engine.encode_special_tokens
    engine.encode_special_tokens = True  # or a document could hold special tokens
    try:
        return [np.array(each.ids, np.uint32) for each in engine.encode_batch(list(texts), add_special_tokens=False)]
    finally:
        engine.encode_special_tokens = before
