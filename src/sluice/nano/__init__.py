"""The trained model that comes with Sluice, `nano`: where its files are. It knows nothing of what they are used for.

`experiments/nano.py` trains it and writes the files beside this one; nano.json says from what, and what it came to.
"""

from __future__ import annotations

from pathlib import Path

from sluice.errors import InputError

NAME = "nano"
_FOLDER = Path(__file__).parent
MODEL, HEADS, ADAPTER, CARD = (
    _FOLDER / name for name in ("nano.gguf", "nano-heads.safetensors", "nano-adapter.gguf", "nano.json")
)
"""The model, heads that predict its routes, the adapter trained with them, and what is known of the three."""


def nano_file(path: Path = MODEL) -> Path:
    """`path`, one of the above. Raises InputError where the installation lacks it."""
    if not path.is_file():
        raise InputError(f"nano's {path.name} is missing from this installation: install Sluice again")
    return path
