"""What a teacher is asked to write, and what becomes of its answers, with answers that no engine gave."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toys import toy_data

from sluice.errors import InputError, SluiceError
from sluice.ggml import load_library
from sluice.text.vocabulary import UNUSED
from sluice.train import teacher_text
from sluice.train.data import Tokens
from sluice.train.teacher_text import ANSWERS, REQUESTS, Asked, write_teacher_texts
from sluice.train.texts import META, Texts
from sluice.train.tokenizer import encode

ASKED = Asked(prompts=5, held_out=3, prompt_tokens=8, tokens=6, temperature=0.5, seed=4)
Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens(toy_data(tmp_path_factory.mktemp("data")))


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, data: Tokens, tmp_path: Path) -> Callable[..., Texts]:
    """Has texts written by `answer`, which stands in for a model: a request to a choice, None for a failure."""
    monkeypatch.setattr(teacher_text, "_identity", lambda model, data, library: {"fingerprint": "f"})

    def write(answer: Answer, *, ended: int = 0, asked: Asked = ASKED, **more: Any) -> Texts:
        def run(command: list[str], **options: Any) -> SimpleNamespace:
            assert command[1:5] == ["-m", "sluice", "batch", "m.gguf"] and command[7:] == ["--ctx", "14"]
            given, out = map(Path, command[5:7])
            lines = []
            for line in given.read_text().splitlines():
                request = json.loads(line)
                choice = answer(request)
                body = {"choices": [choice]} if choice is not None else {"error": {"message": "no"}}
                response = {"status_code": 200 if choice is not None else 400, "body": body}
                lines.append(json.dumps({"custom_id": request["custom_id"], "response": response, "error": None}))
            out.write_text("\n".join(reversed(lines)) + "\n")  # in the order in which they are done
            return SimpleNamespace(returncode=ended)

        monkeypatch.setattr(subprocess, "run", run)
        write_teacher_texts(Path("m.gguf"), data, tmp_path / "texts", asked, library=load_library(),
                            options=["--ctx", "14"], **more)  # fmt: skip
        return Texts(tmp_path / "texts")

    return write


def choice(text: str, reason: str = "length") -> dict[str, Any]:
    return {"text": text, "finish_reason": reason, "index": 0}


def test_prompts_are_asked_for_as_ids_and_answers_stand_behind_them(
    ask: Callable[..., Texts], data: Tokens, tmp_path: Path
) -> None:
    texts = ask(lambda request: choice(f" value {request['custom_id']}"))
    asked = map(json.loads, (tmp_path / "texts" / REQUESTS).read_text().splitlines())
    requests = {request["custom_id"]: request["body"] for request in asked}
    assert list(requests) == [*(f"train-{i}" for i in range(5)), *(f"valid-{i}" for i in range(3))]
    assert len({body["seed"] for body in requests.values()}) == 8
    engine = data.tokenizer()
    for name, body in requests.items():
        assert body["max_tokens"] == 6 and body["temperature"] == 0.5 and len(body["prompt"]) == 8
        split, _, i = name.partition("-")
        (answer,) = encode(engine, [f" value {name}"])
        found = texts.text(split, int(i))
        assert found.ids.tolist() == [*body["prompt"], *answer.tolist()]
        assert (found.n_prompt, found.domain) == (8, int(i) % 2)


def test_a_text_that_the_model_ended_ends_and_an_empty_one_is_left_out(ask: Callable[..., Texts], data: Tokens) -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"train-1": choice("", "length"), "train-2": choice("", "stop"), "train-3": choice(" a�", "stop")}.get(
            request["custom_id"], choice(" b")
        )

    texts = ask(answer)
    assert texts.n_texts("train") == 4
    (a,) = encode(data.tokenizer(), [" a"])
    assert texts.text("train", 1).ids[8:].tolist() == [data.end]
    assert texts.text("train", 2).ids[8:].tolist() == [*a.tolist(), data.end]


def test_what_was_written_is_not_written_again_and_force_starts_over(ask: Callable[..., Texts]) -> None:
    first = ask(lambda request: choice(" x"))
    assert ask(lambda request: choice(" y")).fingerprint == first.fingerprint
    assert ask(lambda request: choice(" y"), force=True).fingerprint != first.fingerprint
    with pytest.raises(InputError, match="asked for otherwise"):
        ask(lambda request: choice(" y"), asked=Asked(5, 3, 8, 7))


def test_endings_before_the_end_are_told_apart(ask: Callable[..., Texts], tmp_path: Path) -> None:
    for code, kind, why in ((2, InputError, "could not begin"), (130, SluiceError, "ended with 130: the same command")):
        with pytest.raises(kind, match=why):
            ask(lambda request: choice(" x"), ended=code)
        assert not (tmp_path / "texts" / META).exists()
    with pytest.raises(SluiceError, match=r"train-0 was not answered \(.*no"):
        ask(lambda request: None if request["custom_id"] == "train-0" else choice(" x"))
    with pytest.raises(SluiceError, match="holds a line that is no answer"):
        ask(lambda request: {"text": 3})
    assert ask(lambda request: choice(" x")).n_texts("train") == 5
    (tmp_path / "texts" / META).unlink()
    (tmp_path / "texts" / ANSWERS).unlink()
    (tmp_path / "texts" / "asked.json").write_text("{")
    with pytest.raises(InputError, match=r"asked\.json: is broken"):
        ask(lambda request: choice(" x"))


def test_numbers_that_ask_for_nothing_are_refused() -> None:
    for numbers in ((0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)):
        with pytest.raises(InputError, match="is too small"):
            Asked(*numbers)
    with pytest.raises(InputError, match="at least 0"):
        Asked(1, 1, 1, 1, temperature=-1)
    with pytest.raises(InputError, match="are too many: ask for fewer"):
        Asked(10**12, 1, 1, 1)


def test_a_model_of_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch, data: Tokens) -> None:
    tokenizer = data.tokenizer()
    own, n = [tokenizer.id_to_token(i) for i in range(data.n_vocab)], data.n_vocab
    told = {"tokens": [*own, "[PAD]"], "token_type": [1] * n + [UNUSED]}

    def identity() -> dict[str, Any]:
        metadata = {f"tokenizer.ggml.{name}": value for name, value in told.items()}
        file = SimpleNamespace(metadata=metadata, paths=[])
        family = SimpleNamespace(read_spec=lambda _: SimpleNamespace(n_vocab=len(told["tokens"])))
        monkeypatch.setattr(teacher_text, "open_gguf", lambda *_: file)
        monkeypatch.setattr(teacher_text, "family_of", lambda _: family)
        monkeypatch.setattr(teacher_text, "fingerprint", lambda *_: "f")
        return teacher_text._identity(Path("m.gguf"), data, load_library())

    assert identity() == {"fingerprint": "f", "bytes": 0}  # rows that fill up are no tokens
    told["token_type"][-1] = 1
    with pytest.raises(InputError, match="its tokenizer is not the data's"):
        identity()
    told |= {"tokens": [*own[:-2], own[-1], own[-2]], "token_type": [1] * n}
    with pytest.raises(InputError, match="its tokenizer is not the data's"):
        identity()
