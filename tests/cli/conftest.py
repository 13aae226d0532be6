"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Cli, Outcome
from tiny import write_tiny

from sluice.cli import main


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with 3 layers of 8 experts, and room for long answers."""
    return write_tiny(tmp_path_factory.mktemp("cli") / "tiny.gguf", n_ctx=32768).path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command in this process."""

    def call(*words: object) -> Outcome:
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return Outcome(code, str(out), str(err))

    return call
