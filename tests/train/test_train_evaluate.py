"""What `sluice train evaluate` measures, on toy models and toy text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train.toys import toy_data, toy_model, toy_texts, write_documents

from sluice.cli.train_evaluate import evaluate as command
from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.lab.replay import Demands
from sluice.lab.simulate import simulate
from sluice.trace import TraceReader
from sluice.train.data import Tokens, prepare
from sluice.train.evaluate import Wanted, evaluate, greedy, plain, prerouted, score, slots_of
from sluice.train.gguf_out import export_gguf
from sluice.train.heads import Heads
from sluice.train.opening import open_model
from sluice.train.passages import passages, write_passages
from sluice.train.repetition import repetition, repetition_rate
from sluice.train.scores import Tally, balanced, perplexity_of, pooled
from sluice.train.student import Student
from sluice.train.tokenizer import encode, save_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_data(tmp_path_factory.mktemp("data"), valid_share=0.3)


@pytest.fixture(scope="module")
def model_folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    toy_model(vocab=300).save_pretrained(folder)
    save_tokenizer(Tokens(data).tokenizer(), folder)
    return folder


# --- numbers


def test_repetition_is_the_share_of_n_grams_seen_before() -> None:
    assert repetition_rate([1, 2, 3, 4, 5, 6], 4) == 0
    assert repetition_rate([1, 2, 1, 2, 1, 2], 2) == pytest.approx(3 / 5)
    assert repetition_rate([7] * 10, 4) == pytest.approx(6 / 7)
    assert repetition_rate([1, 2, 3], 4) is None
    found = repetition([[7] * 10, [1, 2, 3, 4, 5], [1]], 4)
    assert (found.texts, found.tokens) == (3, 16)
    assert found.rate == pytest.approx(3 / 7) and found.worst == pytest.approx(6 / 7)
    assert found.distinct == pytest.approx(3 / 9)
    empty = repetition([[1]])
    assert (empty.rate, empty.worst, empty.distinct) == (None, None, None)


def test_tallies_are_losses_and_divergences_summed() -> None:
    torch.manual_seed(0)
    q, p = torch.randn(300, 7), torch.randn(300, 7)
    targets = torch.randint(7, (300,))
    tally = Tally()
    tally.add(q[:100], targets[:100], p[:100])
    tally.add(q[100:], targets[100:], p[100:])
    found = tally.as_dict()
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(q.double(), targets)))
    assert found["ppl"] == pytest.approx(math.exp(found["loss"]))
    log_p, log_q = torch.log_softmax(p.double(), -1), torch.log_softmax(q.double(), -1)
    forward = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    reverse = torch.nn.functional.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
    assert found["kl"] == pytest.approx(float(forward)) and found["reverse_kl"] == pytest.approx(float(reverse))
    assert found["same_top"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert "kl" not in Tally(tokens=1, loss=1.0).as_dict()
    assert perplexity_of(1e6) == math.inf


def test_domains_weigh_alike_however_many_tokens_they_have() -> None:
    a, b = Tally(tokens=10, loss=10.0), Tally(tokens=1000, loss=3000.0)
    assert balanced([a, b])["loss"] == 2 and balanced([a, b])["kl"] is None
    assert pooled([a, b]).mean == pytest.approx(3010 / 1010)
    assert balanced([])["ppl"] is None


def test_slots_are_rounded_as_the_laboratory_rounds_them() -> None:
    assert (slots_of(0.134, 256), slots_of(0.134, 512), slots_of(1, 24)) == (34, 69, 24)
    for share in (0.001, 1.1):
        with pytest.raises(InputError, match="give 1 to 24"):
            slots_of(share, 24)


# --- passages


def test_passages_are_what_their_text_alone_is_tokenised_to(data: Path, tmp_path: Path) -> None:
    tokens = Tokens(data)
    found = passages(tokens, "valid", 5, 64)
    assert [one.domain for one in found[:4]] == ["code", "prose", "code", "prose"]
    for one in found:
        (ids,) = encode(tokens.tokenizer(), [one.text])
        assert np.array_equal(ids, one.ids) and 16 <= len(one.ids) <= 64
        assert tokens.end not in one.ids and one.text == one.text.strip()
    again = passages(tokens, "valid", 5, 64)
    assert [one.text for one in again] == [one.text for one in found]
    files = write_passages(found, tmp_path / "texts")
    assert [domain for domain, _ in files] == [one.domain for one in found]
    assert [file.read_bytes().decode() for _, file in files] == [one.text for one in found]
    assert sorted(file for _, file in files) == [file for _, file in files]


def test_more_passages_than_a_split_holds_are_as_many_as_it_holds(data: Path) -> None:
    tokens = Tokens(data)
    room = {domain: tokens.shard(domain, "valid").tokens // 64 for domain in tokens.domains}
    found = passages(tokens, "valid", 10_000, 64)
    assert len(found) == sum(room.values())
    with pytest.raises(InputError, match="domain code: its valid split has"):
        passages(tokens, "valid", 4, 1 << 20)
    with pytest.raises(InputError, match="give at least 1"):
        passages(tokens, "valid", 0, 64)


# --- all of it


def test_what_is_measured_is_what_the_parts_say(data: Path, tmp_path: Path) -> None:
    model, teacher = toy_model(), toy_model(seed=1)
    texts = toy_texts([("a", 40), ("b", 50), ("a", 33)])
    counted = toy_texts([("a", 60), ("b", 60)], seed=1)
    heads = Heads.untrained(model)
    trace = tmp_path / "t.parquet"
    wanted = Wanted(shares=(0.25, 0.5), trace=trace, scores=True, generate=12)
    found = evaluate(model, texts, counted, 0, heads=heads, teacher=teacher, wanted=wanted, name="toy")
    json.dumps(found, allow_nan=False)
    losses = []
    for text, said in zip(texts, found["per_text"], strict=True):
        ids = torch.from_numpy(text.ids)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total = float(torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="sum"))
        assert said == {"domain": text.domain, "tokens": len(text.ids) - 1, "loss": pytest.approx(total)}
        losses.append(total)
    mean = ((losses[0] + losses[2]) / (39 + 32) + losses[1] / 49) / 2
    assert found["balanced"]["ppl"] == pytest.approx(math.exp(mean))
    assert found["per_domain"]["a"]["tokens"] == 71 and found["per_domain"]["b"]["kl"] > 0
    with TraceReader(trace) as reader:
        demands = Demands.of(reader)
    assert [one["capacity_slots"] for one in found["cache"]["results"]] == [6, 12]
    assert [one["misses"] for one in found["cache"]["results"]] == [simulate(demands, "lru", n).misses for n in (6, 12)]
    curve = {one["slots"]: one["misses_per_token"] * found["cache"]["tokens"] for one in found["cache"]["curve"]}
    assert curve[12] == pytest.approx(found["cache"]["results"][1]["misses"])
    assert found["cache"]["demands_per_token"] == 6 and found["domains"]["set_size"] == 4
    assert found["recall"]["mean"]["head"] == found["recall"]["mean"]["untrained"]
    assert found["repetition"]["texts"] == 3 and 0 < found["load"]["load_entropy"] <= 1


def test_greedy_text_is_the_likeliest_and_ends_where_a_document_does() -> None:
    model = toy_model()
    texts = toy_texts([("a", 40), ("a", 33), ("a", 20)])
    rows = greedy(model, None, texts, 9, end=-1)
    assert [len(row) for row in rows] == [9, 9]
    ids = texts[0].ids[:32].tolist()
    with torch.no_grad():
        for _ in range(9):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert rows[0] == ids[32:]
    cut = greedy(model, None, texts, 9, end=rows[0][4])[0]
    assert cut == rows[0][: rows[0].index(rows[0][4]) + 1]
    with pytest.raises(InputError, match="give longer passages"):
        greedy(model, None, texts[2:], 9, end=-1)


def test_the_students_path_is_scored_and_continued_by_its_own_routes() -> None:
    model = toy_model()
    heads = Heads.untrained(model)
    with torch.no_grad():
        for owner in heads.info.predicts:
            heads.head(owner).fc2.bias.normal_(std=3)  # far from the routers
    student = Student(model, heads)
    texts = toy_texts([("a", 40), ("b", 34)])
    own, led = score(model, plain(model), texts), score(model, prerouted(student), texts)
    assert own.by_domain()["a"].loss != led.by_domain()["a"].loss
    for mine, theirs in zip(own.routes, led.routes, strict=True):
        assert np.array_equal(mine.experts[0], theirs.experts[0])  # the first token has nothing said of it
        assert np.array_equal(mine.experts[:, 0], theirs.experts[:, 0])  # nor has the first layer ever
        assert not np.array_equal(mine.experts[1:, 1], theirs.experts[1:, 1])
    found = evaluate(model, texts, texts, 0, heads=heads, student=student, teacher=model, wanted=Wanted((0.5,)))
    assert found["balanced"]["kl"] > 0 and found["repetition"] is None
    assert len(greedy(model, student, texts, 5, end=-1)[0]) == 5


def test_a_model_that_computes_no_numbers_is_refused() -> None:
    model = toy_model()
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(InputError, match="diverged"):
        score(model, plain(model), toy_texts([("a", 20)]))
    with pytest.raises(InputError, match="vocabulary has 310"):
        score(toy_model(), plain(toy_model()), toy_texts([("a", 20)]), teacher=toy_model(vocab=310))


# --- the command


def test_the_command_says_one_object(
    data: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = tmp_path / "heads.safetensors"
    Heads.untrained(open_model(model_folder)).save(heads, {"stages": []})
    options: dict[str, Any] = {"passages": 3, "length": 48, "capacity": "25%,50%"}
    assert command(model_folder, data, prerouter=heads, generate=8, json=True, **options) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["texts"] == 6 and set(said["per_domain"]) == {"code", "prose"} and said["routing"] == "exact"
    assert said["recall"]["mean"]["chance"] == 0.25 and said["balanced"]["kl"] is None
    assert said["data"] == Tokens(data).fingerprint
    assert command(model_folder, data, prerouter=heads, routing="prerouted", teacher=model_folder, **options) == 0
    shown = capsys.readouterr().out
    assert "perplexity" in shown and "recall@k" in shown and "LRU, 25.0%" in shown
    assert command(model_folder, data, texts=tmp_path / "texts", json=True, **options) == 0
    listed = json.loads(capsys.readouterr().out)["texts"]
    assert len(listed) == 6 and Path(listed[0]["file"]).read_text()


def test_the_command_refuses_by_name(data: Path, model_folder: Path, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"routing": "prerouted"}, "give --prerouter"),
        ({"routing": "other"}, "choose from exact"),
        ({"capacity": "12"}, "per cent"),
        ({"passages": 0}, "--passages 0"),
        ({"trace": tmp_path}, "directory"),
        ({"length": 1 << 20}, "domain code"),
    ]
    for more, said in wrong:
        with pytest.raises(InputError, match=said):
            command(model_folder, data, **more)
    with pytest.raises(InputError, match="no model's folder"):
        open_model(tmp_path)
    other = tmp_path / "other"
    files = write_documents(tmp_path, documents=10, words=40)
    prepare(other, {name: [path] for name, path in files.items()}, vocab=290)
    with pytest.raises(InputError, match="another tokenizer"):
        command(model_folder, other, length=16)


def test_weights_of_another_model_of_the_same_shape_are_refused(
    data: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    toy_model(vocab=300, seed=1).save_pretrained(other)
    save_tokenizer(Tokens(data).tokenizer(), other)
    library = load_library()
    for folder in (model_folder, other):
        export_gguf(folder, tmp_path / f"{folder.name}.gguf", library, type="q8_0")
    words: dict[str, Any] = {"passages": 1, "length": 32, "json": True}
    assert command(model_folder, data, weights=tmp_path / f"{model_folder.name}.gguf", **words) == 0
    assert json.loads(capsys.readouterr().out)["domains"]
    with pytest.raises(InputError, match="another model of the same shape"):
        command(model_folder, data, weights=tmp_path / "other.gguf", **words)
