"""Draws inline SVG: lines and columns by RL step, timelines of slots, waterfalls of spans.

Colours are CSS classes c0..c7 of the page, so one drawing is readable on light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TypeVar

WIDTH, HEIGHT = 560, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34
_POINTS_DRAWN = 600
_LEAST_OF_A_LINE = 3
"""Fewer measurements than this are drawn as dots alone."""
_WIDE, _ROW = 1140, 22
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y) in ascending x. A NaN leaves a gap."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str  # CSS class
    dots: bool = False  # mark each point, for few measurements
    faint: bool = False  # raw values behind a smooth line


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps data to pixels of the plot area."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (
            self.width - self.left - _RIGHT
        )

    def y(self, value: float) -> float:
        """Pixels from the top."""
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
    """Mean of each measured point and up to `window - 1` measured points before it."""
    known = [(x, y) for x, y in points if math.isfinite(y)]
    return [
        (x, sum(part) / len(part))
        for i, (x, _) in enumerate(known)
        if (part := [y for _, y in known[max(0, i - window + 1) : i + 1]])
    ]


def line_chart(
    series: Sequence[Series],
    *,
    y_label: str,
    y_min: float | None = None,
    y_max: float | None = None,
    marks: Sequence[float] = (),
) -> str:
    """Lines over common axes with a legend above; a sentence if there is no point."""
    drawn = [s for s in series if any(math.isfinite(y) for _, y in s.points)]
    if not drawn:
        return empty("nothing was measured")
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points if math.isfinite(y)]
    low = min(ys) if y_min is None else y_min
    high = max(ys) if y_max is None else y_max
    pad = (high - low or abs(high) or 1.0) * 0.06
    frame = Frame(
        min(xs),
        max(xs) if max(xs) > min(xs) else min(xs) + 1,
        low - pad if y_min is None else y_min,
        high + pad if y_max is None else y_max,
    )
    top, bottom = _TOP, frame.height - _BOTTOM
    dashes = [
        f'<path class="mark" d="M{frame.x(x):.1f} {top}V{bottom}"/>' for x in marks[:_POINTS_DRAWN]
    ]
    parts = [*_axes(frame), *dashes, *(_line(s, frame) for s in drawn), *_hover(drawn, frame)]
    named = [(s.name, s.color) for s in drawn if not s.faint]
    return legend(named) + svg(parts, y_label, frame.width, frame.height)


def stacked_columns(
    names: Sequence[str],
    columns: Sequence[tuple[float, Sequence[float]]],
    *,
    colors: Sequence[str],
    y_label: str,
) -> str:
    """One column per x, split into len(names) parts, from bottom to top."""
    if not columns:
        return empty("nothing was measured")
    columns = _drawn(columns)
    gap = columns[1][0] - columns[0][0] if len(columns) > 1 else 1.0
    top = max(sum(parts) for _, parts in columns) or 1.0
    frame = Frame(columns[0][0] - gap / 2, columns[-1][0] + gap / 2, 0.0, top * 1.03)
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
    series = [
        Series(name, [(x, parts[i]) for x, parts in columns], "") for i, name in enumerate(names)
    ]
    shown = [*_axes(frame), *bars, *_hover(series, frame)]
    return legend(list(zip(names, colors, strict=True))) + svg(shown, y_label, WIDTH, HEIGHT)


@dataclass(frozen=True, slots=True)
class Bar:
    """One interval of a timeline or waterfall, in seconds."""

    row: int
    start: float
    end: float
    color: str
    title: str = ""
    kind: str = ""  # meaning of the bar's colour


def timeline(
    rows: Sequence[str], bars: Iterable[Bar], start: float, end: float, *, titles: bool, label: str
) -> str:
    """One row per slot; time in seconds from `start`.

    Without titles, all bars of a colour are one path, for small files. The page's script finds the
    bar under the pointer by the scale: left edge, seconds per pixel and row height.
    """
    left, height = 62, len(rows) * _ROW + 34
    frame = Frame(0.0, max(end - start, 1e-6), 0.0, 1.0, _WIDE, height, left)
    parts = _time_axis(frame, len(rows) * _ROW + 4)
    parts += [text(left - 8, 4 + i * _ROW + 14, row, "end") for i, row in enumerate(rows)]
    paths: dict[tuple[str, str], list[str]] = {}
    for bar in bars:
        if bar.end <= start or bar.start >= end:
            continue
        x0, x1 = frame.x(max(bar.start, start) - start), frame.x(min(bar.end, end) - start)
        y, w = 6 + bar.row * _ROW, max(x1 - x0, 0.25)
        if titles:
            parts.append(_rect(bar, x0, y, w, _ROW - 4))
        else:
            paths.setdefault((bar.color, bar.kind), []).append(
                f"M{x0:.1f} {y}h{w:.1f}v{_ROW - 4}h{-w:.1f}z"
            )

    parts += [
        f'<path class="fill {color}" d="{"".join(path)}"><title>{escape(kind)}</title></path>'
        for (color, kind), path in paths.items()
    ]
    scale = "" if titles else f"{left} {frame.x1 / (frame.x(frame.x1) - left):.6g} {_ROW}"
    return svg(parts, label, _WIDE, height, wide=True, scale=scale)


def waterfall(labels: Sequence[str], bars: Sequence[Bar], *, label: str) -> str:
    """One bar per row under a common time axis. Labels are on the left; the duration is right of
    the bar, or left of it near the edge.
    """
    left = 330
    start = min(bar.start for bar in bars)
    end = max(bar.end for bar in bars)
    height = len(labels) * _ROW + 34
    frame = Frame(0.0, max(end - start, 1e-6), 0.0, 1.0, _WIDE, height, left)
    parts = _time_axis(frame, len(labels) * _ROW + 4)
    for i, words in enumerate(labels):
        parts.append(text(8, 4 + i * _ROW + 14, words))
    for bar in bars:
        x0, x1 = frame.x(bar.start - start), frame.x(bar.end - start)
        y, w = 6 + bar.row * _ROW, max(x1 - x0, 1.0)
        at, anchor = (x1 + 5, "start") if x1 < _WIDE - 80 else (x0 - 5, "end")
        parts.append(
            _rect(bar, x0, y, w, _ROW - 6) + text(at, y + 12, duration(bar.end - bar.start), anchor)
        )

    return svg(parts, label, _WIDE, height, wide=True)


def _time_axis(frame: Frame, bottom: int) -> list[str]:
    right = frame.width - _RIGHT
    parts = [f'<path class="axis" d="M{frame.left} {bottom}H{right}"/>']
    for value in ticks(frame.x0, frame.x1, 10):
        x = frame.x(value)
        parts.append(f'<path class="grid-line" d="M{x:.1f} 4V{bottom}"/>')
        parts.append(text(x, bottom + 15, _seconds(value, frame.x1), "middle"))
    return parts


def _seconds(value: float, longest: float) -> str:
    return f"{value * 1e3:.4g} ms" if longest < 1.5 else f"{value:.4g} s"


def _rect(bar: Bar, x: float, y: float, width: float, height: float) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return (
        f'<rect class="fill {bar.color}" {size} rx="1.5"><title>{escape(bar.title)}</title></rect>'
    )


def duration(seconds: float) -> str:
    """Seconds in a suitable unit: 0.42 ms, 18 ms, 1.25 s, 3 min 5 s."""
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
    """A number for an axis or a cell: at most three significant digits below 1000, with separators
    above.
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _drawn(points: Sequence[T]) -> Sequence[T]:
    """Every point, or every n-th of very many points."""
    return points[:: max(1, len(points) // _POINTS_DRAWN)]


def _line(series: Series, frame: Frame) -> str:
    points = _drawn(series.points)
    path, pen = [], "M"
    measured = sum(math.isfinite(y) for _, y in series.points)
    # A line through two measurements would suggest values between them.
    for x, y in points if measured >= _LEAST_OF_A_LINE else ():
        if not math.isfinite(y):
            pen = "M"
            continue
        path.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
        pen = "L"

    shown = (
        f'<path class="line {series.color}{" faint" if series.faint else ""}" d="{"".join(path)}"/>'
    )
    every = series.dots or measured < _LEAST_OF_A_LINE
    return shown + "".join(
        f'<circle class="dot {series.color}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3">'
        f"<title>{escape(series.name)} at {number(x)}: {number(y)}</title></circle>"
        for x, y in (points if every else _alone(points))
        if math.isfinite(y)
    )


def _alone(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Measurements between two gaps, which a line does not show."""
    heights = [math.nan, *(y for _, y in points), math.nan]
    return [
        point
        for point, before, after in zip(points, heights, heights[2:], strict=False)
        if not (math.isfinite(before) or math.isfinite(after))
    ]


def _hover(series: Sequence[Series], frame: Frame) -> list[str]:
    """An invisible column around each x; its title lists the measured values."""
    told: dict[float, list[str]] = {}
    for one in series:
        for x, y in _drawn(one.points):
            if math.isfinite(y):
                told.setdefault(x, []).append(f"{one.name}: {number(y)}")
    xs = sorted(told)
    edges = [frame.x0, *((a + b) / 2 for a, b in pairwise(xs)), frame.x1]
    height = frame.height - _TOP - _BOTTOM

    def lines(x: float) -> str:
        return "\n".join([f"RL step {number(x)}", *told[x]])

    return [
        f'<rect class="hover" fill="none" pointer-events="all" x="{frame.x(left):.1f}" y="{_TOP}" '
        f'width="{max(frame.x(right) - frame.x(left), 0.5):.1f}" height="{height}">'
        f"<title>{escape(lines(x))}</title></rect>"
        for x, (left, right) in zip(xs, pairwise(edges), strict=True)
    ]


def _axes(frame: Frame) -> list[str]:
    right, bottom = frame.width - _RIGHT, frame.height - _BOTTOM
    parts = []
    for value in ticks(frame.y0, frame.y1):
        y = frame.y(value)
        parts.append(f'<path class="grid-line" d="M{frame.left} {y:.1f}H{right}"/>')
        parts.append(text(frame.left - 6, y + 3.5, number(value), "end"))
    for value in ticks(frame.x0, frame.x1, 8):
        if value == int(value):
            parts.append(text(frame.x(value), bottom + 14, number(value), "middle"))
    parts.append(f'<path class="axis" d="M{frame.left} {bottom}H{right}"/>')
    parts.append(text(right, frame.height - 4, "RL step", "end"))
    return parts


def empty(words: str) -> str:
    """Placeholder for a drawing without data."""
    return f'<p class="empty">{words}</p>'


def legend(named: Sequence[tuple[str, str]]) -> str:
    """Names beside their colours."""
    items = "".join(
        f'<span><i class="key {color}"></i>{escape(name)}</span>' for name, color in named
    )
    return f'<div class="legend">{items}</div>'


def svg(
    parts: Iterable[str],
    label: str,
    width: int,
    height: int,
    *,
    wide: bool = False,
    scale: str = "",
) -> str:
    """A drawing with a name for screen readers. `scale`: meaning of its pixels, for a script."""
    kind = "chart wide" if wide else "chart"
    view = f"0 0 {width} {height}"
    more = f' data-scale="{scale}"' if scale else ""
    head = f'<svg class="{kind}" viewBox="{view}" role="img" aria-label="{escape(label)}"{more}>'
    return head + "".join(parts) + "</svg>"


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Text at a position."""
    return (
        f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
    )
