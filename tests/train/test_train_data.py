"""Data folders and the batches out of them: what is in them, that they repeat exactly, and what is refused by name."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.cli.train_data import data, parse_domains
from sluice.errors import InputError
from sluice.train.batches import _order
from sluice.train.data import Batches, Tokens, prepare
from sluice.train.documents import find_files, read_documents
from sluice.train.shards import META, SPLITS, ids_file, sha256, starts_file
from sluice.train.tokenizer import FILE, train_tokenizer

WORDS = ["router", "expert", "token", "head", "cache", "slot", "layer", "miss", "hit", "wave", "pin", "trace", "route"]


def texts(n: int, seed: int) -> list[str]:
    """`n` different documents of 20 to 120 words."""
    rng = random.Random(seed)
    return [f"{i}: {' '.join(rng.choices(WORDS, k=rng.randint(20, 120)))}." for i in range(n)]


def jsonl(path: Path, documents: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | Path]]:
    folder = tmp_path_factory.mktemp("sources")
    files = folder / "prose"
    files.mkdir()
    for i, text in enumerate(texts(40, seed=2)):
        (files / f"{i}.txt").write_text(text, encoding="utf-8")
    code = texts(60, seed=1)
    return {
        "code": [jsonl(folder / "code.jsonl", [*code, code[3], "  \n"])],
        "prose": [files],
        "medicine": [jsonl(folder / "medicine.jsonl", texts(80, seed=3))],
    }


@pytest.fixture(scope="module")
def folder(sources: dict[str, list[str | Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "data"
    prepare(out, sources, vocab=300, valid_share=0.2, seed=7)
    return out


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


# What a data folder holds


def test_every_document_is_on_one_side_once_and_comes_back_as_text(folder: Path) -> None:
    tokens = Tokens(folder)
    engine = tokens.tokenizer()
    assert tokens.domains == ("code", "medicine", "prose")
    for domain, n, seed in (("code", 60, 1), ("prose", 40, 2), ("medicine", 80, 3)):
        found = [
            engine.decode(ids[1:-1].tolist()) for split in SPLITS for ids in tokens.documents(domain, split)
        ]  # fmt: skip
        assert sorted(found) == sorted(texts(n, seed))
        held_out = tokens.shard(domain, "valid").documents
        assert 0.05 * n < held_out < 0.4 * n  # a share of 0.2, by chance
        assert sum(tokens.shard(domain, split).bytes for split in SPLITS) == sum(len(text.encode()) for text in found)
    assert tokens.meta.duplicates == {"code": 1, "prose": 0, "medicine": 0}


def test_documents_stand_between_ends(folder: Path) -> None:
    tokens = Tokens(folder)
    ids = tokens.ids("code", "train")
    assert ids.dtype == np.uint16
    documents = tokens.documents("code", "train")
    assert len(documents) == tokens.shard("code", "train").documents == len(documents[:])
    joined = np.concatenate([documents[0][:1], *(each[1:] for each in documents)])
    np.testing.assert_array_equal(joined, ids)
    assert (ids == tokens.end).sum() == len(documents) + 1
    assert documents[-1].dtype == np.int64 and documents[-1][-1] == documents[-1][0] == tokens.end
    with pytest.raises(IndexError):
        documents[len(documents)]


def test_split_and_order_do_not_depend_on_files_or_other_documents(
    folder: Path, sources: dict[str, list[str | Path]], tmp_path: Path
) -> None:
    shuffled = texts(60, seed=1)
    random.Random(0).shuffle(shuffled)
    more = jsonl(tmp_path / "more.jsonl", [*shuffled, *(f"new {text}" for text in texts(20, seed=9))])
    meta = prepare(tmp_path / "data", {"code": [more]}, tokenizer=folder, valid_share=0.2, seed=7)
    assert meta.tokenizer == Tokens(folder).meta.tokenizer
    old, new = Tokens(folder), Tokens(tmp_path / "data")
    for split in SPLITS:
        before = [ids.tobytes() for ids in old.documents("code", split)]
        after = [ids.tobytes() for ids in new.documents("code", split)]
        kept = [ids for ids in after if ids in set(before)]
        assert kept == before


def test_preparing_again_gives_the_same_bytes(
    folder: Path, sources: dict[str, list[str | Path]], tmp_path: Path
) -> None:
    told: list[float] = []

    def progress(done: float, total: float) -> None:
        told.append(done / total)

    prepare(tmp_path / "data", sources, vocab=300, valid_share=0.2, seed=7, progress=progress)
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "data").iterdir()}
    for file in folder.iterdir():
        assert (tmp_path / "data" / file.name).read_bytes() == file.read_bytes()
    assert told == sorted(told) and told[-1] == 1
    prepare(tmp_path / "other", sources, vocab=300, valid_share=0.2, seed=8)
    assert Tokens(tmp_path / "other").fingerprint != Tokens(folder).fingerprint


def test_held_out_text_teaches_no_merges(tmp_path: Path) -> None:
    """A pair of letters that stands in held-out documents alone becomes no token."""
    file = jsonl(tmp_path / "a.jsonl", texts(40, seed=1))
    prepare(tmp_path / "first", {"a": [file]}, vocab=300, valid_share=0.3, seed=0)
    tokens = Tokens(tmp_path / "first")
    engine = tokens.tokenizer()
    held_out = {engine.decode(ids[1:-1].tolist()) for ids in tokens.documents("a", "valid")}
    train = [text for text in texts(40, seed=1) if text not in held_out]
    assert engine.to_str() == train_tokenizer(train, 300).to_str()


def test_a_handful_of_documents_still_has_both_sides(tmp_path: Path) -> None:
    for share in (0.001, 0.999):
        meta = prepare(
            tmp_path / str(share), {"a": [jsonl(tmp_path / "a.jsonl", texts(2, seed=1))]}, vocab=259, valid_share=share
        )  # fmt: skip
        assert [meta.domains["a"][split].documents for split in SPLITS] == [1, 1]


def test_special_text_and_odd_characters_in_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        '\ufeff{"text": "one <|endoftext|> two", "id": 3}\n\n'
        '{"text": "lone \\ud800 surrogate"}\r\n{"text": "\\r\\n x"}\n',
        encoding="utf-8",
    )
    assert list(read_documents(file)) == ["one <|endoftext|> two", "lone \ufffd surrogate", "\r\n x"]
    prepare(tmp_path / "data", {"a": [file]}, vocab=259)
    tokens = Tokens(tmp_path / "data")
    assert all((ids[1:-1] != tokens.end).all() for split in SPLITS for ids in tokens.documents("a", split))


# Batches


def test_batches_are_rows_of_the_shards_balanced_over_domains(folder: Path) -> None:
    tokens = Tokens(folder)
    batches = Batches(tokens, "train", 6, 32, seed=1)
    streams = {i: tokens.ids(domain, "train").astype(np.int64).tobytes() for i, domain in enumerate(tokens.domains)}
    for _ in range(5):
        ids, domain = batches.next()
        assert ids.shape == (6, 33) and ids.dtype == domain.dtype == np.int64
        assert np.bincount(domain, minlength=3).tolist() == [2, 2, 2]
        assert all(row.tobytes() in streams[i] for row, i in zip(ids, domain.tolist(), strict=True))


def test_an_epoch_of_a_domain_predicts_every_token_at_most_once(folder: Path) -> None:
    tokens = Tokens(folder)
    ids = np.arange(len(tokens.ids("code", "train")), dtype=np.uint16)
    tokens._ids["code", "train"] = ids  # each id says where it stands
    n = len(ids) - 1
    batches = Batches(tokens, "train", 1, 32, seed=1, domains=["code"])
    rows: list[list[int]] = []
    while True:
        row = batches.next()[0][0]
        assert (np.diff(row) == 1).all()
        if set(row[1:].tolist()) & {i for each in rows for i in each}:
            break
        rows.append(row[1:].tolist())
    assert len(rows) >= (n - 32) // 32  # all but the ends, whatever the epoch's offset
    assert [row[0] for row in rows] != sorted(row[0] for row in rows)


def test_epochs_differ_and_never_end(folder: Path) -> None:
    tokens = Tokens(folder)
    batches = Batches(tokens, "valid", 3, 64, seed=1)
    firsts = [tuple(batches.next()[0][0].tolist()) for _ in range(200)]
    assert len(set(firsts)) > 20  # one order again and again would have as few rows as the shard


def draw(batches: Batches, n: int) -> list[tuple[bytes, bytes]]:
    return [(ids.tobytes(), domain.tobytes()) for ids, domain in (batches.next() for _ in range(n))]


def test_same_seed_same_batches_and_resume_is_exact(folder: Path) -> None:
    tokens = Tokens(folder)
    make: Callable[[], Batches] = lambda: Batches(tokens, "train", 4, 40, seed=5)  # noqa: E731
    whole = draw(make(), 90)
    assert draw(make(), 90) == whole
    assert draw(Batches(tokens, "train", 4, 40, seed=6), 90) != whole
    for done in (0, 1, 37, 61):
        first = make()
        draw(first, done)
        state = json.loads(json.dumps(first.state()))
        assert len(json.dumps(state)) < 1000
        again = make()
        draw(again, 70)  # what it did before does not matter
        again.restore(state)
        assert draw(again, 90 - done) == whole[done:]


def test_processes_share_a_batch(folder: Path) -> None:
    tokens = Tokens(folder)
    alone = Batches(tokens, "train", 6, 40, seed=5)
    parts = [Batches(tokens, "train", 6, 40, seed=5, rank=rank, world=3) for rank in range(3)]
    for _ in range(8):
        ids, domain = alone.next()
        got = [part.next() for part in parts]
        np.testing.assert_array_equal(np.concatenate([each[0] for each in got]), ids)
        np.testing.assert_array_equal(np.concatenate([each[1] for each in got]), domain)
    parts[0].restore(alone.state())
    assert alone.state() == parts[0].state() == parts[2].state()


def test_weights_are_kept_and_rows_stay_the_same(folder: Path) -> None:
    tokens = Tokens(folder)
    weighted = Batches(tokens, "train", 4, 40, seed=5, domains=["prose", "code"], weights={"code": 3, "prose": 1})
    equal = Batches(tokens, "train", 4, 40, seed=5)
    rows: dict[int, list[bytes]] = {}
    for batches in (weighted, equal):
        mine: dict[int, list[bytes]] = {}
        for _ in range(20):
            ids, domain = batches.next()
            for row, i in zip(ids, domain.tolist(), strict=True):
                mine.setdefault(i, []).append(row.tobytes())
        if not rows:
            assert {i: len(each) for i, each in mine.items()} == {0: 60, 2: 20}  # indices in Tokens.domains
            rows = mine
        else:
            for i, each in rows.items():
                n = min(len(each), len(mine[i]))
                assert each[:n] == mine[i][:n]


def splitmix64(n: int, state: int) -> list[int]:
    """The first `n` numbers after `state` (Steele, Lea and Flood 2014)."""
    found = []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) % (1 << 64)
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
        found.append(z ^ (z >> 31))
    return found


def test_order_is_that_of_splitmix64() -> None:
    for n, key in ((1, 3), (2, 3), (1000, 3), (50, (1 << 64) - 1)):
        numbers = splitmix64(n, key)
        assert _order(n, key).tolist() == sorted(range(n), key=numbers.__getitem__)


# What is refused


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"batch": 0}, "a batch of 0 rows"),
        ({"length": 0}, "rows of 0 tokens"),
        ({"split": "test"}, "no split 'test': choose of train, valid"),
        ({"domains": ["code", "cod"]}, "no domain 'cod': choose of code, medicine, prose"),
        ({"domains": []}, "no domain is chosen"),
        ({"world": 3}, "4 rows can't be shared evenly by 3"),
        ({"weights": {"code": 1}}, "give one for each of code, medicine, prose"),
        ({"weights": {"code": 1, "prose": 0, "medicine": 1}}, "not a positive number"),
        ({"length": 100_000}, "domain code: its train split has [0-9]+ tokens, fewer than a row of 100001"),
    ],
)
def test_batches_that_can_not_be_are_refused(folder: Path, more: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"split": "train", "batch": 4, "length": 32, "seed": 0, **more}
    with pytest.raises(InputError, match=words):
        Batches(Tokens(folder), given.pop("split"), given.pop("batch"), given.pop("length"), given.pop("seed"), **given)


def test_states_of_other_batches_are_refused(folder: Path) -> None:
    tokens = Tokens(folder)
    batches = Batches(tokens, "train", 4, 32, seed=0)
    for other, name in (
        (Batches(tokens, "train", 4, 32, seed=1), "seed"),
        (Batches(tokens, "train", 4, 16, seed=0), "length"),
        (Batches(tokens, "valid", 4, 32, seed=0), "split"),
        (Batches(tokens, "train", 4, 32, seed=0, domains=["code"]), "domains"),
    ):
        with pytest.raises(InputError, match=f"differ in {name}"):
            batches.restore(other.state())
    for given in (None, [1], [1, 2, "3"], [-1, 0, 0]):
        with pytest.raises(InputError, match="does not say where"):
            batches.restore({**batches.state(), "given": given})


def test_changed_shards_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    for i, name in enumerate((ids_file("code", "train"), starts_file("prose", "valid"))):
        changed = copy(folder, tmp_path / str(i))
        raw = bytearray((changed / name).read_bytes())
        raw[-3] ^= 1
        for content in (bytes(raw), bytes(raw[:-4]), b"", b"no array"):
            (changed / name).write_bytes(content)
            with pytest.raises(InputError, match=f"{name}: is not what meta.json says"):
                Tokens(changed)
        (changed / name).unlink()
        with pytest.raises(InputError, match=f"{name}: can't be read"):
            Tokens(changed)


def test_numbers_that_make_no_documents_are_refused(folder: Path, tmp_path: Path) -> None:
    """Also where the hashes are those of the files."""
    changes: list[tuple[str, Callable[[np.ndarray], None]]] = [
        (ids_file("code", "train"), lambda ids: ids.__setitem__(5, 300)),  # outside the vocabulary
        (ids_file("code", "train"), lambda ids: ids.__setitem__(0, 5)),  # no END before the first document
        (starts_file("code", "train"), lambda starts: starts.__setitem__(1, starts[-1] + 5)),
        (starts_file("code", "train"), lambda starts: starts.__setitem__(-1, starts[-2])),
        (starts_file("code", "train"), lambda starts: starts.__setitem__(0, -1)),
    ]
    for i, (name, change) in enumerate(changes):
        forged = copy(folder, tmp_path / str(i))
        array = np.load(forged / name)
        change(array)
        np.save(forged / name, array)
        meta = json.loads((forged / META).read_text())
        meta["domains"]["code"]["train"]["ids_sha256" if "ids" in name else "starts_sha256"] = sha256(forged / name)
        (forged / META).write_text(json.dumps(meta))
        with pytest.raises(InputError, match=r"code\.train\.ids\.npy: holds no such documents"):
            Tokens(forged)


def test_broken_meta_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = copy(folder, tmp_path / "data")
    good = json.loads((broken / META).read_text())
    for change in (
        {"format": "other"},
        {"version": 2},
        {"domains": {}},
        {"domains": {"../x": good["domains"]["code"]}},
        {"domains": {"code": {"train": good["domains"]["code"]["train"]}}},
        {"domains": [1]},
        {"end": 300},
        {"end": None},
        {"end": "0"},
        {"n_vocab": 1 << 40},
        {"more": 1},
    ):
        (broken / META).write_text(json.dumps({**good, **change}))
        with pytest.raises(InputError, match=r"make the folder again|can't name a domain"):
            Tokens(broken)
    for content in (b"{", b"\xff", b"[]", b"[" * 100_000):
        (broken / META).write_bytes(content)
        with pytest.raises(InputError, match="make the folder again"):
            Tokens(broken)
    (broken / META).unlink()
    with pytest.raises(InputError, match="is no data folder"):
        Tokens(broken)


def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = train_tokenizer(texts(30, seed=99), 290)
    tokens = Tokens(folder)
    with pytest.raises(InputError, match="another tokenizer than that of my-model"):
        tokens.check_tokenizer(other, "my-model")
    tokens.check_tokenizer(tokens.tokenizer(), "itself")
    changed = copy(folder, tmp_path / "data")
    (changed / FILE).write_text(other.to_str())
    with pytest.raises(InputError, match="another tokenizer"):
        Tokens(changed).tokenizer()


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (b"caf\xe9", "a.txt", "a.txt: is not UTF-8"),
        (b'{"text": "x"}\n{"text": "caf\xe9"}\n', "a.jsonl", "a.jsonl: is not UTF-8"),
        (b'{"text": "x"}\n{"txt": "y"}\n', "a.jsonl", "a.jsonl: line 2 is no object"),
        (b"plain\n", "a.jsonl", "a.jsonl: line 1 is no object"),
        (b'{"text": 3}\n', "a.jsonl", "line 1 is no object"),
        (b"[" * 100_000, "a.jsonl", "line 1 is no object"),
        (b" \n", "a.txt", "domain a: holds no document"),
        (b"", "a.jsonl", "domain a: holds no document"),
        (b"one", "a.txt", "domain a: holds a single document"),
        (b'{"text": "x"}\n{"text": "x"}\n', "a.jsonl", "domain a: holds a single document"),
    ],
)
def test_text_that_is_none_is_refused_by_name(content: bytes, name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        prepare(tmp_path / "data", {"a": [tmp_path / name]}, vocab=259)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_documents_too_long_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.train.documents.MAX_DOCUMENT", 20)
    (tmp_path / "a.txt").write_text("x" * 21)
    with pytest.raises(InputError, match=r"a\.txt: a document of more than"):
        list(read_documents(tmp_path / "a.txt"))
    jsonl(tmp_path / "b.jsonl", ["x", "y" * 40])
    with pytest.raises(InputError, match=r"b\.jsonl: line 2 has more than"):
        list(read_documents(tmp_path / "b.jsonl"))


def test_folders_stand_for_their_files(tmp_path: Path) -> None:
    for name in ("b/c.txt", "a.txt", ".hidden", ".git/x"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    assert [file.name for file in find_files([tmp_path / "in"])] == ["a.txt", "c.txt"]
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="the folder holds no file"):
        find_files([tmp_path / "none"])
    with pytest.raises(InputError, match="no such file or folder"):
        find_files([tmp_path / "missing"])


@pytest.mark.parametrize(
    ("domains", "more", "words"),
    [
        ({}, {}, "no domain is given"),
        ({"a b": 1}, {}, "can't name a domain"),
        ({"a": 1, "A": 1}, {}, "differ in case alone"),
        ({"a": 1}, {"vocab": None}, "size of a vocabulary to learn or a tokenizer"),
        ({"a": 1}, {"tokenizer": "x"}, "size of a vocabulary to learn or a tokenizer"),
        ({"a": 1}, {"valid_share": 0.0}, "share of 0.0 is out of range"),
        ({"a": 1}, {"valid_share": float("nan")}, "share of nan is out of range"),
        ({"a": 1}, {"vocab": 5000}, "gives a vocabulary of [0-9]+ tokens, not 5000"),
    ],
)
def test_preparing_what_can_not_be_is_refused(
    domains: dict[str, Any], more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = jsonl(tmp_path / "in" / "a.jsonl", texts(5, seed=1))
    with pytest.raises(InputError, match=words):
        prepare(tmp_path / "data", {name: [file] for name in domains}, **{"vocab": 260, **more})
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_only_data_folders_are_overwritten(tmp_path: Path) -> None:
    source = {"a": [jsonl(tmp_path / "a.jsonl", texts(5, seed=1))]}
    out = tmp_path / "data"
    out.mkdir()  # an empty folder may be there
    prepare(out, source, vocab=259)
    with pytest.raises(InputError, match="exists already"):
        prepare(out, source, vocab=259)
    prepare(out, source, vocab=260, force=True)
    assert Tokens(out).n_vocab == 260
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="is not a data folder, so it is not overwritten"):
        prepare(precious, source, vocab=259, force=True)
    assert (precious / "thesis.txt").read_text() == "mine"
    with pytest.raises(InputError, match="is a file"):
        prepare(tmp_path / "a.jsonl", source, vocab=259, force=True)
    with pytest.raises(InputError, match="there is no directory"):
        prepare(tmp_path / "no" / "data", source, vocab=259)
    assert {file.name for file in tmp_path.iterdir()} == {"a.jsonl", "data", "precious"}


# The command


def test_command_reports_what_it_made(
    sources: dict[str, list[str | Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"{name}={path}" for name, (path,) in sources.items()]
    assert data(tmp_path / "data", given, vocab=300, json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    tokens = Tokens(tmp_path / "data")
    assert facts["fingerprint"] == tokens.fingerprint
    train = facts["domains"]["code"]["train"]
    shard = tokens.shard("code", "train")
    assert train["tokens"] == shard.tokens and train["bytes_per_token"] == round(shard.bytes / shard.tokens, 4)
    assert data(tmp_path / "data", given, tokenizer=tmp_path / "data", force=True) == 0
    assert "duplicates  1 documents" in capsys.readouterr().out


def test_command_refuses_what_says_too_little_or_too_much(tmp_path: Path) -> None:
    assert parse_domains(["a=x", "b=y=z", "a=w"]) == {"a": [Path("x"), Path("w")], "b": [Path("y=z")]}
    for given in (["a"], ["=x"], ["a="]):
        with pytest.raises(InputError, match="is not NAME=PATH"):
            parse_domains(given)
    with pytest.raises(InputError, match="give --domain"):
        parse_domains(None)
    with pytest.raises(InputError, match="learn one with --vocab N, or give --tokenizer"):
        data(tmp_path / "data", ["a=x"])
    with pytest.raises(InputError, match="both given"):
        data(tmp_path / "data", ["a=x"], vocab=300, tokenizer=tmp_path)


def test_data_need_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; from sluice.train.data import Batches, Tokens, prepare"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)
