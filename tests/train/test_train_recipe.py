"""Recipes: read from TOML, every unknown or wrong key refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.errors import InputError
from sluice.train.recipe import Domain, parse_recipe, read_recipe

ROOT = Path(__file__).resolve().parents[2]
LEAST = {"steps": 10, "batch": 4, "length": 16}
USED = {"experts": "used", "begin": 0.55, "full": 0.75}


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, '[train]\nsteps = 10\nbatch = 4\nlength = 16\n[locality]\nloss = "set"\n'))
    assert (recipe.train.steps, recipe.train.lr, recipe.locality.loss) == (10, 1e-3, "set")
    assert recipe.locality.weight == recipe.domain.weight == recipe.distill.weight == recipe.balance.bias == 0
    assert recipe.as_dict()["balance"] == {
        "loss": 0.01, "final": 1.0, "z": 0.001, "bias": 0.0, "fade": 0.7,
    }  # fmt: skip


def test_whole_numbers_do_for_numbers_and_tables_are_kept() -> None:
    recipe = parse_recipe({"train": {**LEAST, "lr": 1}, "data": {"weights": {"code": 2}}, "model": {"family": "olmoe"}})
    assert recipe.train.lr == 1 and recipe.data.weights == {"code": 2} and recipe.model == {"family": "olmoe"}
    assert recipe.without_model().model == {}


def test_use_is_counted_over_the_twentieth_before_the_domains_begin() -> None:
    for begin, counted in ((0.55, [10]), (0.2, [3]), (0.52, [10]), (0.01, [0])):
        domain = Domain(experts="used", begin=begin, full=1.0)
        assert [step for step in range(20) if domain.counts(step / 20)] == counted
    assert not any(Domain(begin=0.55, full=0.75).counts(step / 20) for step in range(20))


def test_sections_are_changed_and_checked_again() -> None:
    recipe = parse_recipe({"train": LEAST}).changed({"train": {"steps": 20}, "locality": {"weight": 0.5}})
    assert (recipe.train.steps, recipe.train.batch, recipe.locality.weight) == (20, 4, 0.5)
    with pytest.raises(InputError, match="steps is 0"):
        recipe.changed({"train": {"steps": 0}})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, r"section \[train\] is missing"),
        ({"train": {"steps": 10, "batch": 4}}, r"train\.length is missing"),
        ({"train": LEAST, "trian": {}}, r"section \[trian\] is unknown: choose from model, train, data"),
        ({"train": LEAST, "locality": {"lambda": 1.0}}, r"locality\.lambda is unknown: choose from loss, weight, tau"),
        ({"train": {**LEAST, "lr": "fast"}}, r"train\.lr is 'fast': give a number"),
        ({"train": {**LEAST, "steps": 1.5}}, r"train\.steps is 1\.5: give a whole number"),
        ({"train": {**LEAST, "steps": True}}, r"train\.steps is True: give a whole number"),
        ({"train": {**LEAST, "lr": float("nan")}}, r"train\.lr is nan"),
        ({"train": LEAST, "balance": {"loss": -1.0}}, r"balance\.loss is -1\.0"),
        ({"train": LEAST, "data": {"weights": {"code": "much"}}}, r"data\.weights\.code is 'much'"),
        ({"train": LEAST, "data": 3}, r"data is no section"),
        ({"train": LEAST, "locality": {"anneal": "often"}}, r"constant, rise, fall, late"),
        ({"train": LEAST, "locality": {"tau": 0.0}}, r"locality\.tau is 0"),
        ({"train": LEAST, "locality": {"reroute": 2}}, r"locality\.reroute is 2: give a share of probability"),
        ({"train": LEAST, "domain": {"until": 2.0}}, r"domain\.until is 2"),
        ({"train": LEAST, "domain": {"full": 1.5}}, r"domain\.full is 1\.5"),
        ({"train": LEAST, "domain": {"begin": 0.5}}, r"domain\.full is 0 and domain\.begin 0\.5: give at least"),
        ({"train": LEAST, "domain": {"enough": 2}}, r"domain\.enough is 2: give a share"),
        ({"train": LEAST, "domain": {"experts": "odd"}}, r"experts 'odd' is unknown: choose from even, used"),
        ({"train": LEAST, "domain": {"loss": "odd"}}, r"domain\.loss 'odd' is unknown: choose from mass, weight"),
        ({"train": LEAST, "domain": {"tau": 0}}, r"domain\.tau is 0: give a number above 0"),
        ({"train": LEAST, "domain": {**USED, "prior": 1.0}}, r"leave domain\.prior out"),
        ({"train": LEAST, "domain": {"experts": "used"}}, r"no step is within the 0\.05 of the run before.*, 0:"),
        ({"train": LEAST, "domain": {**USED, "begin": 0.58}}, r"no step is within.* 0\.58: begin later"),
        ({"train": LEAST, "distill": {"weight": 1.5}}, r"distill\.weight is 1\.5"),
    ],
)
def test_what_is_wrong_is_refused_by_name(table: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_recipe(table)


@pytest.mark.parametrize("text", ["[train", "\x00", "steps = 1\nsteps = 2", "[" * 5000])
def test_what_is_no_toml_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"recipe\.toml: is no TOML"):
        read_recipe(write(tmp_path, text))


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(InputError, match="larger than 1 MiB"):
        read_recipe(write(tmp_path, "#" * (1 << 20) + "\n"))


def test_the_reference_recipe_is_one() -> None:
    recipe = read_recipe(ROOT / "experiments" / "base.toml")
    assert recipe.model["num_hidden_layers"] >= 8 and recipe.locality.weight == 0
    rows = [recipe.model[name] for name in ("hidden_size", "moe_intermediate_size")]
    assert all(row % 32 == 0 for row in rows)  # what 4-bit blocks hold
