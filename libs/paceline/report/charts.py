"""Draws charts as inline SVG: lines, stacked columns, slot timelines, waterfalls.

Colours are CSS classes c0..c7 of the page, so that one drawing is readable on light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34
_POINTS_DRAWN = 600
_ROW = 22


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y) in ascending x; a NaN leaves a gap."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str  # CSS class
    dots: bool = False  # mark each point: for few measurements
    faint: bool = False  # raw values behind a smooth line


@dataclass(frozen=True, slots=True)
class Bar:
    """One interval of a timeline or waterfall, in seconds."""

    row: int
    start: float
    end: float
    color: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data to pixels of the plot area."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (
            self.width - self.left - _RIGHT
        )

    def y(self, value: float) -> float:
        return (
            self.height
            - _BOTTOM
            - (value - self.y0) / (self.y1 - self.y0) * (self.height - _TOP - _BOTTOM)
        )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that divide [low, high] into about `count` parts: multiples of 1, 2 or 5 times a
    power of ten.
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def running_mean(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Mean of each point and up to `window - 1` points before it."""
    smooth = []
    for i, (x, _) in enumerate(points):
        part = [y for _, y in points[max(0, i - window + 1) : i + 1]]
        smooth.append((x, sum(part) / len(part)))
    return smooth


def line_chart(
    series: Sequence[Series],
    *,
    y_label: str,
    y_min: float | None = None,
    y_max: float | None = None,
    marks: Sequence[float] = (),
) -> str:
    """Lines over common axes with a legend above; a sentence when there is no point at all."""
    drawn = [s for s in series if any(math.isfinite(y) for _, y in s.points)]
    if not drawn:
        return empty("nothing was measured")
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points if math.isfinite(y)]
    low = min(ys) if y_min is None else y_min
    high = max(ys) if y_max is None else y_max
    pad = (high - low or abs(high) or 1.0) * 0.06
    frame = _Frame(
        min(xs),
        max(xs) if max(xs) > min(xs) else min(xs) + 1,
        low - pad if y_min is None else y_min,
        high + pad if y_max is None else y_max,
    )
    top, bottom = _TOP, frame.height - _BOTTOM
    dashes = [
        f'<path class="mark" d="M{frame.x(x):.1f} {top}V{bottom}"/>' for x in marks[:_POINTS_DRAWN]
    ]
    parts = [*_axes(frame), *dashes, *(_line(s, frame) for s in drawn)]
    named = [(s.name, s.color) for s in drawn if not s.faint]
    return legend(named) + _svg(parts, y_label, frame.width, frame.height)


def stacked_columns(
    names: Sequence[str],
    columns: Sequence[tuple[float, Sequence[float]]],
    *,
    colors: Sequence[str],
    y_label: str,
) -> str:
    """One column per x, split into len(names) parts from the bottom up."""
    if not columns:
        return empty("nothing was measured")
    columns = columns[:: max(1, len(columns) // _POINTS_DRAWN)]
    gap = columns[1][0] - columns[0][0] if len(columns) > 1 else 1.0
    top = max(sum(parts) for _, parts in columns) or 1.0
    frame = _Frame(columns[0][0] - gap / 2, columns[-1][0] + gap / 2, 0.0, top * 1.03)
    paths = ["" for _ in names]
    width = max(0.6, frame.x(frame.x0 + gap) - frame.left - 0.6)
    for x, parts in columns:
        base = 0.0
        for i, part in enumerate(parts):
            y = frame.y(base + part)
            paths[i] += (
                f"M{frame.x(x) - width / 2:.1f} "
                f"{y:.1f}h{width:.1f}V{frame.y(base):.1f}h{-width:.1f}z"
            )
            base += part

    bars = [
        f'<path class="fill {color}" d="{d}"/>' for color, d in zip(colors, paths, strict=True) if d
    ]
    shown = [*_axes(frame), *bars]
    return legend(list(zip(names, colors, strict=True))) + _svg(shown, y_label, WIDTH, HEIGHT)


def timeline(
    rows: Sequence[str], bars: Iterable[Bar], start: float, end: float, *, titles: bool, label: str
) -> str:
    """A row per slot; time in seconds from `start`.

    Without titles all bars of a colour are one path: small files.
    """
    width, left, foot = 1140, 62, 30
    height = len(rows) * _ROW + foot + 4
    frame = _Frame(0.0, max(end - start, 1e-6), 0.0, 1.0, width, height, left)
    parts = _time_axis(frame, len(rows) * _ROW + 4)
    parts += [_text(left - 8, 4 + i * _ROW + 14, row, "end") for i, row in enumerate(rows)]
    paths: dict[str, list[str]] = {}
    for bar in bars:
        if bar.end <= start or bar.start >= end:
            continue
        x0, x1 = frame.x(max(bar.start, start) - start), frame.x(min(bar.end, end) - start)
        y, w = 6 + bar.row * _ROW, max(x1 - x0, 0.25)
        if titles:
            parts.append(_rect(bar, x0, y, w, _ROW - 4))
        else:
            paths.setdefault(bar.color, []).append(f"M{x0:.1f} {y}h{w:.1f}v{_ROW - 4}h{-w:.1f}z")

    parts += [f'<path class="fill {color}" d="{"".join(path)}"/>' for color, path in paths.items()]
    return _svg(parts, label, width, height, wide=True)


def waterfall(labels: Sequence[str], bars: Sequence[Bar], *, label: str) -> str:
    """One bar per row under a common time axis; labels left, duration right of the bar or left of
    it near the edge.
    """
    width, left = 1140, 330
    start = min(bar.start for bar in bars)
    end = max(bar.end for bar in bars)
    height = len(labels) * _ROW + 34
    frame = _Frame(0.0, max(end - start, 1e-6), 0.0, 1.0, width, height, left)
    parts = _time_axis(frame, len(labels) * _ROW + 4)
    for i, text in enumerate(labels):
        parts.append(_text(8, 4 + i * _ROW + 14, text))
    for bar in bars:
        x0, x1 = frame.x(bar.start - start), frame.x(bar.end - start)
        y, w = 6 + bar.row * _ROW, max(x1 - x0, 1.0)
        at, anchor = (x1 + 5, "start") if x1 < width - 80 else (x0 - 5, "end")
        parts.append(
            _rect(bar, x0, y, w, _ROW - 6)
            + _text(at, y + 12, duration(bar.end - bar.start), anchor)
        )

    return _svg(parts, label, width, height, wide=True)


def duration(seconds: float) -> str:
    """Seconds with the unit that fits: 0.42 ms, 18 ms, 1.25 s, 3 min 5 s."""
    if not math.isfinite(seconds):
        return "–"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        milliseconds = seconds * 1e3
        return f"{milliseconds:.2f} ms" if milliseconds < 9.995 else f"{milliseconds:.0f} ms"
    if seconds < 119.5:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def number(value: float) -> str:
    """A number for an axis or a cell: at most three significant digits below 1000, separators
    above.
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _line(series: Series, frame: _Frame) -> str:
    stride = max(1, len(series.points) // _POINTS_DRAWN)
    path, pen = [], "M"
    for x, y in series.points[::stride]:
        if not math.isfinite(y):
            pen = "M"
            continue
        path.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
        pen = "L"

    shown = (
        f'<path class="line {series.color}{" faint" if series.faint else ""}" d="{"".join(path)}"/>'
    )
    if series.dots:
        shown += "".join(
            f'<circle class="dot {series.color}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3">'
            f"<title>{escape(series.name)} at {number(x)}: {number(y)}</title></circle>"
            for x, y in series.points[::stride]
            if math.isfinite(y)
        )

    return shown


def _axes(frame: _Frame) -> list[str]:
    right, bottom = frame.width - _RIGHT, frame.height - _BOTTOM
    parts = []
    for value in ticks(frame.y0, frame.y1):
        y = frame.y(value)
        parts.append(f'<path class="grid-line" d="M{frame.left} {y:.1f}H{right}"/>')
        parts.append(_text(frame.left - 6, y + 3.5, number(value), "end"))
    for value in ticks(frame.x0, frame.x1, 8):
        if value == int(value):
            parts.append(_text(frame.x(value), bottom + 14, number(value), "middle"))
    parts.append(f'<path class="axis" d="M{frame.left} {bottom}H{right}"/>')
    parts.append(_text(right, frame.height - 4, "RL step", "end"))
    return parts


def _time_axis(frame: _Frame, bottom: int) -> list[str]:
    right = frame.width - _RIGHT
    parts = [f'<path class="axis" d="M{frame.left} {bottom}H{right}"/>']
    for value in ticks(frame.x0, frame.x1, 10):
        x = frame.x(value)
        parts.append(f'<path class="grid-line" d="M{x:.1f} 4V{bottom}"/>')
        parts.append(_text(x, bottom + 15, _seconds(value, frame.x1), "middle"))
    return parts


def _seconds(value: float, longest: float) -> str:
    return f"{value * 1e3:.4g} ms" if longest < 1.5 else f"{value:.4g} s"


def empty(words: str) -> str:
    """What stands in place of a drawing that has nothing to draw."""
    return f'<p class="empty">{words}</p>'


def legend(named: Sequence[tuple[str, str]]) -> str:
    """Names beside their colours."""
    items = "".join(
        f'<span><i class="key {color}"></i>{escape(name)}</span>' for name, color in named
    )
    return f'<div class="legend">{items}</div>'


def _svg(parts: Iterable[str], label: str, width: int, height: int, *, wide: bool = False) -> str:
    kind = "chart wide" if wide else "chart"
    view = f"0 0 {width} {height}"
    head = f'<svg class="{kind}" viewBox="{view}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _rect(bar: Bar, x: float, y: float, width: float, height: float) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return (
        f'<rect class="fill {bar.color}" {size} rx="1.5"><title>{escape(bar.title)}</title></rect>'
    )
