"""Draws what a report says, each figure on its own or all on one sheet. Measures nothing.

Figures are made without pyplot, so nothing is kept between them and no display is needed. Text from traces is drawn as
it is, never as mathematics.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sluice.errors import InputError
from sluice.lab.analyze import WINDOWS, Analysis
from sluice.lab.curves import BOUND, SHARES, STATIC
from sluice.lab.plot_style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    NARROW,
    ORANGE,
    POLICY_STYLES,
    STYLE,
    TEAL,
    bar_width,
    by_similarity,
    layer_ticks,
    matrix,
    percent,
    ratio,
    short,
    steps,
)  # fmt: skip
from sluice.lab.popularity import HOT_SHARE
from sluice.lab.segments import CACHE_RATIOS, FUTURE, SEGMENTS

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase


@dataclass(frozen=True)
class Plot:
    """One figure: its name, what it shows, its size in inches and whether there is anything to draw."""

    name: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[FigureBase, Analysis], None]
    has_data: Callable[[Analysis], bool]


def heat_map(figure: FigureBase, a: Analysis) -> None:
    from matplotlib.ticker import PercentFormatter

    ax = figure.subplots()
    tokens = np.maximum(a.used.sum(axis=1, keepdims=True), 1) / a.reuse.uniform[:, None] / a.routes.info.n_expert
    share = np.sort(a.used / tokens, axis=1)[:, ::-1]  # share of the layer's tokens that choose the expert
    image = ax.imshow(share, aspect="auto", cmap="magma", vmin=0, interpolation="nearest", origin="upper")
    ax.grid(False)
    layer_ticks(ax.yaxis, a.layers)
    ax.set(title="Experts of each layer, most used first", xlabel="expert, by rank in its layer", ylabel="layer")
    bar = figure.colorbar(image, ax=ax, pad=0.01, format=PercentFormatter(1.0, decimals=0))
    bar.set_label("of the layer's tokens")
    bar.outline.set_visible(False)  # type: ignore[attr-defined]


def concentration(figure: FigureBase, a: Analysis) -> None:
    ax = figure.subplots()
    curve, at = a.concentration, a.concentration.experts_for(0.95)
    ax.plot([0, 1], [0, 1], color=MUTED, lw=1, ls=":", label="all used alike")
    ax.plot(curve.experts, curve.traffic, color=BLUE, label="this workload")
    ax.plot([at, at, 0], [0, 0.95, 0.95], color=ORANGE, lw=1, ls="--")
    ax.plot(at, 0.95, "o", color=ORANGE, ms=5)
    percent(ax, x=True, y=True)
    ax.set(title=f"95 % of traffic on {at:.1%} of experts", xlabel="share of all experts, most used first",
           ylabel="share of traffic", xlim=(0, 1), ylim=(0, 1.02))  # fmt: skip
    ax.legend(loc="lower right", frameon=True, facecolor="white", edgecolor="none", framealpha=1)


def reuse(figure: FigureBase, a: Analysis) -> None:
    ax, r = figure.subplots(), a.reuse
    layers = np.array(r.layers)
    width = bar_width(layers)
    ax.bar(layers, r.measured, width, color=BLUE, label="adjacent tokens share")
    bounded = np.isfinite(r.low)
    if bounded.any():
        ax.errorbar(
            layers[bounded], r.measured[bounded],
            yerr=np.maximum([(r.measured - r.low)[bounded], (r.high - r.measured)[bounded]], 0),
            fmt="none", ecolor=INK, elinewidth=0.9, capsize=1.5, label="95 % confidence",
        )  # fmt: skip
    ax.step(
        *steps(layers, r.chance, width), where="post", color=ORANGE, lw=1.8, label="chance, at the layer's frequencies"
    )
    ax.step(
        *steps(layers, r.uniform, width), where="post", color=INK, lw=1.4, ls=":", label="chance, all experts alike"
    )
    percent(ax, y=True)
    ax.set(title=f"Adjacent-token reuse: {r.mean:.1%}, {ratio(r.mean, r.mean_chance)} chance", xlabel="layer",
           ylabel="experts shared with the token before")  # fmt: skip
    ax.set_ylim(0, 1.3 * float(np.nanmax(np.concatenate([r.high, r.measured, r.chance]))))
    ax.margins(x=0.01)
    ax.legend(loc="upper center", ncols=2)


def entropy(figure: FigureBase, a: Analysis) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    layers = np.array(a.layers)
    height = bar_width(layers)
    left.barh(layers, a.entropy_share, height, color=GREEN)
    left.set(title="Entropy of use", xlabel="of the entropy of even use", ylabel="layer", xlim=(0, 1))
    right.barh(layers, a.layer_95, height, color=BLUE)
    right.set(title="For 95 % of traffic", xlabel="of the layer's experts", xlim=(0, 1))
    for ax in (left, right):
        ax.set_xticks([0, 0.25, 0.5, 0.75])
        percent(ax, x=True)
        ax.grid(axis="y", visible=False)
    left.invert_yaxis()


def working_set(figure: FigureBase, a: Analysis) -> None:
    ax = figure.subplots()
    n = a.routes.info.n_expert
    share = a.working_set / n
    known = [i for i in range(len(WINDOWS)) if np.isfinite(share[i]).any()]
    w = np.array(WINDOWS)[known]
    mean, low, high = (f(share[known], axis=1) for f in (np.nanmean, np.nanmin, np.nanmax))
    ax.fill_between(w, low, high, color=BLUE, alpha=0.15, lw=0, label="least and most of a layer")
    ax.plot(w, mean, "o-", color=BLUE, ms=4, label="mean of the layers")
    k = float(np.mean(a.reuse.uniform)) * n
    ax.plot(w, 1 - (1 - k / n) ** w, color=MUTED, ls=":", label="if all were used alike, at random")
    ax.set_xscale("log", base=2)
    ax.set_xticks(w, [str(x) for x in w])
    ax.minorticks_off()
    percent(ax, y=True)
    ax.set(title="Working set", xlabel="window, tokens", ylabel="of a layer's experts", ylim=(0, 1.02))
    ax.legend(loc="lower right")


def distances(figure: FigureBase, a: Analysis) -> None:
    ax, d = figure.subplots(), a.curves.distances
    n_all = a.curves.n_all
    edges = np.linspace(0, n_all, min(n_all, 60) + 1)
    at = np.arange(len(d.counts))
    total = max(int(d.counts.sum()) + d.cold, 1)
    heights, _ = np.histogram(at, edges, weights=d.counts)
    ax.bar(
        edges[:-1] / n_all, heights / total, np.diff(edges) / n_all, align="edge", color=TEAL, edgecolor="white", lw=0.3
    )
    percent(ax, x=True, y=True, decimals=1)
    percent(ax, x=True)
    ax.set(title="Reuse distance", xlabel="distinct experts demanded since the last use, of all", ylabel="of demands",
           xlim=(0, 1))  # fmt: skip
    median = d.quantile(0.5)
    notes = [f"first uses: {d.cold / total:.1%}"]
    if median is not None:
        notes.insert(0, f"median: {median / n_all:.1%} of all experts")
        ax.axvline(median / n_all, color=ORANGE, lw=1.2, ls="--")
    ax.text(0.98, 0.95, "\n".join(notes), transform=ax.transAxes, ha="right", va="top")


def hit_rates(figure: FigureBase, a: Analysis) -> None:
    left, right = figure.subplots(1, 2)
    c = a.curves
    for name, line in c.lines.items():
        colour, dashes = POLICY_STYLES.get(name, (MUTED, "-"))
        x, hit = line.slots / c.n_all, line.hits / max(c.demands, 1)
        marker = "o" if len(x) <= len(SHARES) else ""
        label = {BOUND: "Belady (bound)", STATIC: "static set, in hindsight"}.get(name, name)
        for ax, y in ((left, hit), (right, (1 - hit) * c.demands / max(c.n_tokens, 1))):
            ax.plot(x, y, color=colour, ls=dashes, marker=marker, ms=3.5, label=label, zorder=3 if name == BOUND else 2)
    percent(left, x=True, y=True)
    percent(right, x=True)
    left.set(title="Hit rate", xlabel="capacity, of all experts", ylabel="of demands", xlim=(0, 1), ylim=(0, 1.02))
    right.set(title="Misses", xlabel="capacity, of all experts", ylabel="experts read per token", xlim=(0, 1))
    right.set_ylim(bottom=0)
    left.legend(loc="lower right")


def domains(figure: FigureBase, a: Analysis) -> None:
    assert a.domains is not None
    names = [short(name) for name in a.domains.names]
    pairs = (
        ("Traffic in common", a.domains.overlap),
        (f"Hot sets in common ({HOT_SHARE:.0%} of traffic)", a.domains.hot),
    )
    for ax, (title, values) in zip(np.atleast_1d(figure.subplots(1, 2)), pairs, strict=True):
        matrix(ax, values, names, title)


def consistency(figure: FigureBase, a: Analysis) -> None:
    left, right = figure.subplots(1, 2)
    c, layers = a.consistency, np.array(a.layers)
    for i, m in enumerate(SEGMENTS):
        if np.isfinite(c.layer_srp[i]).any():
            left.plot(layers, c.layer_srp[i], "o-", ms=3, lw=1.3, label=f"{m} tokens")
    for i, size in enumerate(CACHE_RATIOS):
        right.plot(layers, c.layer_sch[i], "o-", ms=3, lw=1.3, label=f"{size} × top k")
    left.set(title="Segment routing best performance (SRP)", xlabel="layer", ylabel="F1")
    right.set(title="Segment cache best hit rate (SCH)", xlabel="layer", ylabel="hit rate")
    for ax in (left, right):
        ax.set_ylim(0, 1.25)
        ax.set_yticks(np.linspace(0, 1, 6))
        percent(ax, y=True)
        if ax.lines:
            ax.legend(loc="upper center", ncols=4, columnspacing=1, handlelength=1.4)


def coactivation(figure: FigureBase, a: Analysis) -> None:
    assert a.coactivation is not None
    ax, phi = figure.subplots(), a.coactivation.phi
    order = by_similarity(phi)
    bound = max(float(np.quantile(np.abs(phi), 0.997)), 0.05)  # a few strong pairs must not pale the rest
    image = ax.imshow(phi[np.ix_(order, order)], cmap="RdBu_r", vmin=-bound, vmax=bound, interpolation="nearest")
    ax.grid(False)
    ax.set(
        title=f"Co-activation in layer {a.coactivation.layer}",
        xlabel="expert, similar ones side by side",
        ylabel="expert",
    )
    if len(phi) <= 16:
        ax.set_xticks(range(len(phi)), [str(i) for i in order])
        ax.set_yticks(range(len(phi)), [str(i) for i in order])
    else:
        ax.set_xticks([])
        ax.set_yticks([])
    bar = figure.colorbar(image, ax=ax, pad=0.02, shrink=0.8, extend="both")
    bar.set_label("correlation (phi)")
    bar.outline.set_visible(False)  # type: ignore[attr-defined]


PLOTS = (
    Plot("hit_rates", "What caches of every size hit, and how many experts they read for each token. Belady's policy "
         "knows the future: no policy that loads on demand does better.", (9, 3.6), hit_rates,
         lambda a: a.curves.demands > 0),
    Plot("heat_map", "How many of a layer's tokens choose each of its experts; each row is sorted by itself.",
         (9, 4), heat_map, lambda a: True),
    Plot("reuse", "Share of a token's experts that the token before it chose too, by layer.",
         (9, 3.4), reuse, lambda a: bool(np.isfinite(a.reuse.measured).any())),
    Plot("concentration", "Share of all choices by share of all experts, over all layers.",
         (4.6, 3.8), concentration, lambda a: True),
    Plot("working_set", "Distinct experts of a layer in so many consecutive tokens of one sequence.",
         (4.6, 3.8), working_set, lambda a: bool(np.isfinite(a.working_set).any())),
    Plot("distances", "How many other experts, of all layers, were demanded between two uses of one: an LRU cache "
         "that holds more than those hits.", (4.6, 3.8), distances, lambda a: a.curves.demands > 0),
    Plot("entropy", "How evenly each layer uses its experts.", (4.6, 3.8), entropy, lambda a: True),
    Plot("consistency", "Local routing consistency (arXiv:2505.16056): how well one set of experts serves a whole "
         f"segment of tokens, and what a layer's cache hits that knows the next {FUTURE} tokens' choices.", (9, 3.4),
         consistency, lambda a: True),
    Plot("domains", "How alike domains route, mean over layers. The diagonal on the left compares two halves of one "
         "domain: what the sample's size alone makes of a difference.", (9, 4), domains,
         lambda a: a.domains is not None and len(a.domains.names) > 1),
    Plot("coactivation", "Which experts the same tokens choose, in the layer with the most correlated pair.",
         (4.6, 4), coactivation, lambda a: a.coactivation is not None),
)  # fmt: skip


def figures(analysis: Analysis, dpi: int = 130) -> list[tuple[Plot, bytes]]:
    """Each figure that has something to show, as PNG."""
    return [(plot, _png(plot.size, [plot], analysis, dpi)) for plot in PLOTS if plot.has_data(analysis)]


def sheet(analysis: Analysis, dpi: int = 110) -> bytes:
    """All figures on one sheet, as PNG."""
    drawn = [plot for plot in PLOTS if plot.has_data(analysis)]
    return _png(None, drawn, analysis, dpi)


def _png(size: tuple[float, float] | None, plots: list[Plot], analysis: Analysis, dpi: int) -> bytes:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("figures need matplotlib: pip install 'sluice[lab]'") from None

    rows = _rows(plots)
    heights = [max(plot.size[1] for plot in row) for row in rows]
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[call-overload]
        warnings.filterwarnings("ignore", "Glyph")  # a label in a script that the font lacks is drawn as boxes
        figure = Figure(figsize=size or (9.2, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        if size is not None:
            plots[0].draw(figure, analysis)
        else:
            bands = np.atleast_1d(figure.subfigures(len(rows), 1, height_ratios=heights))  # type: ignore[call-overload]
            for band, row in zip(bands, rows, strict=True):
                columns = 1 if row[0].size[0] > NARROW else 2
                for part, plot in zip(np.atleast_1d(band.subfigures(1, columns)), row, strict=False):
                    plot.draw(part, analysis)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=dpi)
    return out.getvalue()


def _rows(plots: list[Plot]) -> list[list[Plot]]:
    """Two narrow figures side by side, a wide one alone."""
    rows: list[list[Plot]] = []
    for plot in plots:
        if rows and max(plot.size[0], rows[-1][0].size[0]) <= NARROW and len(rows[-1]) == 1:
            rows[-1].append(plot)
        else:
            rows.append([plot])
    return rows
