"""Says what to install where an extra's libraries are missing. Knows their names alone."""

from __future__ import annotations

from importlib.util import find_spec

from sluice.errors import InputError

NEEDED = {
    "serve": ("serving", ("fastapi", "uvicorn", "llguidance")),
    "train": ("training", ("torch", "transformers", "safetensors", "accelerate", "peft")),
}


def check_extra(extra: str) -> None:
    """Raise InputError unless what `extra` brings is installed."""
    what, libraries = NEEDED[extra]
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise InputError(f"{what} needs {', '.join(missing)}: pip install 'sluice[{extra}]'")
