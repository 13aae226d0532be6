"""Gives the tests of family_tests.py what their classes' tables list."""

from __future__ import annotations

import pytest
from family_tests import ContradictionTests, FamilyTests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    family = metafunc.cls
    if family is None or not issubclass(family, FamilyTests):
        return
    streamed = family.QUANTISED if family.STREAMED is None else family.STREAMED
    for name, table in (("float32", family.FLOAT32), ("quantised", family.QUANTISED), ("streamed", streamed)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, list(table))
    if "contradiction" in metafunc.fixturenames and issubclass(family, ContradictionTests):
        metafunc.parametrize("contradiction", family.CONTRADICTIONS, ids=[said for _, said in family.CONTRADICTIONS])
