"""How figures look: colours, ticks, bars, matrices. Knows nothing of what they show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2933", "#6b7783", "#e3e7eb"
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL = (
    "#2268a8", "#d9822b", "#2e8b57", "#c23b3b", "#7a52a8", "#1f9aa8",
)  # fmt: skip
NARROW = 6  # inches, up to which two figures stand side by side
POLICY_STYLES = {  # colour, line
    "belady": (INK, "--"), "lru": (BLUE, "-"), "static": (ORANGE, "-"), "lfu": (GREEN, "-"), "lfru": (TEAL, "-"),
    "s3fifo": (PURPLE, "-"), "arc": (RED, "-"),
}  # fmt: skip
STYLE = {
    "font.size": 9, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
    "legend.frameon": False, "legend.fontsize": 8.5, "figure.facecolor": "white", "text.parse_math": False,
    "lines.linewidth": 1.8,
}  # fmt: skip


def short(text: str, n: int = 24) -> str:
    """A label of at most n characters, on one line."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= n else line[: n - 1] + "…"


def percent(ax: Axes, *, x: bool = False, y: bool = False, decimals: int | None = 0) -> None:
    from matplotlib.ticker import PercentFormatter

    if x:
        ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))
    if y:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))


def layer_ticks(axis: Any, layers: Sequence[int]) -> None:
    n = len(layers)
    step = max(1, -(-n // 12))
    axis.set_ticks(range(0, n, step), [str(layer) for layer in layers[::step]])


def bar_width(layers: np.ndarray[Any, Any]) -> float:
    return 0.8 * float(np.diff(layers).min()) if len(layers) > 1 else 0.8


def steps(layers: np.ndarray[Any, Any], values: np.ndarray[Any, Any], width: float) -> tuple[Any, Any]:
    half = width / 1.6
    return np.append(layers - half, layers[-1] + half), np.append(values, values[-1])


def ratio(a: float, b: float) -> str:
    return f"{a / b:.2f} ×" if b and np.isfinite(a / b) else "no figure for"


def matrix(ax: Axes, values: np.ndarray[Any, Any], names: list[str], title: str) -> None:
    shown = np.ma.masked_invalid(values)
    low = float(np.nanmin(values)) if np.isfinite(values).any() else 0.0
    ax.imshow(shown, cmap="YlGnBu", vmin=max(0.0, low - 0.15), vmax=1, interpolation="nearest")
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_xticks(
        range(len(names)), names, rotation=35 if len(names) > 3 else 0, ha="right" if len(names) > 3 else "center"
    )
    ax.set_yticks(range(len(names)), names)
    ax.set_title(title)
    if len(names) <= 8:
        middle = (max(0.0, low - 0.15) + 1) / 2
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                ax.text(j, i, f"{value:.0%}", ha="center", va="center", color="white" if value > middle else INK)


def by_similarity(phi: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Experts ordered so that correlated ones are neighbours: from the strongest pair on, always the nearest next."""
    left = np.ones(len(phi), np.bool_)
    order = [int(np.argmax(phi.max(axis=1)))]
    left[order] = False
    while left.any():
        order.append(int(np.argmax(np.where(left, phi[order[-1]], -np.inf))))
        left[order[-1]] = False
    return np.array(order)
