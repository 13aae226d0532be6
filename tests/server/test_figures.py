"""Packed log-probabilities come out as they went in."""

from __future__ import annotations

import math

from sluice.server.figures import Figure, Figures


def test_figures_come_out_as_they_went_in() -> None:
    figures = Figures()
    given: list[Figure] = [(7, None, []), (0, -1.25, [(0, -1.25), (399, -math.inf)]), (2, -math.inf, []), (3, 0.0, [])]
    for id, logprob, top in given:
        figures.add(id, logprob, top)
    assert (list(figures), len(figures)) == (given, 4)
    figures.clear()
    assert (list(figures), len(figures)) == ([], 0)
    figures.add(*given[1])
    assert list(figures) == given[1:2]
