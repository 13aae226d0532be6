"""A recipe: what a run is asked to do, as a TOML file says it; knows what keys there are and not what they do.

An unknown key is refused by name with the choices. Sections that are left out have their defaults, which do nothing.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from sluice.errors import InputError, words_of
from sluice.train.anneal import ANNEALS
from sluice.train.settings import Settings

MAX_BYTES = 1 << 20
LEARNS = ("all", "routers")
EXPERTS = ("even", "used", "hottest")
COUNTS = ("used", "hottest")  # of EXPERTS, those that are found by what domains were seen to use
DOMAIN_LOSSES = ("mass", "weight")
COUNTED = 0.05  # of the run, before a domain's term begins: where it is counted which experts domains use
_T = TypeVar("_T")


@dataclass(frozen=True)
class Data:
    """`weights`: by domain, its part of the rows; empty: all domains alike. `valid_rows` of each are held out."""

    weights: Mapping[str, float] = field(default_factory=dict)
    valid_rows: int = 16


@dataclass(frozen=True)
class Balance:
    """How load is kept even: `loss` and `z` are the weights of the two losses, `bias` the rate of the bias a step.

    Over the second half of the run `loss` falls or rises to `final` times what it was.
    The bias is for training alone: it fades between `fade` and 0.95 of the run, so that the model can do without.
    """

    loss: float = 0.01
    final: float = 1.0
    z: float = 0.001
    bias: float = 0.0
    fade: float = 0.7


@dataclass(frozen=True)
class Locality:
    """`weight` × the loss called `loss`, with `tau`, for an LRU of `slots` experts a layer (0: k, the token before's).

    `anneal`: constant; `rise`: from 0 over the first half; `fall`: to 0 over the second; `late`: from 0 over it;
    `hump`: from 0 over the third quarter, to 0 over the last. `learns`: all of the model by it, or the `routers` alone.
    `reroute`, annealed too: in training, experts past a token's best `keep` that the LRU doesn't hold give way to ones
    that it holds, where those have at most so much less of the router's probability (0: none do).
    """

    loss: str = "margin"
    weight: float = 0.0
    tau: float = 1.0
    slots: int = 0
    anneal: str = "constant"
    learns: str = "all"
    reroute: float = 0.0
    keep: int = 1


@dataclass(frozen=True)
class Domain:
    """`weight` × the loss that keeps tokens to their domain's experts, and `prior`, added to those experts' logits.

    The weight rises linearly from 0 at `begin` of the run to all of it at `full`. The prior is for training alone: it
    falls linearly to 0 at `until` of the run. `experts` are divided over the domains `even`, in the order of their ids,
    or at `begin` by how much they are `used` over the twentieth of the run before it; `hottest`: each domain has those
    that it used most then, whoever else has them. `loss`: `mass`, the surprise of a router at its text's domain, where
    a token whose domain's experts have `enough` of its probability isn't pushed any more (0: all of them are); or
    `weight`, the swaps that would move little of the output (`tau`: how large a share), where no token is pushed while
    `enough` of a batch's choices are its domain's own (0: always).
    """

    weight: float = 0.0
    prior: float = 0.0
    until: float = 0.5
    begin: float = 0.0
    full: float = 0.0
    experts: str = "even"
    enough: float = 0.0
    loss: str = "mass"
    tau: float = 0.1

    def counts(self, done: float) -> bool:
        """Whether a step, before which `done` of the run is done, is one of those that experts are divided by."""
        return self.experts in COUNTS and self.begin - COUNTED - 1e-9 <= done < self.begin  # 0.2 - 0.05 > 0.15


@dataclass(frozen=True)
class Distill:
    """`weight` × KL(teacher ‖ model) of next-token distributions takes that part of the cross entropy's place.

    `anneal` as in Locality.
    """

    weight: float = 0.0
    anneal: str = "constant"


@dataclass(frozen=True)
class Recipe:
    """All of it. `model` holds the family and its configuration's numbers; empty where a model is given."""

    train: Settings
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    balance: Balance = field(default_factory=Balance)
    locality: Locality = field(default_factory=Locality)
    domain: Domain = field(default_factory=Domain)
    distill: Distill = field(default_factory=Distill)

    def __post_init__(self) -> None:
        if self.locality.learns not in LEARNS:
            raise InputError(f"locality.learns {self.locality.learns!r} is unknown: choose from {', '.join(LEARNS)}")
        for name, how in (("locality", self.locality.anneal), ("distill", self.distill.anneal)):
            if how not in ANNEALS:
                raise InputError(f"{name}.anneal {how!r} is unknown: choose from {', '.join(ANNEALS)}")
        if self.locality.reroute > 1:
            raise InputError(f"locality.reroute is {self.locality.reroute:g}: give a share of probability, 0 to 1")
        if self.locality.tau <= 0:
            raise InputError(f"locality.tau is {self.locality.tau:g}: give a number above 0")
        domain = self.domain
        for name, value in (("balance.fade", self.balance.fade), ("domain.until", domain.until),
                            ("domain.begin", domain.begin), ("domain.full", domain.full)):  # fmt: skip
            if value > 1:
                raise InputError(f"{name} is {value:g}: give a part of the run, 0 to 1")
        if domain.full < domain.begin:
            raise InputError(f"domain.full is {domain.full:g} and domain.begin {domain.begin:g}: give at least as much")
        if domain.enough > 1:
            raise InputError(f"domain.enough is {domain.enough:g}: give a share, 0 to 1")
        for name, value, known in (("experts", domain.experts, EXPERTS), ("loss", domain.loss, DOMAIN_LOSSES)):
            if value not in known:
                raise InputError(f"domain.{name} {value!r} is unknown: choose from {', '.join(known)}")
        if domain.tau <= 0:
            raise InputError(f"domain.tau is {domain.tau:g}: give a number above 0")
        self._check_counted()
        if self.distill.weight > 1:
            raise InputError(f"distill.weight is {self.distill.weight:g}: give 0 to 1")
        if self.data.valid_rows < 1:
            raise InputError(f"data.valid_rows is {self.data.valid_rows}: give at least 1")

    def _check_counted(self) -> None:
        """Raise InputError where experts go by what domains use, and that can't be counted as it is asked for."""
        domain, steps = self.domain, self.train.steps
        if domain.experts not in COUNTS:
            return
        if domain.prior:
            raise InputError(f'domain.experts is "{domain.experts}", and a prior needs them from the first step: '
                             'leave domain.prior out, or give "even"')  # fmt: skip
        if not any(domain.counts(step / steps) for step in range(steps)):
            raise InputError(f'domain.experts is "{domain.experts}", and no step is within the {COUNTED:g} of the run '
                             f'before domain.begin, {domain.begin:g}: begin later, or give "even"')  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """JSON-like, with every default written out."""
        return asdict(self)

    def without_model(self) -> Recipe:
        """The recipe for a model that is given, whatever model it was written for."""
        return replace(self, model={})

    def changed(self, sections: Mapping[str, Mapping[str, Any]]) -> Recipe:
        """The recipe with some of its sections' keys set anew. Raises InputError."""
        changes: dict[str, Any] = {}
        for name, values in sections.items():
            changes[name] = _checked(type(getattr(self, name)), {**asdict(getattr(self, name)), **values}, name)
        return replace(self, **changes)


def read_recipe(path: str | Path) -> Recipe:
    """The recipe in a TOML file. Raises InputError naming what is wrong with it."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}): name a recipe, a TOML file") from None
    if len(text) > MAX_BYTES:
        raise InputError(f"{path}: is larger than 1 MiB: name a recipe, a TOML file")
    try:
        table = tomllib.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: is no TOML ({words_of(error, 120)}): correct it there") from None
    try:
        return parse_recipe(table)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    """A recipe of a TOML file's table. Raises InputError."""
    kinds = {"train": Settings, "data": Data, "balance": Balance, "locality": Locality, "domain": Domain,
             "distill": Distill}  # fmt: skip
    for name, value in table.items():
        if name not in (*kinds, "model"):
            raise InputError(f"section [{name}] is unknown: choose from {', '.join(('model', *kinds))}")
        if not isinstance(value, dict):
            raise InputError(f"{name} is no section: write [{name}] and its keys below")
    if "train" not in table:
        raise InputError("section [train] is missing: say at least steps, batch and length in it")
    parts = {name: _checked(kind, table[name], name) for name, kind in kinds.items() if name in table}
    return Recipe(**parts, model=dict(table.get("model", {})))


def _checked(kind: type[_T], values: Mapping[str, Any], section: str) -> _T:
    """A dataclass of a section's keys, each of its field's type. Raises InputError."""
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in known:
            raise InputError(f"{section}.{name} is unknown: choose from {', '.join(known)}")
        _check_type(f"{section}.{name}", str(known[name].type), value)
    if kind is Settings and (missing := [name for name in ("steps", "batch", "length") if name not in values]):
        raise InputError(f"{section}.{missing[0]} is missing: say how many")
    return kind(**values)


def _check_type(name: str, kind: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if kind == "int" and not (number and isinstance(value, int)):
        raise InputError(f"{name} is {value!r}: give a whole number of at least 0")
    if kind == "float" and not number:
        raise InputError(f"{name} is {value!r}: give a number of at least 0")
    if kind == "str" and not isinstance(value, str):
        raise InputError(f"{name} is {value!r}: give a text")
    if kind.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise InputError(f"{name} is {value!r}: give a table of names and numbers")
        for key, one in value.items():
            _check_type(f"{name}.{key}", "float", one)
