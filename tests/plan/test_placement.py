"""The search for what to pin: it finds pins where they help, none where they don't, and is judged on other demands."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from demand_sets import Execution, demands_of, info

from sluice.errors import InputError
from sluice.experts.policies import POLICIES, make_policy
from sluice.lab.replay import Demands
from sluice.lab.simulate import replay
from sluice.plan.placement import SHARES, _cut, chosen, find_split, replay_placed

N_LAYERS, N_EXPERT, TOP_K = 3, 32, 2


def popular_executions(n_steps: int, seed: int = 0) -> list[Execution]:
    """Independent tokens: each layer has its own favourites, whatever came before."""
    rng = np.random.default_rng(seed)
    shares = np.stack([rng.permutation(1 / np.arange(1, N_EXPERT + 1) ** 1.2) for _ in range(N_LAYERS)])
    shares /= shares.sum(axis=1, keepdims=True)
    return [
        (s, layer, True, rng.choice(N_EXPERT, TOP_K, replace=False, p=shares[layer]).tolist())
        for s in range(n_steps)
        for layer in range(N_LAYERS)
    ]


def popular(n_steps: int, seed: int = 0) -> Demands:
    return demands_of(info(N_LAYERS, N_EXPERT, TOP_K), popular_executions(n_steps, seed))


def drifting(n_steps: int, stay: int = 40, seed: int = 0) -> Demands:
    """A few experts at a time, other ones every `stay` steps: what was hot in the past says nothing."""
    rng = np.random.default_rng(seed)
    executions, current = [], np.zeros((N_LAYERS, 4), int)
    for step in range(n_steps):
        if step % stay == 0:
            current = np.stack([rng.choice(N_EXPERT, 4, replace=False) for _ in range(N_LAYERS)])
        executions += [(step, i, True, rng.choice(current[i], TOP_K, replace=False).tolist()) for i in range(N_LAYERS)]
    return demands_of(info(N_LAYERS, N_EXPERT, TOP_K), executions)


def test_pins_are_found_where_popularity_rules() -> None:
    split = find_split(popular(3000), 24)
    assert len(split.pins) > 12
    assert split.held_out["planned"].misses < split.held_out["none pinned"].misses
    assert split.held_out["planned"].misses <= split.held_out["all pinned"].misses


def test_none_are_found_where_the_subject_moves() -> None:
    split = find_split(drifting(1200), 14)
    assert split.pins == []
    assert split.held_out["planned"] == split.held_out["none pinned"]
    assert split.held_out["planned"].misses < split.held_out["all pinned"].misses
    assert len(split.load) == 14


def test_the_choice_is_that_of_the_fewest_misses_tried() -> None:
    split = find_split(popular(600), 24)
    assert [one.pins for one in split.tried] == sorted({round(share * 22) for share in SHARES})
    assert len(split.pins) == min(split.tried, key=lambda one: one.misses).pins
    assert split.tried[0].pins == 0 and split.tried[-1].pins == 22


def test_what_is_judged_on_was_not_chosen_by() -> None:
    one, other = popular_executions(800), popular_executions(800, seed=1)
    joined = demands_of(info(N_LAYERS, N_EXPERT, TOP_K), one[: len(one) // 2] + other[len(one) // 2 :])
    first, second = find_split(popular(800), 24), find_split(joined, 24)
    assert [one.misses for one in first.tried] == [one.misses for one in second.tried]
    assert len(first.pins) == len(second.pins)
    assert first.held_out["planned"].misses != second.held_out["planned"].misses


def test_the_hottest_come_first_and_what_was_never_demanded_not_at_all() -> None:
    of = info(2, 8, 1)
    demands = demands_of(of, [(s, layer, True, [0 if s % 3 else 1 + layer]) for s in range(9) for layer in range(2)])
    assert chosen(demands, 10, 2) == ([(0, 0), (1, 0)], [(1, 2), (0, 1)])
    assert chosen(demands, 3, 0) == ([], [(0, 1), (1, 0), (0, 0)])


@pytest.mark.parametrize("name", POLICIES)
def test_without_pins_and_load_it_is_the_plain_simulation(name: str) -> None:
    demands = popular(300)
    expected = replay(demands, make_policy(name, n_slots=20, n_layers=N_LAYERS), 20)
    assert replay_placed(demands, [], [], 20, name).tolist() == expected.tolist()


def test_what_is_loaded_is_not_missed() -> None:
    demands = popular(50)
    pins, load = chosen(demands, N_LAYERS * N_EXPERT, 10)
    assert replay_placed(demands, pins, load, N_LAYERS * N_EXPERT, "lru").sum() == 0
    assert replay_placed(demands, pins, [], N_LAYERS * N_EXPERT, "lru").sum() == len(load)


def test_parts_are_whole_steps_and_nothing_is_lost() -> None:
    demands = popular(101)
    parts = _cut(demands, 4)
    assert sum(len(part) for part in parts) == len(demands)
    assert [key for part in parts for key in Demands.keys(part)] == list(Demands.keys(demands))
    for before, after in pairwise(parts):
        assert before.step[-1] < after.step[0]
    sizes = [len(part.ids) for part in parts]
    assert max(sizes) - min(sizes) <= N_LAYERS * TOP_K


def test_progress_ends_where_it_said() -> None:
    seen: list[tuple[float, float]] = []
    find_split(popular(100), 12, progress=lambda done, total: seen.append((done, total)))
    assert len({total for _, total in seen}) == 1
    assert all(0 <= done < total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_figures_of_phases_are_apart() -> None:
    of = info(1, 8, 2)
    prompts = ((s, 0, s % 4 != 0, range(8) if s % 4 == 0 else [0, 1]) for s in range(80))
    split = find_split(demands_of(of, prompts), 5, room=2)
    outcome = split.held_out["planned"]
    assert outcome.decode_demands == 60 and outcome.demands == 60 + 80
    assert outcome.decode_hit_rate is not None and outcome.decode_hit_rate > outcome.hit_rate


@pytest.mark.parametrize(
    "demands, slots, said",
    [
        (popular(7), 24, "7 steps"),
        (demands_of(info(1, 64, 1), [(0, 0, False, range(64)), *((s, 0, True, [0]) for s in range(1, 12))]), 8, "long"),
        (popular(100), TOP_K, "leave nothing to pin"),
    ],
)
def test_what_there_is_nothing_to_plan_from(demands: Demands, slots: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        find_split(demands, slots)
