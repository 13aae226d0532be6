"""Keeps finished parts of an evaluation in a folder, a file each, so that a run that was cut short goes on from there.

A file says what it was made of; one made of anything else is not taken for it. It knows no task and no engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.errors import InputError
from sluice.new_file import appearing

FORM = 1  # of what the files hold: raise it with any change to that
MAX_BYTES = 256 << 20


class Store:
    """Finished parts in `folder`; nothing is kept if that is None. Files are written whole or not at all."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"{folder}: can't be made ({error.strerror}): name another folder") from None

    def load(self, name: str, made_of: Mapping[str, Any]) -> Any | None:
        """What was kept of `name`, if it was made of the same. A file that is damaged counts as none."""
        if self.folder is None:
            return None
        path = self._path(name, made_of)
        try:
            if path.stat().st_size > MAX_BYTES:
                return None
            kept = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(kept, dict) or kept.get("made_of") != _plain(made_of) or kept.get("form") != FORM:
            return None
        return kept.get("result")

    def save(self, name: str, made_of: Mapping[str, Any], result: Any) -> None:
        """Raises InputError where the folder can't be written."""
        if self.folder is None:
            return
        text = json.dumps({"form": FORM, "name": name, "made_of": made_of, "result": result})
        with appearing(self._path(name, made_of), "eval", force=True) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def _path(self, name: str, made_of: Mapping[str, Any]) -> Path:
        """A name that a file system takes, with what the part was made of as a digest: other settings, another file."""
        assert self.folder is not None
        digest = hashlib.sha256(json.dumps([FORM, name, made_of], sort_keys=True).encode()).hexdigest()[:12]
        safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)[:100]
        return self.folder / f"{safe}-{digest}.json"


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(value))
