"""Puts an analysis into words and numbers: JSON, tables for a terminal, one self-contained HTML page. Measures nothing.

All text from traces is escaped in HTML. Tables are plain strings, so that whoever prints them need not know their kind.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from sluice.lab.analyze import WINDOWS, Analysis
from sluice.lab.plot_style import NARROW, short
from sluice.lab.plots import Plot
from sluice.lab.segments import CACHE_RATIOS, FUTURE, SEGMENTS

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)  # of traffic, for the concentration table


@dataclass(frozen=True)
class Table:
    """Text in columns, the first of them names."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def numbers(a: Analysis) -> dict[str, Any]:
    """Everything that was measured, for JSON: shares from 0 to 1, what is unknown is None. Lists over layers are in
    the order of `layers`."""
    r, c, info, curves = a.reuse, a.consistency, a.routes.info, a.curves
    return {
        "traces": list(a.traces),
        "model": {
            "name": info.name, "architecture": info.architecture, "fingerprint": info.fingerprint,
            "layers": info.n_layers, "moe_layers": len(info.moe_layers), "experts": info.n_expert, "top_k": info.top_k,
        },
        "rows": len(a.routes), "tokens": a.routes.n_tokens, "sequences": a.routes.n_sequences,
        "steps": a.routes.n_steps, "decode_rows": a.routes.n_decode, "token_demands": a.routes.n_choices,
        "demands": curves.demands, "experts_used": int((a.used > 0).sum()), "experts_all": curves.n_all,
        "layers": list(a.layers),
        "reuse": {
            "mean": _number(r.mean), "low": _number(r.mean_low), "high": _number(r.mean_high),
            "chance": _number(r.mean_chance), "over_chance": _quotient(r.mean, r.mean_chance),
            "uniform_chance": _number(r.mean_uniform), "confidence": 0.95, "block_tokens": r.block_tokens,
            "pairs": _list(r.pairs), "by_layer": _list(r.measured), "low_by_layer": _list(r.low),
            "high_by_layer": _list(r.high), "chance_by_layer": _list(r.chance),
        },
        "concentration": {
            "experts_for": {f"{share:g}": a.concentration.experts_for(share) for share in SHARES},
            "experts_for_95_by_layer": _list(a.layer_95),
        },
        "entropy": {"bits_by_layer": _list(a.entropy), "share_by_layer": _list(a.entropy_share),
                    "mean_share": _number(float(a.entropy_share.mean()))},
        "working_set": {"windows": list(WINDOWS), "mean": _list(_mean(a.working_set)),
                        "by_layer": [_list(one) for one in a.working_set]},
        "reuse_distance": {
            "first_uses": curves.distances.cold,
            **{f"p{round(100 * q)}": curves.distances.quantile(q) for q in (0.25, 0.5, 0.75, 0.9)},
        },
        "consistency": {
            "srp": dict(zip(map(str, SEGMENTS), _list(c.srp), strict=True)),
            "srp_size_ratio": dict(zip(map(str, SEGMENTS), _list(c.size_ratio), strict=True)),
            "srp_by_layer": dict(zip(map(str, SEGMENTS), map(_list, c.layer_srp), strict=True)),
            "sch_future": FUTURE,
            "sch": dict(zip(map(str, CACHE_RATIOS), _list(_mean(c.layer_sch)), strict=True)),
            "sch_by_layer": dict(zip(map(str, CACHE_RATIOS), map(_list, c.layer_sch), strict=True)),
        },
        "coactivation": None if a.coactivation is None else [pair.__dict__ for pair in a.coactivation.pairs],
        "domains": None if a.domains is None else {
            "names": list(a.domains.names), "tokens": list(a.domains.tokens),
            "overlap": [_list(one) for one in a.domains.overlap], "hot": [_list(one) for one in a.domains.hot],
        },
        "caches": {
            "tokenwise": curves.tokenwise, "lru_exact": curves.lru_exact, "usual_slots": curves.usual,
            "at_usual": {name: line.at(curves.usual) for name, line in curves.lines.items()},
            "policies": {
                name: [
                    {"capacity_slots": slots, "capacity_share": slots / curves.n_all, "hits": hits,
                     "misses": curves.demands - hits, "hit_rate": _quotient(hits, curves.demands)}
                    for slots, hits in zip(*(column.tolist() for column in line.thinned()), strict=True)
                ]
                for name, line in curves.lines.items()
            },
        },
    }  # fmt: skip


def facts(a: Analysis) -> list[tuple[str, str]]:
    """What matters most, as names and values."""
    r, info, routes = a.reuse, a.routes.info, a.routes
    result = [
        ("model", f"{info.name or 'unnamed'}: {len(info.moe_layers)} layers × {info.n_expert} experts, "
                  f"top {info.top_k}"),
        ("traces", ", ".join(a.traces)),
        ("rows", f"{len(routes):,}: {routes.n_tokens:,} tokens of {routes.n_sequences:,} sequences, "
                 f"{routes.n_decode / len(routes):.0%} decode"),
        ("demands", f"{a.curves.demands:,} in {routes.n_steps:,} steps ({routes.n_choices:,} by tokens)"),
        ("experts used", f"{int((a.used > 0).sum()):,} of {a.curves.n_all:,}"),
        ("adjacent reuse", _reuse(a)),
        ("95 % of traffic", f"on {a.concentration.experts_for(0.95):.1%} of experts"),
        ("entropy", f"{a.entropy_share.mean():.1%} of even use ({a.entropy_share.min():.1%} to "
                    f"{a.entropy_share.max():.1%})"),
    ]  # fmt: skip
    if np.isfinite(r.mean) and (median := a.curves.distances.quantile(0.5)) is not None:
        result.append(("reuse distance", f"median {median:,} experts ({median / a.curves.n_all:.1%} of all)"))
    slots, hits = next(row for row in a.curves.table() if row[0] == a.curves.usual)
    rates = (
        f"{name} {_percent(_quotient(n, a.curves.demands))}"
        for name, n in zip(a.curves.lines, hits, strict=True)
        if n is not None
    )
    result.append((f"hits at {slots / a.curves.n_all:.1%}", ", ".join(rates)))
    if a.curves.tokenwise:
        result.append(("", "the trace has no decode: caches saw each of its tokens as a step of its own"))
    elif not a.curves.lru_exact:
        result.append(("", "lru takes prompts like any step; the engine keeps them from flushing the cache"))
    return result


def _reuse(a: Analysis) -> str:
    r = a.reuse
    if not np.isfinite(r.mean):
        return "no two consecutive tokens"
    bounds = f" ({r.mean_low:.1%} to {r.mean_high:.1%})" if np.isfinite(r.mean_low) else ""
    over = f"{r.mean / r.mean_chance:.2f} × " if r.mean_chance else ""
    return f"{r.mean:.1%}{bounds}, {over}chance {r.mean_chance:.1%}; even chance {r.mean_uniform:.1%}"


def tables(a: Analysis) -> list[Table]:
    """The rest, as tables."""
    c, curves, w = a.consistency, a.curves, _mean(a.working_set)
    segment, ratio = SEGMENTS.index(16), CACHE_RATIOS.index(2)
    layers = [
        (str(layer), _percent(a.reuse.measured[i]), _range(a.reuse.low[i], a.reuse.high[i]),
         _percent(a.reuse.chance[i]), _times(a.reuse.measured[i], a.reuse.chance[i]),
         f"{a.entropy[i]:.2f}", _percent(a.layer_95[i]),
         _percent(c.layer_srp[segment, i]), _percent(c.layer_sch[ratio, i]))
        for i, layer in enumerate(a.layers)
    ]  # fmt: skip
    found = [
        Table("By layer", ("layer", "reuse", "95 % confidence", "chance", "×", "entropy, bits", "experts for 95 %",
                           f"SRP, {SEGMENTS[segment]} tokens", f"SCH, {CACHE_RATIOS[ratio]} × top k"), tuple(layers)),
        Table("Hit rate of caches", ("slots", *curves.lines),
              tuple((f"{slots:,} ({slots / curves.n_all:.1%})",
                     *(_percent(None if hits is None else _quotient(hits, curves.demands)) for hits in row))
                    for slots, row in curves.table())),
        Table("Concentration", ("of traffic", "of experts"),
              tuple((f"{share:.0%}", f"{a.concentration.experts_for(share):.1%}") for share in SHARES)),
        Table("Working set, mean of the layers", ("tokens", "experts", "of a layer's"),
              tuple((str(n), f"{x:.1f}", _percent(x / a.routes.info.n_expert))
                    for n, x in zip(WINDOWS, w, strict=True) if np.isfinite(x))),
        Table("Local routing consistency, all layers", ("tokens", "SRP", "size ratio"),
              tuple((str(m), _percent(x), f"{y:.2f}")
                    for m, x, y in zip(SEGMENTS, c.srp, c.size_ratio, strict=True) if np.isfinite(x))),
    ]  # fmt: skip
    if a.domains is not None:
        names = [short(name) for name in a.domains.names]
        found += [
            Table(title, (title.split()[0].lower(), *names),
                  tuple((name, *map(_percent, row)) for name, row in zip(names, values, strict=True)))
            for title, values in (("Traffic in common", a.domains.overlap), ("Hot sets in common", a.domains.hot))
            if len(names) > 1
        ]  # fmt: skip
    if a.coactivation is not None:
        found.append(Table("Co-activation, the most correlated", ("layer: experts", "tokens", "phi"), tuple(
            (f"{p.layer}: {p.a}, {p.b}", f"{p.n:,}", f"{p.phi:.2f}") for p in a.coactivation.pairs[:10]
        )))  # fmt: skip
    return [table for table in found if table.rows]


def html(a: Analysis, figures: Sequence[tuple[Plot, bytes]]) -> str:
    """One page with everything in it: no other file, no script, nothing from a network."""
    name = a.routes.info.name or "unnamed model"
    head = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts(a))
    pictures = "".join(
        f'<figure class="{"wide" if plot.size[0] > NARROW else "narrow"}"><img alt="{escape(plot.name)}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}"><figcaption>{escape(plot.caption)}</figcaption></figure>'
        for plot, png in figures
    )
    data = json.dumps(numbers(a), allow_nan=False).replace("<", "\\u003c")
    return _PAGE.format(
        title=escape(f"Routes of {name}"),
        head=head,
        figures=pictures,
        tables="".join(map(_html_table, tables(a))),
        data=data,
    )


def _html_table(table: Table) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    body = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<section><h2>{escape(table.title)}</h2>{body}</section>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.05rem; margin: 1.6rem 0 .4rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }}
dt {{ color: #6b7783; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
.figures, .tables {{ display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; align-items: flex-start; }}
figure {{ margin: .6rem 0; flex: 1 1 420px; max-width: 560px; }} figure.wide {{ flex-basis: 100%; max-width: 100%; }}
img {{ width: 100%; height: auto; }} figcaption {{ color: #6b7783; font-size: .9rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }}
th, td {{ padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #e3e7eb; }}
th {{ color: #6b7783; font-weight: 600; }} th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
</style></head><body><h1>{title}</h1><dl>{head}</dl><div class="figures">{figures}</div>
<div class="tables">{tables}</div><script type="application/json" id="numbers">{data}</script></body></html>
"""


# --- numbers as text and as JSON


def _number(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def _list(values: np.ndarray[Any, Any]) -> list[Any]:
    return [None if isinstance(x, float) and not np.isfinite(x) else x for x in values.tolist()]


def _mean(by_layer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The mean over the last axis of what is known; NaN where nothing is."""
    known = np.isfinite(by_layer)
    n = known.sum(axis=-1)
    return np.divide(np.where(known, by_layer, 0).sum(axis=-1), n, out=np.full(n.shape, np.nan), where=n > 0)


def _quotient(a: float, b: float) -> float | None:
    return float(a / b) if b and np.isfinite(a / b) else None


def _percent(x: float | None) -> str:
    return "–" if x is None or not np.isfinite(x) else f"{x:.1%}"


def _range(low: float, high: float) -> str:
    return f"{low:.1%} to {high:.1%}" if np.isfinite(low) else "–"


def _times(a: float, b: float) -> str:
    return "–" if _quotient(a, b) is None else f"{a / b:.2f}"
