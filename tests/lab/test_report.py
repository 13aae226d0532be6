"""Reports: every kind of trace gets one, all numbers are in it, and nothing in a trace can break or forge it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from small_traces import Row, info, random_rows, write_rows

from sluice.errors import InputError
from sluice.lab.analyze import Analysis, analyze
from sluice.lab.plot_style import short
from sluice.lab.plots import PLOTS, figures, sheet
from sluice.lab.report import facts, html, numbers, tables
from sluice.trace import TraceReader, schema

HOSTILE = "<script>alert('x')</script> & $\\frac{1}{$ \x1b[31m \u533b\u5b66 \u202e"


def analysis_of(*paths: Path) -> Analysis:
    readers = [TraceReader(path) for path in paths]
    try:
        return analyze(readers)
    finally:
        for reader in readers:
            reader.__exit__()


def whole(a: Analysis) -> tuple[dict[str, Any], str]:
    """All of a report: its numbers, as JSON gives them back, and the page."""
    for table in tables(a):
        assert table.rows and all(len(row) == len(table.heads) for row in table.rows)
    page = html(a, figures(a, dpi=20))
    assert sheet(a, dpi=20).startswith(b"\x89PNG")
    return json.loads(json.dumps(numbers(a), allow_nan=False)), page


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    rows = random_rows(
        np.random.default_rng(0), layers=3, n_expert=8, sequences=4, tokens=80, domains=("code", "prose"), skip=0.02
    )
    couples = [(0, 1), (2, 3), (4, 5), (6, 7)]  # in layer 1, experts go in pairs
    rows = [row._replace(experts=couples[row.experts[0] // 2]) if row.layer == 1 else row for row in rows]
    return analysis_of(write_rows(tmp_path_factory.mktemp("report") / "usual", rows, info(3, 8, 2)))


def test_a_report_has_every_measure(usual: Analysis) -> None:
    found, page = whole(usual)
    assert found["model"]["experts"] == 8 and found["layers"] == [0, 1, 2]
    assert len(found["reuse"]["by_layer"]) == 3
    assert found["reuse"]["low"] <= found["reuse"]["mean"] <= found["reuse"]["high"]
    assert found["reuse"]["over_chance"] == pytest.approx(found["reuse"]["mean"] / found["reuse"]["chance"])
    assert 0 < found["concentration"]["experts_for"]["0.95"] <= 1
    assert found["domains"]["names"] == ["code", "prose"]
    assert found["consistency"]["srp"]["16"] > 0 and found["consistency"]["srp"]["256"] is None
    assert found["working_set"]["mean"][0] == pytest.approx(2) and found["working_set"]["mean"][-1] is None
    assert {"belady", "lru", "static"} <= set(found["caches"]["policies"])
    assert found["rows"] == len(usual.routes) and found["token_demands"] == 2 * found["rows"]
    assert page.count("<img") == len(PLOTS)
    assert found["coactivation"][0]["layer"] == 1 and found["coactivation"][0]["phi"] == pytest.approx(1)
    assert [name for name, _ in facts(usual)][:3] == ["model", "traces", "rows"]
    [data] = [part for part in page.split("<script") if 'id="numbers"' in part]
    assert json.loads(data[data.index(">") + 1 : data.index("</script>")]) == found


def test_a_report_is_the_same_every_time(usual: Analysis) -> None:
    again = analysis_of(*map(Path, usual.traces))
    assert html(again, figures(again, dpi=20)) == html(usual, figures(usual, dpi=20))


def test_one_row_is_enough(tmp_path: Path) -> None:
    a = analysis_of(write_rows(tmp_path / "one", [Row(0, 0, 0, 0, (1, 3))], info(1, 4, 2)))
    found, _ = whole(a)
    assert found["rows"] == found["tokens"] == 1
    assert found["reuse"]["mean"] is None and found["domains"] is None and found["coactivation"] is None
    assert found["reuse_distance"] == {"first_uses": 2, "p25": None, "p50": None, "p75": None, "p90": None}
    assert ("adjacent reuse", "no two consecutive tokens") in facts(a)
    assert not re.search(r"\bnan\b", html(a, []) + " ".join(text for _, text in facts(a)), re.IGNORECASE)


@pytest.mark.parametrize("scores", [False, True])
def test_scores_and_domains_are_not_needed(scores: bool, tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(1), layers=2, tokens=30)
    found, page = whole(analysis_of(write_rows(tmp_path / "t", rows, info(2, 6, 2), scores=scores)))
    assert found["domains"] is None and "Traffic in common" not in page
    assert found["reuse"]["mean"] > 0


@pytest.mark.parametrize("n_expert, top_k", [(1, 1), (2, 2), (3, 1)])
def test_models_of_few_experts(n_expert: int, top_k: int, tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(1), layers=1, n_expert=n_expert, top_k=top_k, tokens=40)
    found, _ = whole(analysis_of(write_rows(tmp_path / "t", rows, info(1, n_expert, top_k))))
    if n_expert == top_k:
        assert found["reuse"]["mean"] == found["reuse"]["chance"] == found["consistency"]["srp"]["4"] == 1
        assert found["consistency"]["sch"]["1"] == 1


class _Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_a_trace_says_stays_text(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(1), sequences=2, tokens=40, domains=(HOSTILE, "<b>"))
    path = write_rows(tmp_path / "<i>t", rows, replace(info(2, 6, 2), name=HOSTILE))
    found, page = whole(analysis_of(path))
    parsed = _Page(page)
    assert parsed.tags.count("script") == 1 and not {"b", "i"} & set(parsed.tags)
    assert HOSTILE in parsed.text  # as text
    assert found["domains"]["names"] == [HOSTILE, "<b>"] and found["model"]["name"] == HOSTILE


def test_labels_are_cut() -> None:
    assert short("a\nb") == "a b"
    assert short("x" * 30) == "x" * 23 + "…"


def test_many_domains_are_cut_to_the_largest(tmp_path: Path) -> None:
    rows = [Row(i, i, 0, 0, (i % 3, 3), f"d{i}") for i in range(30)]
    rows.append(Row(30, 29, 1, 0, (0, 3), "d29"))
    found, _ = whole(analysis_of(write_rows(tmp_path / "t", rows, info(1, 4, 2))))
    assert len(found["domains"]["names"]) == 16 and "d29" in found["domains"]["names"]


def test_traces_are_joined_and_other_models_refused(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(1), layers=2, tokens=30)
    one, other = (write_rows(tmp_path / name, rows, info(2, 6, 2)) for name in "ab")
    found, _ = whole(analysis_of(one, other))
    assert found["rows"] == 2 * len(rows) and found["traces"] == [str(one), str(other)]
    wrong = write_rows(tmp_path / "c", rows, info(2, 7, 2))
    with pytest.raises(InputError, match="another model"):
        analysis_of(one, wrong)


def test_a_trace_without_rows_is_refused(tmp_path: Path) -> None:
    empty = schema(info(2, 6, 2)).empty_table()
    pyarrow.parquet.write_table(empty, tmp_path / "none")
    with pytest.raises(InputError, match="rows"):
        analysis_of(tmp_path / "none")


def test_a_model_too_large_to_count_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t", [Row(0, 0, 0, 0, (1, 2))], info(1000, 30000, 2))
    with pytest.raises(InputError, match="more than can be counted"):
        analysis_of(path)
