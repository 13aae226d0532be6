"""Where Sluice keeps files of its own between runs, for the user who runs it. Knows none of the files."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The folder, as the platform has it; it may not exist yet."""
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        given = os.environ.get("XDG_CACHE_HOME", "")
        caches = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return caches / "sluice"
