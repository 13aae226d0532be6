"""Folders of a teacher's texts, their batches, and the masks that say what is given, written and predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from stage_runs import END, some_texts, text_folder

from sluice.errors import InputError
from sluice.train.texts import META, Text, TextBatches, Texts, held_out, text_batch, write_texts

torch.set_num_threads(1)


def test_texts_are_read_as_they_were_written(tmp_path: Path) -> None:
    texts = text_folder(tmp_path / "t")
    assert (texts.n_texts("train"), texts.n_texts("valid")) == (24, 6)
    for i, wanted in enumerate(some_texts(1)):
        found = texts.text("train", i)
        assert np.array_equal(found.ids, wanted.ids) and found[1:] == wanted[1:]
    assert texts.n_ids("train") == sum(len(text.ids) for text in some_texts(1))
    again, other = text_folder(tmp_path / "again"), text_folder(tmp_path / "other", n_prompt=3)
    assert again.fingerprint == texts.fingerprint != other.fingerprint


def test_masks_say_what_is_native_and_what_is_learnt() -> None:
    texts = [Text(np.arange(10, 17), 3, 0), Text(np.arange(30, 34), 2, 1), Text(np.arange(40, 60), 2, 0)]
    batch = text_batch(texts, 9, END)
    assert batch.ids.shape == (3, 9) and batch.ids[1].tolist() == [30, 31, 32, 33, *[END] * 5]
    assert batch.n.tolist() == [7, 4, 9]
    assert batch.native.int().tolist() == [[1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, *[0] * 6], [1, 1, 1, *[0] * 6]]
    assert batch.answered.int().tolist() == [
        [0, 0, 1, 1, 1, 1, 0, 0, 0], [0, 1, 1, *[0] * 6], [0, 1, 1, 1, 1, 1, 1, 1, 0],
    ]  # fmt: skip
    assert batch.targets.tolist() == [13, 14, 15, 16, 32, 33, 42, 43, 44, 45, 46, 47, 48]


def test_every_epoch_gives_every_text_once_in_another_order(tmp_path: Path) -> None:
    texts = text_folder(tmp_path / "t")
    batches = TextBatches(texts, "train", 6, 32, seed=1)
    epochs = [[tuple(row[: int(n)].tolist()) for _ in range(4) for row, n in _rows(batches.next())] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(tuple(text.ids.tolist()) for text in some_texts(1))
    assert epochs[0] != epochs[1]


def test_batches_go_on_where_they_were_and_are_shared_by_processes(tmp_path: Path) -> None:
    texts = text_folder(tmp_path / "t")
    whole = TextBatches(texts, "train", 4, 32, seed=1)
    shares = [TextBatches(texts, "train", 4, 32, seed=1, rank=rank, world=2) for rank in (0, 1)]
    for _ in range(9):
        together = whole.next()
        parts = [one.next() for one in shares]
        rows = [row[: int(n)].tolist() for part in parts for row, n in _rows(part)]
        assert rows == [row[: int(n)].tolist() for row, n in _rows(together)]
    state = json.loads(json.dumps(whole.state()))
    again = TextBatches(texts, "train", 4, 32, seed=1)
    again.restore(state)
    assert torch.equal(again.next().ids, whole.next().ids)
    with pytest.raises(InputError, match="differ in seed"):
        TextBatches(texts, "train", 4, 32, seed=2).restore(state)
    with pytest.raises(InputError, match="does not say where"):
        again.restore({**state, "given": -1})
    with pytest.raises(InputError, match="can't be shared by 3 processes"):
        TextBatches(texts, "train", 4, 32, seed=1, world=3)


def test_prompts_without_room_for_an_answer_are_passed_over(tmp_path: Path) -> None:
    texts = text_folder(tmp_path / "t", n_prompt=4)  # of 4 and 5 tokens
    batch = TextBatches(texts, "train", 12, 5, seed=1).next()
    assert batch.n_prompt.tolist() == [4] * 12 and batch.n.tolist() == [5] * 12
    assert all(one.n_prompt.tolist() == [4] for one in held_out(texts, 2, 1, 5))
    assert len(held_out(texts, 100, 4, 32)) == 2
    for length in (4, 1):
        with pytest.raises(InputError, match="no prompt of its train texts"):
            TextBatches(texts, "train", 2, length, seed=1)
        with pytest.raises(InputError, match="no held-out prompt"):
            held_out(texts, 2, 2, length)


def test_changed_and_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no folder of a teacher's texts"):
        Texts(tmp_path)
    folder = tmp_path / "t"
    text_folder(folder)
    meta = json.loads((folder / META).read_text())
    for value, why in (
        ({**meta, "version": 2}, "is not sluice-texts 1"),
        ({**meta, "domains": []}, "is broken"),
        ({**meta, "end": -1}, "is broken"),
        ([1], "is not sluice-texts 1"),
    ):
        (folder / META).write_text(json.dumps(value))
        with pytest.raises(InputError, match=why):
            Texts(folder)
    (folder / META).write_text(json.dumps(meta))
    prompts = np.load(folder / "valid.prompts.npy")
    np.save(folder / "valid.prompts.npy", prompts + 1)
    with pytest.raises(InputError, match=r"valid.prompts.npy: is not what meta.json says"):
        Texts(folder)
    (folder / "valid.prompts.npy").write_bytes(b"x")
    with pytest.raises(InputError, match="is not what"):
        Texts(folder)
    (folder / "valid.prompts.npy").unlink()
    with pytest.raises(InputError, match="can't be read"):
        Texts(folder)


@pytest.mark.parametrize("wrong", [Text(np.arange(3), 3, 0), Text(np.arange(3), 0, 0), Text(np.arange(3), 1, 9),
                                   Text(np.array([1, 99]), 1, 0)])  # fmt: skip
def test_texts_that_are_none_are_refused(tmp_path: Path, wrong: Text) -> None:
    right = Text(np.arange(3), 1, 0)
    more = {"n_vocab": 64, "end": END, "tokenizer": "t", "domains": ["a"], "teacher": {}}
    write_texts(tmp_path, {"train": [right, wrong], "valid": [right]}, **more)
    with pytest.raises(InputError, match="don't fit each other"):
        Texts(tmp_path)
    with pytest.raises(InputError, match="no text in the valid split"):
        write_texts(tmp_path, {"train": [right], "valid": []}, **more)


def _rows(batch):  # type: ignore[no-untyped-def]
    return zip(batch.ids, batch.n, strict=True)
