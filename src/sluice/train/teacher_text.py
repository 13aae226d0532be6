"""Has a model write texts to train on: prompts out of a data folder, answers by `sluice batch`. Knows no training.

The folder of the texts also holds `requests.jsonl`, what was asked, and `answers.jsonl`. A run that was ended goes on
where it was: the requests decide what is left, as `sluice batch` does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sluice.errors import InputError, SluiceError
from sluice.ggml import Library
from sluice.gguf import open_gguf
from sluice.models import family_of
from sluice.models.fingerprint import fingerprint
from sluice.text.vocabulary import UNUSED
from sluice.train.checkpoint import write_json
from sluice.train.shards import SPLITS, Ids, Tokens
from sluice.train.texts import META, Meta, Text, Texts, write_texts
from sluice.train.tokenizer import encode

REQUESTS, ANSWERS, ASKED = "requests.jsonl", "answers.jsonl", "asked.json"
MAX_LINE_BYTES = 64 << 20
MAX_PROMPT_IDS = 1 << 28  # of all prompts together: they are held in memory
_UNKNOWN = "�"  # what a character cut in two decodes to


@dataclass(frozen=True)
class Asked:
    """How many texts of what kind: `prompts` to learn from and `held_out` besides, together of all domains.

    A prompt is `prompt_tokens` ids of a document, from its split; `tokens` at most are written for each.
    """

    prompts: int
    held_out: int
    prompt_tokens: int
    tokens: int
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "held_out", "prompt_tokens", "tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name.replace('_', ' ')} {getattr(self, name)} is too small: give at least 1")
        if (self.prompts + self.held_out) * self.prompt_tokens > MAX_PROMPT_IDS:
            raise InputError(f"prompts of more than {MAX_PROMPT_IDS >> 20} Mi tokens together are too many: ask for "
                             "fewer, or shorter ones")  # fmt: skip
        if not 0 <= self.temperature < float("inf") or self.seed < 0:
            raise InputError("temperature and seed must be at least 0")


def write_teacher_texts(
    model: Path, data: Tokens, folder: Path, asked: Asked, *, library: Library, options: Sequence[str] = (),
    force: bool = False,
) -> Meta:  # fmt: skip
    """Have the model in the GGUF file `model` continue prompts out of `data`, into `folder`.

    `options` are more words for `sluice batch`. Raises InputError for a model of another vocabulary than the data's,
    and a folder of other texts (unless `force`); SluiceError where writing ended before all was written.
    """
    recipe = {"asked": asdict(asked), "data": data.fingerprint, "model": _identity(model, data, library)}
    _make(folder, recipe, force=force)
    if (folder / META).is_file():
        return Texts(folder).meta
    prompts = {split: list(_prompts(data, split, asked)) for split in SPLITS}
    _write_requests(folder / REQUESTS, prompts, asked)
    _ask(model, folder, options)
    answers = _answers(folder / ANSWERS)
    tokenizer = data.tokenizer()
    splits = {split: _texts(found, split, answers, tokenizer, data.end) for split, found in prompts.items()}
    return write_texts(
        folder, splits, n_vocab=data.n_vocab, end=data.end, tokenizer=data.meta.tokenizer, domains=data.domains,
        teacher=recipe,
    )  # fmt: skip


def _identity(model: Path, data: Tokens, library: Library) -> dict[str, Any]:
    """What tells the model's file apart. Raises InputError where its vocabulary is another than the data's."""
    file = open_gguf(model, library)
    spec = family_of(file).read_spec(file)
    if spec.n_vocab < data.n_vocab:
        raise InputError(f"{model}: has {spec.n_vocab} tokens and the data {data.n_vocab}: give data of its tokenizer")
    texts, kinds = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    tokenizer = data.tokenizer()
    own = [tokenizer.id_to_token(i) for i in range(data.n_vocab)]
    same = isinstance(texts, list) and texts[: data.n_vocab] == own
    more = kinds[data.n_vocab :] if isinstance(kinds, list) else ()  # rows that embeddings were filled up by
    if not same or any(kind != UNUSED for kind in more):
        raise InputError(f"{model}: its tokenizer is not the data's: give data of its tokenizer")
    return {"fingerprint": fingerprint(file, spec), "bytes": sum(path.stat().st_size for path in file.paths)}


def _make(folder: Path, recipe: dict[str, Any], *, force: bool) -> None:
    """The folder, for these texts and no others."""
    known = folder / ASKED
    try:
        if known.is_file() and not force:
            made = json.loads(known.read_text(encoding="utf-8"))
            if made != recipe:
                other = next(name for name in recipe if not isinstance(made, dict) or made.get(name) != recipe[name])
                what = {"asked": "asked for otherwise", "data": "of other data", "model": "by another model"}[other]
                raise InputError(f"{folder}: holds texts {what}: name another folder, or start over with --force")
            return
        if folder.is_dir() and any(folder.iterdir()) and not known.is_file():
            raise InputError(f"{folder}: holds other files: name an empty folder, or a new one")
        folder.mkdir(parents=True, exist_ok=True)
        for name in (META, ANSWERS):
            (folder / name).unlink(missing_ok=True)
        write_json(known, recipe)  # whole or not there, or a run killed here could not go on
    except OSError as error:
        raise InputError(f"{folder}: can't be written ({error.strerror}): name another folder") from error
    except ValueError:
        raise InputError(f"{known}: is broken: name another folder, or --force") from None


def _prompts(data: Tokens, split: str, asked: Asked) -> Iterator[tuple[int, Ids]]:
    """(domain, ids) of a split's prompts, domains in turn; each document gives one before any gives a second."""
    drawn = {domain: _windows(data, domain, split, asked) for domain in data.domains}
    for i in range(asked.prompts if split == "train" else asked.held_out):
        domain = i % len(data.domains)
        yield domain, next(drawn[data.domains[domain]])


def _windows(data: Tokens, domain: str, split: str, asked: Asked) -> Iterator[Ids]:
    """Prompts out of documents in an order that the seed decides, for ever; they end with whole characters."""
    documents, tokenizer, n = data.documents(domain, split), data.tokenizer(), asked.prompt_tokens
    rng = np.random.default_rng((asked.seed, SPLITS.index(split), data.domains.index(domain)))
    while True:
        some = False
        for i in rng.permutation(len(documents)):
            ids = documents[int(i)][:-1]  # with END before it, and without what comes after
            if len(ids) < n + 1:
                continue
            start = int(rng.integers(0, len(ids) - n))
            prompt = ids[start : start + n]
            if not tokenizer.decode(prompt.tolist()).endswith(_UNKNOWN):
                some = True
                yield prompt
        if not some:
            raise InputError(f"domain {domain}: its {split} split has no document of more than {n} tokens: ask for "
                             "shorter prompts, or give it more text")  # fmt: skip


def _write_requests(path: Path, prompts: dict[str, list[tuple[int, Ids]]], asked: Asked) -> None:
    """One line a prompt, the same ones for the same prompts, or an answered file would not be gone on with."""
    making = path.with_name(f".{path.name}.making")
    with making.open("w", encoding="utf-8", newline="\n") as file:
        for split, found in prompts.items():
            for i, (_, ids) in enumerate(found):
                body = {
                    "prompt": ids.tolist(), "max_tokens": asked.tokens, "temperature": asked.temperature, "top_p": 1.0,
                    "seed": (asked.seed << 32) + 2 * i + SPLITS.index(split),
                }  # fmt: skip
                line = {"custom_id": f"{split}-{i}", "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(line) + "\n")
    making.replace(path)


def _ask(model: Path, folder: Path, options: Sequence[str]) -> None:
    command = [sys.executable, "-m", "sluice", "batch", str(model), str(folder / REQUESTS), str(folder / ANSWERS)]
    ended = subprocess.run([*command, *options], check=False, stdout=subprocess.DEVNULL).returncode
    if ended == 2:  # it has said why
        raise InputError(f"{model}: `sluice batch` could not begin: see what it said above")
    if ended:
        raise SluiceError(f"{folder}: `sluice batch` ended with {ended}: the same command goes on from there")


def _answers(path: Path) -> dict[str, tuple[str, str]]:
    """Text and reason to end of each answer, by custom_id. Raises SluiceError for a request that failed."""
    found: dict[str, tuple[str, str]] = {}
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                answer = json.loads(line)
                response = answer.get("response") or {}
                if answer.get("error") or response.get("status_code") != 200:
                    why = json.dumps(answer.get("error") or response.get("body"))[:160]
                    raise SluiceError(f"{path}: {str(answer.get('custom_id'))[:40]} was not answered ({why})")
                choice = response["body"]["choices"][0]
                found[answer["custom_id"]] = choice["text"], choice["finish_reason"]
    except OSError as error:
        raise SluiceError(f"{path}: can't be read ({error.strerror}): start over with --force") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise SluiceError(f"{path}: holds a line that is no answer: start over with --force") from None
    return found


def _texts(
    prompts: Sequence[tuple[int, Ids]], split: str, answers: dict[str, tuple[str, str]], tokenizer: Tokenizer, end: int
) -> list[Text]:
    """Prompts with what was written; texts that the model ended, end. What is empty is left out."""
    written = [answers[f"{split}-{i}"] for i in range(len(prompts))]
    encoded = encode(tokenizer, [text.rstrip(_UNKNOWN) for text, _ in written])
    texts: list[Text] = []
    for (domain, prompt), ids, (_, reason) in zip(prompts, encoded, written, strict=True):
        ending = np.array([end] if reason == "stop" else [], np.int64)
        whole = np.concatenate([prompt, ids.astype(np.int64), ending])
        if len(whole) > len(prompt):
            texts.append(Text(whole, len(prompt), domain))
    return texts
