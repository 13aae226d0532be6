"""Plan files: which experts to load at the start and which of those to keep. It knows no model, cache or search.

A plan is one JSON object:

    format        1
    fingerprint   of the model (sluice.models.fingerprint), "" where it isn't known
    architecture, name, n_layers, moe_layers, n_expert    of the model, as in a trace
    slots         the expert slots it was made for
    policy        the name of the cache policy that has what isn't pinned
    pins          [[layer, expert], …], the hottest first: loaded at the start, evicted only when nothing else is left
    load          [[layer, expert], …]: loaded beside them, as if used in this order, so the last stays longest
    expected      {"hit_rate": …, …}, shares of demands on text the plan was not fitted to; null where nobody tried
    source        what made it

A file is somebody else's text until it has been checked: its size and every value are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from sluice.errors import InputError
from sluice.new_file import appearing
from sluice.types import ExpertKey

FORMAT = 1
MAX_BYTES = 16 << 20  # twenty times what the largest models need
MAX_LAYERS = MAX_EXPERTS = 1 << 15
MAX_TEXT = 4096
MAX_FIGURES = 16
MADE = "the plan"  # as who writes one calls it


@dataclass(frozen=True)
class Placement:
    """A plan file's content; see the module."""

    fingerprint: str
    architecture: str
    name: str
    n_layers: int
    moe_layers: tuple[int, ...]
    n_expert: int
    slots: int
    policy: str
    pins: tuple[ExpertKey, ...]
    load: tuple[ExpertKey, ...]
    expected: Mapping[str, float] | None
    source: str

    def fitted(self, slots: int, room: int, path: str | Path) -> Placement:
        """What of it a pool of `slots` takes, of which `room` are left to the policy: all pins, the end of `load`.

        Raises InputError where the pins leave less room.
        """
        if len(self.pins) > slots - room:
            raise InputError(
                f"{path}: pins {len(self.pins)} experts, made for {self.slots} slots; this budget's {slots} slots have "
                f"room for {max(slots - room, 0)}: raise --ram, or plan again for this one"
            )
        left = slots - len(self.pins)
        return replace(self, load=self.load[-left:] if left else ())

    def check_model(
        self, path: str | Path, *, fingerprint: str, architecture: str, name: str, n_layers: int,
        moe_layers: Sequence[int], n_expert: int,
    ) -> None:  # fmt: skip
        """Raise InputError, naming the difference, unless the plan was made for the model described."""
        own = {
            "architecture": (self.architecture, architecture),
            "layers": (self.n_layers, n_layers),
            "layers with experts": (len(self.moe_layers), len(moe_layers)),
            "first and last layer with experts": (_ends(self.moe_layers), _ends(moe_layers)),
            "experts a layer": (self.n_expert, n_expert),
        }
        other = [f"{what} {a!r}, this model has {b!r}" for what, (a, b) in own.items() if a != b]
        if not other and tuple(moe_layers) != self.moe_layers:
            other = ["other layers with experts"]
        if not other and self.fingerprint and fingerprint and self.fingerprint != fingerprint:
            other = [f"of the same shape, but with other content (fingerprint {self.fingerprint[:12]}…)"]
        if other:
            called = f" ({self.name}; this is {name})" if self.name and name else ""
            raise InputError(f"{path}: made for another model{called}: {other[0]}: plan again for this model")


def _ends(layers: Sequence[int]) -> tuple[int, int]:
    return layers[0], layers[-1]


def read_plan(path: str | Path) -> Placement:
    """The plan in a file. Raises InputError, naming what is wrong with it."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # opening a named pipe would wait for ever
            raise InputError(f"{path}: can't be read (not a regular file): name a plan")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file: name a plan, or make one with `sluice plan`") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}): name a plan") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: no plan: longer than {MAX_BYTES >> 20} MiB: name a file that `sluice plan` wrote")
    try:
        fields = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        what = "empty" if not raw.strip() else "no JSON, or cut short"
        raise InputError(f"{path}: no plan ({what}): name one that `sluice plan` or --save-residents wrote") from None
    try:
        return _checked(fields)
    except ValueError as error:
        raise InputError(f"{path}: the plan is damaged ({error}): make it again with `sluice plan`") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _checked(fields: Any) -> Placement:
    if not isinstance(fields, dict):
        raise ValueError("no object")
    if fields.get("format") != FORMAT:
        raise ValueError(f"format {str(fields.get('format'))[:20]!r}, this version reads {FORMAT}")
    if unknown := set(fields) - {"format", *Placement.__dataclass_fields__}:
        raise ValueError(f"{min(unknown)[:40]!r} is unknown")
    texts = {name: _text(fields, name) for name in ("fingerprint", "architecture", "name", "policy", "source")}
    n_layers = _whole("n_layers", fields.get("n_layers"), 1, MAX_LAYERS)
    n_expert = _whole("n_expert", fields.get("n_expert"), 1, MAX_EXPERTS)
    moe_layers = tuple(
        _whole("moe_layers", n, 0, n_layers - 1) for n in _list("moe_layers", fields.get("moe_layers"), n_layers)
    )
    if not moe_layers or list(moe_layers) != sorted(set(moe_layers)):
        raise ValueError("moe_layers isn't ascending")
    slots = _whole("slots", fields.get("slots"), 1, len(moe_layers) * n_expert)
    layers, seen, keys = set(moe_layers), set(), {}
    for name in ("pins", "load"):
        keys[name] = tuple(_key(name, pair, layers, n_expert) for pair in _list(name, fields.get(name), slots))
        if len(seen) + len(keys[name]) != len(seen | set(keys[name])):
            raise ValueError(f"{name} names an expert twice, or pins and load name the same")
        seen.update(keys[name])
    return Placement(
        **texts, n_layers=n_layers, moe_layers=moe_layers, n_expert=n_expert, slots=slots, **keys,
        expected=_figures(fields.get("expected")),
    )  # fmt: skip


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"{name} is no text")
    return value


def _whole(name: str, value: object, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} has {str(value)[:20]}, not a whole number of {least} to {most}")
    return value


def _list(name: str, value: object, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{name} is no list of at most {most}")
    return value


def _key(name: str, pair: object, layers: set[int], n_expert: int) -> ExpertKey:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{name} has {str(pair)[:20]}, not [layer, expert]")
    layer, expert = _whole(name, pair[0], 0, MAX_LAYERS), _whole(name, pair[1], 0, n_expert - 1)
    if layer not in layers:
        raise ValueError(f"{name} names layer {layer}, which has no experts")
    return ExpertKey(layer, expert)


def _figures(value: object) -> dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_FIGURES:
        raise ValueError("expected is no object of figures")
    figures: dict[str, float] = {}
    for name, share in value.items():
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or len(name) > MAX_TEXT or not 0 <= share <= 1:
            raise ValueError(f"expected {name[:40]!r} is no share")
        figures[name] = float(share)
    return figures


def write_plan(path: str | Path, plan: Placement, *, force: bool = False, keep: Sequence[Path] = ()) -> None:
    """Write a plan; the file appears whole or not at all. Raises InputError, also if it exists (unless `force`)."""
    fields = {"format": FORMAT, **asdict(plan)}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in fields.items())
    with appearing(Path(path), "plan", force=force, keep=keep, made=MADE) as temporary:
        temporary.write_text("{" + text + "}\n", encoding="utf-8")
