"""Draws the reference experiment's figures as PNG. Measures nothing; what was not run is not drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from choosing import GATE_PPL, STACK_PPL, alike, misses, ppl
from measures import asked, seeds
from parts import LABELS
from recipes import DOMAINS, LOCALITY
from runner import Json, Work
from runs import SEEDS

from sluice.lab.plot_style import BLUE, GREEN, MUTED, ORANGE, PURPLE, RED, STYLE, TEAL, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, MUTED, "#8c6d31", "#3f3f9e")
LINES = ("-", "--", ":", "-.")
DPI = 110


def draw(work: Work, folder: Path) -> dict[str, tuple[str, Path]]:
    """By name, a figure's title and file. Files of figures that there is nothing for are not made."""
    drawn: dict[str, tuple[str, Path]] = {}
    for name, (title, wanted) in FIGURES.items():
        if _figure(folder / f"experiment-{name}.png", lambda ax, wanted=wanted: wanted(work, ax)):
            drawn[name] = (title, folder / f"experiment-{name}.png")
    return drawn


def _figure(path: Path, fill: Callable[[Axes], bool]) -> bool:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(dict[Any, Any](STYLE)):
        figure = Figure(figsize=(6.6, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        if not fill(figure.add_subplot()):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
    return True


def _looks(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name with a colour, and where those are used up another kind of line."""
    for i, name in enumerate(names):
        again, which = divmod(i, len(COLOURS))
        yield name, {"color": COLOURS[which], "linestyle": LINES[again % len(LINES)]}


def _evaluated(work: Work) -> dict[str, Json]:
    """What was measured of seed 1: the base, and what can be compared with it of the tries."""
    found = {name: asked(work, f"{name}-s1", "evaluate") for name in ("base", *LOCALITY, *DOMAINS)}
    done = {name: one for name, one in found.items() if one is not None}
    return {name: one for name, one in done.items() if "base" in done and alike(work, "base-s1", f"{name}-s1")}


def _curves(work: Work, ax: Axes) -> bool:
    found = _evaluated(work)
    for name, look in _looks(found):
        curve = found[name]["cache"]["curve"]
        ax.plot([each["share"] for each in curve], [each["misses_per_token"] for each in curve], label=name, **look)
    ax.set(xlabel="slots, share of all experts", ylabel="misses a token", ylim=(0, None))
    percent(ax, x=True)
    return _legend(ax)


def _tradeoff(work: Work, ax: Axes) -> bool:
    found = _evaluated(work)
    base = found.pop("base", None)
    if base is None or not found:
        return False
    for name, look in _looks(found):
        x, y = misses(found[name]) / misses(base) - 1, ppl(found[name]) / ppl(base) - 1
        ax.scatter([x], [y], color=look["color"])
        ax.annotate(name, (x, y), xytext=(5, 3), textcoords="offset points")
    ax.axvline(-0.30, color=MUTED, linestyle=":")
    ax.axhline(GATE_PPL, color=MUTED, linestyle=":")
    ax.set(xlabel="misses, against the base", ylabel="perplexity, against the base")
    percent(ax, x=True, y=True, decimals=1)
    return True


def _training(work: Work, ax: Axes) -> bool:
    found = {name: points for name in ("base", *LOCALITY, *DOMAINS) if (points := work.training(f"{name}-s1"))}
    for name, look in _looks(found):
        tokens, losses = zip(*found[name], strict=True)
        ax.plot([n / 1e6 for n in tokens], losses, label=name, linewidth=1.2, **look)
    ax.set(xlabel="million tokens", ylabel="training loss, nats a token")
    return _legend(ax)


def _recall(work: Work, ax: Axes) -> bool:
    if (found := asked(work, "stages-s1", "recall")) is None:
        return False
    layers = found["recall"]["layers"]
    numbers = [one["layer"] for one in layers]
    for name, colour in zip(found["recall"]["mean"], COLOURS, strict=False):
        ax.plot(numbers, [one[name] for one in layers], marker="o", label=name, color=colour)
    ax.set(xlabel="layer", ylabel="recall@k, a token ahead", ylim=(0, 1))
    ax.set_xticks(numbers)
    percent(ax, y=True)
    return _legend(ax)


def _stages(work: Work, ax: Axes) -> bool:
    for seed, found in seeds(work, "stages", "recovered").items():
        states = ["teacher", *found["states"]]
        values = [found["teacher_ppl"], *(one["ppl"] for one in found["states"].values())]
        ax.plot(states, values, marker="o", label=f"seed {seed}", color=COLOURS[SEEDS.index(seed)])
    ax.set(ylabel="perplexity, held-out text")
    return _legend(ax)


def _stack(work: Work, ax: Axes) -> bool:
    if (claim := asked(work, "stack-s1", "claim")) is None:
        return False
    tries: list[Json] = claim["tries"]
    for (which, label), colour in zip(LABELS.items(), COLOURS, strict=False):
        own = [one for one in tries if one["model"] == which]
        x, y = [one["misses_change"] for one in own], [one["ppl_change"] for one in own]
        ax.scatter(x, y, label=label, color=colour)
        for one in own:
            at = (one["misses_change"], one["ppl_change"])
            ax.annotate(one["rule"], at, xytext=(4, 3), textcoords="offset points", fontsize=7)
    ax.axvline(-0.80, color=MUTED, linestyle=":")
    ax.axhline(STACK_PPL, color=MUTED, linestyle=":")
    ax.set(xlabel="misses, against the base without a margin", ylabel="perplexity")
    percent(ax, x=True, y=True, decimals=1)
    return _legend(ax)


def _legend(ax: Axes) -> bool:
    """Whether there is something to be told apart."""
    if not ax.get_legend_handles_labels()[0]:
        return False
    ax.legend()
    return True


FIGURES: dict[str, tuple[str, Callable[[Work, Axes], bool]]] = {
    "tradeoff": ("Misses and perplexity of each try, the gate dotted", _tradeoff),
    "curves": ("Misses a token at every size of the cache", _curves),
    "training": ("Training loss", _training),
    "stack": ("Rerouting: misses and perplexity, by margin, the gate dotted", _stack),
    "recall": ("Recall of heads and of guesses, by layer", _recall),
    "stages": ("Perplexity after each stage", _stages),
}
