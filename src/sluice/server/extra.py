"""Says what to install where the serving libraries are missing. Knows their names alone."""

from __future__ import annotations

from importlib.util import find_spec

from sluice.errors import InputError

NEEDED = ("fastapi", "uvicorn", "llguidance")


def check_extra() -> None:
    """Raise InputError unless what the extra brings is installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"serving needs {', '.join(missing)}: pip install 'sluice[serve]'")
