"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import demo
from sluice.errors import InputError


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model, built anew as a user's first command does, in a cache folder of this session's own."""
    try:
        demo.source_path()
    except InputError:
        pytest.skip(f"needs the demo model's weights: {demo.INSTALL}")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
            patch.setenv(variable, str(folder))
        path = demo.ensure_demo()
    yield path
    path.unlink()
