"""Imports point one way, and importing Sluice does nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not (ROOT / ".importlinter").exists(), reason="the contracts come with the source tree")
def test_imports_keep_to_the_contracts() -> None:
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def imported(statement: str) -> set[str]:
    """The modules that a fresh interpreter loads for `statement`, beside those of its start."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_sluice_loads_nothing_else() -> None:
    modules = imported("import sluice")
    assert {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names} == {"sluice"}
    assert not {"ctypes", "asyncio", "multiprocessing", "subprocess"} & modules


def test_importing_the_engine_loads_no_native_library() -> None:
    code = (
        "import sluice.engine, sluice.pack, sys; from pathlib import Path; "
        "maps = Path('/proc/self/maps'); print('ggml' in (maps.read_text() if maps.exists() else ''), *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    native, *modules = done.stdout.split()
    assert native == "False"
    assert "sluice.engine" in modules and not {"torch", "transformers", "typer", "rich"} & set(modules)
