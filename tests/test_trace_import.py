"""Recordings of other programs become traces, in bounded memory; what can't be told is asked for by its flag."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sluice import trace_import
from sluice.errors import InputError
from sluice.trace import TraceInfo, TraceReader
from sluice.trace_import import import_trace

MODEL = TraceInfo("ab", "qwen3moe", "tiny", 4, (1, 2, 3), 8, 2, (5, 6, 7), "test")
Choice = tuple[int, int, list[int]]  # layer, token, experts


def choices(
    steps: list[list[int]], *, layers: tuple[int, ...] = (1, 3), k: int = 2, last: bool = False
) -> list[Choice]:
    """Random choices for the tokens of each step; with `last`, the last layer runs for the last of them only."""
    rng = random.Random(1)
    return [
        (layer, token, rng.sample(range(8), k))
        for tokens in steps
        for layer in layers
        for token in (tokens[-1:] if last and layer == layers[-1] else tokens)
    ]


def csv(path: Path, rows: list[Choice], head: str = "layer,expert\n") -> Path:
    path.write_text(head + "".join(f"{layer},{e}\n" for layer, _, experts in rows for e in experts))
    return path


def jsonl(path: Path, rows: list[Choice], **more: Any) -> Path:
    lines = ({"layer": layer, "token": token, "experts": experts} | more for layer, token, experts in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    with TraceReader(path) as reader:  # accepts it
        assert sum(map(len, reader.batches(weights=True))) == reader.n_rows
    return pq.read_table(path).to_pylist()


def told(path: Path) -> list[Choice]:
    return [(row["layer"], row["position"], row["experts"]) for row in rows_of(path)]


PROMPT = [list(range(9)), *([9 + i] for i in range(12))]


@pytest.mark.parametrize("head", ["layer,expert\n", "", '"Layer", "Expert" \n', "\n\nlayer,expert\r\n"])
@pytest.mark.parametrize("last", [False, True])
def test_a_csv_is_cut_into_tokens_and_steps(tmp_path: Path, head: str, last: bool) -> None:
    rows = choices(PROMPT, last=last)
    report = import_trace(csv(tmp_path / "in.csv", rows, head), tmp_path / "t.parquet", n_expert=8)
    assert told(tmp_path / "t.parquet") == rows
    assert (report.rows, report.steps, report.sequences) == (len(rows), 13, 1)
    found = rows_of(tmp_path / "t.parquet")
    assert [row["phase"] for row in found if row["layer"] == 1] == ["prefill"] * 9 + ["decode"] * 12
    assert {(row["sequence"], row["weights"], row["scores"], row["domain"]) for row in found} == {(0, None, None, None)}
    info = report.info
    assert (info.moe_layers, info.n_layers, info.n_expert, info.top_k) == ((1, 3), 4, 8, 2)
    assert (info.fingerprint, info.expert_bytes, info.source) == ("", (0, 0), "import of in.csv")


def test_other_columns_are_passed_over(tmp_path: Path) -> None:
    rows = choices(PROMPT)
    path = tmp_path / "in.csv"
    lines = (f"0.5,{e},x,{layer}\n" for layer, _, experts in rows for e in experts)
    path.write_text("weight,expert,note,layer\n" + "".join(lines))
    import_trace(path, tmp_path / "t.parquet", n_expert=8)
    assert told(tmp_path / "t.parquet") == rows


def test_one_layer_is_one_token_a_step(tmp_path: Path) -> None:
    rows = choices([[i] for i in range(30)], layers=(2,))
    for path in (csv(tmp_path / "in.csv", rows), jsonl(tmp_path / "in.jsonl", rows)):
        import_trace(path, tmp_path / "t.parquet", n_expert=8, top_k=2, force=True)
        assert told(tmp_path / "t.parquet") == rows
        assert {row["phase"] for row in rows_of(tmp_path / "t.parquet")} == {"decode"}


def test_jsonl_keeps_tokens_and_weights(tmp_path: Path) -> None:
    rows = choices([[0, 1, 2], [3], [4], [0, 1], [2]], last=True)  # a second text begins
    path = jsonl(tmp_path / "in.jsonl", rows, weights=[0.75, 0.25], more="is passed over")
    report = import_trace(path, tmp_path / "t.parquet", model=MODEL)
    found = rows_of(tmp_path / "t.parquet")
    assert told(tmp_path / "t.parquet") == rows
    assert {tuple(row["weights"]) for row in found} == {(0.75, 0.25)}
    assert [row["sequence"] for row in found if row["layer"] == 1] == [0] * 5 + [1] * 3
    assert (report.steps, report.sequences) == (5, 2)
    assert report.info == replace(MODEL, source="import of in.jsonl")


def test_jsonl_by_token_is_decode(tmp_path: Path) -> None:
    rows = choices([[i] for i in range(20)], layers=(0, 1, 2), k=3)
    report = import_trace(jsonl(tmp_path / "in.jsonl", rows), tmp_path / "t.parquet", n_expert=8)
    assert told(tmp_path / "t.parquet") == rows
    assert (report.steps, report.info.top_k) == (20, 3)
    assert {row["weights"] for row in rows_of(tmp_path / "t.parquet")} == {None}


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "empty": ("", {}, "no choices"),
    "only a head": ("layer,expert\n", {}, "no choices"),
    "no numbers": ("layer,expert\n1,2\nx,3\n", {}, "line 3: 'x,3' is not layer,expert"),
    "one column": ("1\n", {}, "line 1: '1' is not"),
    "other head": ("a,b\n1,2\n", {}, "line 1: 'a,b' is not"),
    "layer beyond": ("40000,1\n", {}, "line 1: layer 40000"),
    "negative": ("1,-1\n", {}, "line 1: expert -1"),
    "an endless number": ("1," + "9" * 5000 + "\n", {}, "line 1"),
    "no text": ("1,2\n\udcff\n", {}, "line 2: is no text"),
    "a long line": ("1,2\n" + "3" * (2 << 20), {}, "line 2: is longer"),
    "no number of experts": ("1,2\n" * 40, {"n_expert": None}, "--experts N, or --model"),
    "more experts than said": ("1,9\n", {"top_k": 1}, "--experts 8 is not"),
    "too little to infer": ("1,0\n1,1\n3,2\n3,3\n", {}, "--top-k N"),
    "ambiguous": ("1,0\n1,1\n1,0\n1,2\n3,0\n3,1\n3,2\n3,0\n" * 9, {}, "can't be inferred: give --top-k N"),
    "wrong top_k": ("1,0\n1,1\n1,2\n3,1\n3,2\n3,3\n" * 9, {"top_k": 2}, "no multiple of 2: give the right --top-k"),
    "top_k makes twice": ("1,0\n1,0\n3,2\n3,3\n" * 9, {"top_k": 2}, "line 1: 2 rows from here name an expert twice"),
    "top_k beyond": ("1,0\n1,1\n", {"top_k": 9}, "--top-k 9 is more than the 8"),
    "later layer has more": ("1,0\n3,1\n3,2\n" * 9, {"top_k": 1}, "line 2: layer 3 has more tokens"),
    "layer of another model": ("0,0\n1,1\n" * 9, {"model": MODEL, "n_expert": None}, "layer 0 has no experts in tiny"),
    "expert of another model": ("1,8\n2,1\n" * 9, {"model": MODEL, "n_expert": None}, "names expert 8 and tiny has 8"),
    "no JSON": ('{"layer": 1\n', {}, "line 1"),
    "deep": ('{"layer": ' + "[" * 99999, {}, "line 1"),
    "no layer": ('{"token": 1, "experts": [1]}', {}, "line 1: layer None"),
    "layer is truth": ('{"layer": true, "token": 1, "experts": [1]}', {}, "line 1: layer True"),
    "no token": ('{"layer": 1, "experts": [1]}', {}, "line 1: token"),
    "huge token": ('{"layer": 1, "token": 4294967296, "experts": [1]}', {}, "line 1: token"),
    "no experts": ('{"layer": 1, "token": 1, "experts": []}', {}, "line 1: experts"),
    "an expert is text": ('{"layer": 1, "token": 1, "experts": ["1"]}', {}, "line 1: expert '1'"),
    "twice": ('{"layer": 1, "token": 1, "experts": [1, 1]}', {}, "line 1: an expert is named twice"),
    "fewer weights": ('{"layer": 1, "token": 1, "experts": [1, 2], "weights": [1]}', {}, "line 1: weights"),
    "weight is nan": ('{"layer": 1, "token": 1, "experts": [1], "weights": [NaN]}', {}, "line 1: weights"),
    "weights for some": (
        '{"layer": 1, "token": 1, "experts": [1], "weights": [1]}\n{"layer": 2, "token": 1, "experts": [1]}', {},
        "line 2: some lines have weights"),
    "other top_k": (
        '{"layer": 1, "token": 1, "experts": [1]}\n{"layer": 2, "token": 1, "experts": [1, 2]}', {},
        "line 2: 2 experts, the lines before have 1"),
    "top_k against the file": ('{"layer": 1, "token": 1, "experts": [1]}', {"top_k": 2}, "leave out --top-k 2"),
    "tokens that the first layer lacks": (
        "\n".join(json.dumps({"layer": x, "token": t, "experts": [1]}) for x, t in ((1, 0), (1, 2), (3, 1))), {},
        "line 3: layer 3 has tokens that the step's first layer lacks"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, name: str) -> None:
    text, options, expected = BAD[name]
    path = tmp_path / "in.txt"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError) as caught:
        import_trace(path, tmp_path / "t.parquet", **{"n_expert": 8, **options})
    said = str(caught.value)
    assert str(path) in said and expected in said
    assert said.isprintable() and len(said) < 400
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_import, "MAX_RUN", 100)
    path = tmp_path / "in.csv"
    path.write_text("1,0\n" * 101 + "3,0\n")
    with pytest.raises(InputError, match="line 101: more than 100 choices"):
        import_trace(path, tmp_path / "t.parquet", n_expert=8, top_k=1)
    path.write_text("1,0\n" * 100 + "3,0\n")
    assert import_trace(path, tmp_path / "t.parquet", n_expert=8, top_k=1).rows == 101


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, expected in ((tmp_path, "not a regular file"), (tmp_path / "absent", "no such file")):
        with pytest.raises(InputError, match=expected):
            import_trace(path, tmp_path / "t.parquet", n_expert=8)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    out.write_bytes(b"mine")
    with pytest.raises(InputError, match="--force"):
        import_trace(csv(tmp_path / "in.csv", choices(PROMPT)), out, n_expert=8)
    assert out.read_bytes() == b"mine"


def test_progress_is_of_both_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_import, "SAID_EVERY", 1)
    said: list[tuple[float, float]] = []
    path = csv(tmp_path / "in.csv", choices(PROMPT))
    import_trace(path, tmp_path / "t.parquet", n_expert=8, progress=lambda *each: said.append(each))
    assert said == sorted(said) and said[-1] == (2 * path.stat().st_size, 2 * path.stat().st_size)
