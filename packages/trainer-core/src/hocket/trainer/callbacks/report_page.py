"""The HTML page of a run report, with the charts inline; it needs no other file and no network."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Points = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 10, 26
_COLORS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#b82e2e", "#66aa00")
# Larger values would overflow in the arithmetic of the axes; NaN is left out by the same comparison.
_LARGEST = 1e290
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1080px;padding:0 1em;color:#222;
  background:#fff}
h1{font-size:22px;margin-bottom:.2em} h2{font-size:17px;margin-top:1.8em;border-bottom:1px solid #ccc}
.charts{display:flex;flex-wrap:wrap;gap:18px} figure{margin:0} figcaption{font-weight:600}
table{border-collapse:collapse} td,th{padding:2px 14px 2px 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums} .bad{color:#b00020;font-weight:600}
pre{white-space:pre-wrap;background:#8881;padding:.8em} .legend span{margin-right:1em;white-space:nowrap}
svg text{font:11px system-ui,sans-serif;fill:currentColor} svg .grid{stroke:#8884} svg .axis{stroke:#888}
@media (prefers-color-scheme:dark){body{color:#ddd;background:#1b1b1d}h2{border-color:#555}}
"""


@dataclass(kw_only=True)
class PageContents:
    """The contents of a page.

    Attributes:
        run_name: The run's name.
        outcome: A sentence on the end of the run, or that the run goes on.
        has_failed: Whether the run ended with an error.
        facts: Rows of the table at the top.
        series: Points by metric name.
        units: Units by metric name.
        events: Triples of clock time, batch and text, the oldest first.
        hyperparameters: Settings that were logged.
        error: The error's text, if any.
    """

    run_name: str
    outcome: str
    has_failed: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    series: Mapping[str, Points] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[tuple[str, int, str]] = ()
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    error: str = ""


def render(report: PageContents) -> str:
    """Return the page."""
    name = html.escape(report.run_name)
    outcome = f'<p class="{"bad" if report.has_failed else "good"}">{html.escape(report.outcome)}</p>'
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1>{outcome}",
        _table(report.facts),
    ]
    if report.error:
        parts.append(f"<pre>{html.escape(report.error)}</pre>")
    for title, charts in _sections(report.series, report.units).items():
        figures = "".join(
            _figure(f"{chart} ({unit})" if unit else chart, report.series, names)
            for (chart, unit), names in charts.items()
        )
        parts.append(f'<h2>{html.escape(title)}</h2><div class="charts">{figures}</div>')
    parts.append(f"<h2>Last values</h2>{_last_values(report.series, report.units)}")
    if report.events:
        rows = "".join(
            f'<tr><td>{html.escape(clock)}</td><td class="n">{batch}</td><td>{html.escape(text)}</td></tr>'
            for clock, batch, text in report.events
        )
        parts.append(f"<h2>Events</h2><table><tr><th>time</th><th>batch</th><th></th></tr>{rows}</table>")
    if report.hyperparameters:
        settings = {name: str(value) for name, value in report.hyperparameters.items()}
        parts.append(f"<h2>Settings</h2>{_table(settings)}")
    return "".join([*parts, "</body></html>"])


def _sections(
    series: Mapping[str, Points], units: Mapping[str, str]
) -> dict[str, dict[tuple[str, str], list[str]]]:
    """Sort metrics into sections, and there into charts of metrics that share an axis and a unit."""
    titles = {
        "loss": "Loss",
        "metrics": "Metrics",
        "throughput": "Throughput",
        "memory": "Memory",
        "goodput": "Time",
        "time": "Time",
        "lr": "Learning rate",
        "l2_norm": "Norms",
    }
    order = [*dict.fromkeys(titles.values()), "Other"]
    sections: dict[str, dict[tuple[str, str], list[str]]] = {title: {} for title in order}
    for name in series:
        prefix = name.split("/")[0]
        title = titles.get("lr" if prefix.startswith("lr-") else prefix, "Other")
        charts = sections[title]
        if title == "Metrics":
            chart = name.rpartition("/")[2]  # one metric of all data sets together
        elif title in ("Memory", "Learning rate", "Time") and not name.endswith(("ratio", "retries")):
            chart = prefix
        else:
            chart = name
        charts.setdefault((chart, units.get(name, "")), []).append(name)
    return {title: charts for title, charts in sections.items() if charts}


def _figure(title: str, series: Mapping[str, Points], names: Sequence[str]) -> str:
    lines = [(name, series[name]) for name in names[: len(_COLORS)]]
    finite = [(name, [(x, y) for x, y in points if abs(y) < _LARGEST]) for name, points in lines]
    legend = "".join(
        f'<span><b style="color:{color}">&#9644;</b> {html.escape(name)}</span>'
        for (name, _), color in zip(finite, _COLORS, strict=False)
    )
    if len(names) > len(_COLORS):
        legend += f"<span>and {len(names) - len(_COLORS)} more, in the table below</span>"
    legend_block = f'<div class="legend">{legend}</div>' if len(names) > 1 else ""
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{_chart(finite)}{legend_block}</figure>"


def _chart(lines: Sequence[tuple[str, Points]]) -> str:
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points]
    if not xs:
        return f'<svg width="{_WIDTH}" height="40"><text x="8" y="24">no finite values</text></svg>'
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)
    x_scale = (_WIDTH - _LEFT - _RIGHT) / max(x_high - x_low, 1e-9)
    y_scale = (_HEIGHT - _TOP - _BOTTOM) / max(y_high - y_low, 1e-30)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - x_low) * x_scale, _HEIGHT - _BOTTOM - (y - y_low) * y_scale

    parts = [f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for tick in y_ticks:
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in x_ticks:
        if x_low <= tick <= x_high:
            x, _ = place(tick, y_low)
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{tick:g}</text>')
    base = _HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    for (name, points), color in zip(lines, _COLORS, strict=False):
        places = [place(x, y) for x, y in points]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>')
        if places:
            (x, y), (step, value) = places[-1], points[-1]
            tip = html.escape(f"{name}: {value:.6g} at batch {step}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"><title>{tip}</title></circle>'
            )
    return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers that span the values."""
    if high - low <= max(abs(high) * 1e-9, 1e-280):
        margin = abs(high) * 0.1 if abs(high) > 1e-270 else 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.floor(low / step)
    return [round(index * step, 12) for index in range(first, math.ceil(high / step) + 1)]


def _last_values(series: Mapping[str, Points], units: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><td>{html.escape(name)}</td><td class="n">{points[-1][1]:.6g}</td>'
        f'<td class="n">{_extreme(min, points)}</td><td class="n">{_extreme(max, points)}</td>'
        f"<td>{html.escape(units.get(name, ''))}</td></tr>"
        for name, points in sorted(series.items())
        if points
    )
    return f"<table><tr><th></th><th>last</th><th>least</th><th>most</th><th>unit</th></tr>{rows}</table>"


def _extreme(choose: Callable[[list[float]], float], points: Points) -> str:
    finite = [value for _, value in points if math.isfinite(value)]
    return f"{choose(finite):.6g}" if finite else "–"


def _table(rows: Mapping[str, str]) -> str:
    body = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows.items()
    )
    return f"<table>{body}</table>"
