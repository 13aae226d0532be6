"""Stages 2 and 3 on a tiny model: what learns, what it learns from, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_runs import END, imitating, quantised, settings, text_folder
from tiny_moe import random_ids, tiny_model
from torch import nn

from sluice.errors import InputError
from sluice.routing import open_prerouter
from sluice.train.heads import Heads
from sluice.train.loop import Stopped, fit
from sluice.train.lora import Lora, add_lora, digest, factors, open_lora
from sluice.train.onpolicy import OnPolicy
from sluice.train.recover import OnStudentPath, Recover, Served
from sluice.train.stages import ADAPTER, HEADS
from sluice.train.student import Student
from sluice.train.texts import TextBatches, Texts, held_out

torch.set_num_threads(1)
LENGTH = 20


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    return text_folder(tmp_path / "texts")


def served(texts: Texts, **changed: Any) -> Served:
    teacher = tiny_model()
    model = quantised(teacher, 0.2)
    heads = imitating(model)
    add_lora(model, Lora(2, ("attention",)))
    return Served(**({"model": model, "heads": heads, "teacher": teacher,
                      "held_out": held_out(texts, 4, 2, LENGTH), "facts": {"rank": 2}} | changed))  # fmt: skip


def batches(texts: Texts) -> TextBatches:
    return TextBatches(texts, "train", 4, LENGTH, seed=3)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def objective(stage: str, texts: Texts, **changed: Any) -> OnStudentPath:
    if stage == "recover":
        return Recover(served(texts, **changed), 0.5)
    return OnPolicy(served(texts, **changed), 6, END, seed=1)


@pytest.mark.parametrize("stage", ["recover", "onpolicy"])
def test_gradients_reach_heads_and_adapter_and_nothing_else(stage: str, texts: Texts) -> None:
    it = objective(stage, texts)
    with torch.no_grad():  # B and fc2 are zero at first, and what they multiply would get no gradient
        for parameter in it.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    loss, _ = it.loss(batches(texts).next())
    loss.backward()
    learning = it.trainable()
    assert {name.split(".")[0] for name in learning} == {"heads", "adapter"}
    assert len(learning) == len(list(it.heads.parameters())) + len(it.adapter)
    ids = {id(parameter) for parameter in learning.values()}
    for module in (it.student, it.teacher):
        assert module is not None
        for name, parameter in module.named_parameters():
            assert (parameter.grad is not None and bool(parameter.grad.any())) == (id(parameter) in ids), name
    assert {it.lr_scale(name) for name in learning} == {1.0}


@pytest.mark.parametrize("stage", ["recover", "onpolicy"])
def test_the_loss_falls_and_files_are_written(stage: str, texts: Texts, tmp_path: Path) -> None:
    it = objective(stage, texts)
    frozen = {name: value for name, value in state(it.student.model).items() if "lora_" not in name}
    began = {name: parameter.detach().clone() for name, parameter in it.trainable().items()}
    first = it.validate()
    result = fit(it, batches(texts), settings(steps=40, length=LENGTH), tmp_path / "run", recipe={"stage": stage})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert sum(losses[-2:]) < 0.85 * sum(losses[:2]) and set(result["valid"]) == set(first)
    wanted = {"loss", "kl", "teacher_loss"}
    assert set(first) == (wanted if stage == "recover" else wanted | {"text_loss", "repetition", "written"})
    assert all(torch.equal(it.student.model.state_dict()[name], value) for name, value in frozen.items())
    assert all(not torch.equal(began[name], parameter) for name, parameter in it.trainable().items())
    heads = Heads.open(tmp_path / "run" / HEADS)
    assert heads.stages == ("prerouter", stage)
    training = open_prerouter(tmp_path / "run" / HEADS).info.training
    assert training[stage] == {"rank": 2, "adapter": digest(it.adapter)}
    model = quantised(tiny_model(), 0.2)
    lora, loaded = open_lora(model, tmp_path / "run" / ADAPTER)
    assert lora == Lora(2, ("attention",)) and digest(loaded) == training[stage]["adapter"]
    ids = random_ids(1, 9)
    with torch.no_grad():  # what is written is what was trained
        assert torch.equal(Student(model, heads)(ids).logits, it.student(ids).logits)


def test_the_loss_of_recover_is_the_teachers_tokens_and_its_divergence(texts: Texts) -> None:
    it = Recover(served(texts), 0.5)
    batch = batches(texts).next()
    with torch.no_grad():
        loss, figures = it.loss(batch)
        entropies, divergences = [], []
        for row, n_prompt, n in zip(batch.ids, batch.n_prompt.tolist(), batch.n.tolist(), strict=True):
            native = torch.arange(n) <= n_prompt
            q = it.student(row[None, :n], native[None]).logits[0, n_prompt - 1 : n - 1].log_softmax(-1)
            p = it.teacher(input_ids=row[None, :n]).logits[0, n_prompt - 1 : n - 1].log_softmax(-1)  # type: ignore[misc]
            entropies.append(-q.gather(1, row[n_prompt:n, None])[:, 0])
            divergences.append((p.exp() * (p - q)).sum(-1))
    entropy, divergence = torch.cat(entropies).mean(), torch.cat(divergences).mean()
    torch.testing.assert_close(loss, entropy + 0.5 * divergence, rtol=1e-4, atol=1e-5)
    assert figures["text_loss"] == pytest.approx(float(entropy), rel=1e-4)
    assert figures["kl"] == pytest.approx(float(divergence), rel=1e-3)
    with torch.no_grad():
        plain, none = Recover(served(texts), 0.0).loss(batch)
    torch.testing.assert_close(plain, entropy, rtol=1e-4, atol=1e-5)
    assert none == {}


def test_the_loss_of_onpolicy_is_the_reverse_divergence_on_the_students_own_text(texts: Texts) -> None:
    it = OnPolicy(served(texts), 6, END, seed=1)
    batch = batches(texts).next()
    it.begin_step(7, 10)
    with torch.no_grad():
        loss, figures = it.loss(batch)
    prompts = [row[:n] for row, n in zip(batch.ids, batch.n_prompt.tolist(), strict=True)]
    grown = it.student.generate(prompts, 6, temperature=1.0, seed=(1 << 20) + 7, stop=(END,))
    found = []
    with torch.no_grad():
        for prompt, row in zip(prompts, grown, strict=True):
            n = len(prompt)
            q = it.student(row[None], (torch.arange(len(row)) <= n)[None]).logits[0, n - 1 : -1].log_softmax(-1)
            p = it.teacher(input_ids=row[None]).logits[0, n - 1 : -1].log_softmax(-1)  # type: ignore[misc]
            found.append((q.exp() * (q - p)).sum(-1))
    torch.testing.assert_close(loss, torch.cat(found).mean(), rtol=1e-4, atol=1e-5)
    assert figures["written"] == pytest.approx(sum(map(len, found)) / 4)
    it.begin_step(8, 10)
    assert not torch.equal(it.write(batch, 1).ids, it.write(batch, 2).ids)


def test_validation_is_the_same_each_time_and_nothing_learns_from_it(texts: Texts) -> None:
    it = OnPolicy(served(texts), 5, END)
    before = {name: value.detach().clone() for name, value in it.trainable().items()}
    assert it.validate() == it.validate()
    assert all(torch.equal(before[name], value) for name, value in it.trainable().items())
    assert OnPolicy(served(texts, held_out=[]), 5, END).validate() == {}
    plain = Recover(served(texts, teacher=None)).validate()
    assert set(plain) == {"loss"}


@pytest.mark.parametrize("stage", ["recover", "onpolicy"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(stage: str, texts: Texts, tmp_path: Path) -> None:
    numbers = settings(steps=6, length=LENGTH, save_every=4, valid_every=0)
    whole = objective(stage, texts)
    fit(whole, batches(texts), numbers, tmp_path / "whole", recipe={})
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        fit(objective(stage, texts), batches(texts), numbers, tmp_path / "cut", recipe={}, stop=lambda: next(asked))
    again = objective(stage, texts)
    fit(again, batches(texts), numbers, tmp_path / "cut", recipe={})
    for name, parameter in whole.trainable().items():
        assert torch.equal(parameter, again.trainable()[name]), name


def test_what_can_not_be_trained_is_refused(texts: Texts) -> None:
    with pytest.raises(InputError, match="has no adapter"):
        Recover(served(texts, model=quantised(tiny_model())))
    it = served(texts)
    with pytest.raises(InputError, match="heads for another model"):
        Recover(served(texts, heads=Heads.untrained(tiny_model(seed=3))))
    with pytest.raises(InputError, match="these give none"):
        Recover(served(texts, heads=Heads.untrained(it.model, weights="router")))
    with pytest.raises(InputError, match="there is no teacher"):
        Recover(served(texts, teacher=None), 0.5)
    with pytest.raises(InputError, match="out of range"):
        Recover(it, -1.0)
    with pytest.raises(InputError, match="there is none"):
        OnPolicy(served(texts, teacher=None), 4, END)
    with pytest.raises(InputError, match="give at least 1"):
        OnPolicy(it, 0, END)


def test_rates_of_heads_are_theirs(texts: Texts) -> None:
    it = Recover(served(texts, heads_lr=0.25))
    assert {name.split(".")[0]: it.lr_scale(name) for name in it.trainable()} == {"heads": 0.25, "adapter": 1.0}
    assert len(factors(it.student.model)) == len(it.adapter)


def test_what_else_is_to_be_written_is_asked_for_at_the_end(texts: Texts, tmp_path: Path) -> None:
    called: list[Path] = []
    it = Recover(served(texts, export=lambda model, folder: called.append(folder)))
    assert not called
    it.save_final(tmp_path)
    assert called == [tmp_path] and (tmp_path / HEADS).is_file() and (tmp_path / ADAPTER).is_dir()


@pytest.mark.parametrize("stage", ["recover", "onpolicy"])
def test_products_in_sixteen_bits_train_too(stage: str, texts: Texts, tmp_path: Path) -> None:
    it = objective(stage, texts)
    result = fit(it, batches(texts), settings(steps=3, length=LENGTH, dtype="bfloat16"), tmp_path / "run", recipe={})
    assert result["valid"]["loss"] > 0
    assert all(parameter.dtype == torch.float32 for parameter in it.trainable().values())
