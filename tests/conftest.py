"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="session")
def vulkan_ggml() -> Path:
    """A folder with ggml's libraries, its Vulkan backend among them, and a device that it runs on.

    SLUICE_TEST_GGML names it; with Mesa's software device no graphics processor is needed.
    """
    os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")  # software devices are left out otherwise
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    folder = os.environ.get("SLUICE_TEST_GGML")
    if not folder:
        pytest.skip("needs a ggml with Vulkan and a device for it: SLUICE_TEST_GGML names its folder")
    from sluice.ggml import devices, load_library

    if not devices(load_library(folder)):
        pytest.skip(f"the ggml in {folder} finds no device here")
    return Path(folder)
