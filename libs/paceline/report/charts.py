"""Draws inline SVG: lines and columns by RL step, and bars over time.

Colours are CSS classes c0..c7 of the page, so one drawing is readable on light and dark.
"""

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
_TITLED_BARS = 2000
"""Above this number, the bars of a colour are one path without titles."""
T = TypeVar("T")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y) in ascending x. A NaN leaves a gap."""

    name: str
    points: Points
    color: str = ""  # CSS class
    dots: bool = False  # mark each point, for few measurements
    faint: bool = False  # raw values behind a smooth line


@dataclass(frozen=True, slots=True)
class Bar:
    """One interval in a row, in seconds."""

    row: int
    start: float
    end: float
    color: str
    title: str = ""


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
        room = self.width - self.left - _RIGHT
        return self.left + (value - self.x0) / (self.x1 - self.x0) * room

    def y(self, value: float) -> float:
        """Pixels from the top."""
        bottom = self.height - _BOTTOM
        return bottom - (value - self.y0) / (self.y1 - self.y0) * (bottom - _TOP)


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


def running_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """Mean of each measured point and up to `window - 1` measured points before it."""
    known = [(x, y) for x, y in points if math.isfinite(y)]
    parts = [[y for _, y in known[max(0, i - window + 1) : i + 1]] for i in range(len(known))]
    return [(x, sum(part) / len(part)) for (x, _), part in zip(known, parts, strict=True)]


def line_chart(series: Sequence[Series], *, y_label: str, marks: Sequence[float] = ()) -> str:
    """Lines over common axes with a legend above; empty without any point. The vertical axis
    contains 0.
    """
    drawn = [one for one in series if any(math.isfinite(y) for _, y in one.points)]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points if math.isfinite(y)]
    low, high = min(0.0, *ys), max(0.0, *ys)
    pad = (high - low or 1.0) * 0.06
    right = max(xs) if max(xs) > min(xs) else min(xs) + 1
    frame = Frame(min(xs), right, low - pad if low else 0.0, high + pad)
    bottom = frame.height - _BOTTOM
    dashes = [
        f'<path class="mark" d="M{frame.x(x):.1f} {_TOP}V{bottom}"/>' for x in marks[:_POINTS_DRAWN]
    ]
    parts = [*_axes(frame), *dashes, *(_line(one, frame) for one in drawn), *_hover(drawn, frame)]
    return _legend([one for one in drawn if not one.faint]) + _svg(parts, y_label, WIDTH, HEIGHT)


def stacked_columns(series: Sequence[Series], *, y_label: str) -> str:
    """One column per x, stacked from the series from bottom to top; empty if all are 0.

    All series have the same x. A NaN counts as 0.
    """
    xs = _thinned([x for x, _ in series[0].points]) if series else ()
    heights = [[y if y > 0 else 0.0 for _, y in _thinned(one.points)] for one in series]
    top = max(map(sum, zip(*heights, strict=True)), default=0.0)
    if not top:
        return ""
    gap = xs[1] - xs[0] if len(xs) > 1 else 1.0
    frame = Frame(xs[0] - gap / 2, xs[-1] + gap / 2, 0.0, top * 1.03)
    width = max(0.6, frame.x(frame.x0 + gap) - frame.left - 0.6)
    bars, bases = [], [0.0] * len(xs)
    for one, values in zip(series, heights, strict=True):
        path = "".join(
            f"M{frame.x(x) - width / 2:.1f} {frame.y(base + value):.1f}h{width:.1f}"
            f"V{frame.y(base):.1f}h{-width:.1f}z"
            for x, base, value in zip(xs, bases, values, strict=True)
        )
        bars.append(f'<path class="fill {one.color}" d="{path}"/>')
        bases = [base + value for base, value in zip(bases, values, strict=True)]
    parts = [*_axes(frame), *bars, *_hover(series, frame)]
    return _legend(series) + _svg(parts, y_label, WIDTH, HEIGHT)


def timeline(
    rows: Sequence[str], bars: Iterable[Bar], start: float, end: float, label: str, left: int = 62
) -> str:
    """Bars in labelled rows over a time axis, from `start` to `end` in seconds.

    `left`: pixels for the labels of the rows.
    """
    height = len(rows) * _ROW + 34
    frame = Frame(0.0, max(end - start, 1e-6), 0.0, 1.0, _WIDE, height, left)
    parts = _time_axis(frame, len(rows) * _ROW + 4)
    parts += [_text(8, 4 + i * _ROW + 14, row) for i, row in enumerate(rows)]
    shown = [bar for bar in bars if bar.end > start and bar.start < end]
    paths: dict[tuple[str, str], list[str]] = {}
    for bar in shown:
        x0, x1 = frame.x(max(bar.start, start) - start), frame.x(min(bar.end, end) - start)
        width = max(x1 - x0, 0.5)
        title = bar.title if len(shown) <= _TITLED_BARS else ""
        paths.setdefault((bar.color, title), []).append(
            f"M{x0:.1f} {6 + bar.row * _ROW}h{width:.1f}v{_ROW - 4}h{-width:.1f}z"
        )
    parts += [
        f'<path class="fill {color}" d="{"".join(path)}"><title>{escape(title)}</title></path>'
        for (color, title), path in paths.items()
    ]
    return _svg(parts, label, _WIDE, height, "chart wide")


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
    """A number with three significant digits below 1000, and with separators above."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _thinned(points: Sequence[T]) -> Sequence[T]:
    """Every point, or every n-th of very many points."""
    return points[:: max(1, len(points) // _POINTS_DRAWN)]


def _line(series: Series, frame: Frame) -> str:
    """A path, and a dot for each point of a series with dots, gaps or few points."""
    measured = sum(math.isfinite(y) for _, y in series.points)
    few = measured < max(_LEAST_OF_A_LINE, len(series.points))
    marked = series.dots or (few and not series.faint)
    points = [(x, y, frame.x(x), frame.y(y)) for x, y in _thinned(series.points)]
    path, gap = "", True
    # A line through two measurements would suggest values between them.
    for _, y, left, top in points if measured >= _LEAST_OF_A_LINE else ():
        if math.isfinite(y):
            path += f"{'M' if gap else 'L'}{left:.1f} {top:.1f}"
        gap = not math.isfinite(y)
    dots = [
        f'<circle class="dot {series.color}" cx="{left:.1f}" cy="{top:.1f}" r="3">'
        f"<title>{escape(series.name)} at {number(x)}: {number(y)}</title></circle>"
        for x, y, left, top in points
        if marked and math.isfinite(y)
    ]
    faint = " faint" if series.faint else ""
    return f'<path class="line {series.color}{faint}" d="{path}"/>' + "".join(dots)


def _hover(series: Sequence[Series], frame: Frame) -> list[str]:
    """An invisible column around each x; its title lists the measured values."""
    values: dict[float, list[str]] = {}
    for one in series:
        for x, y in _thinned(one.points):
            if math.isfinite(y):
                values.setdefault(x, [f"RL step {number(x)}"]).append(f"{one.name}: {number(y)}")
    xs = sorted(values)
    edges = [frame.x0, *((a + b) / 2 for a, b in pairwise(xs)), frame.x1]
    height = frame.height - _TOP - _BOTTOM
    return [
        f'<rect class="hover" fill="none" pointer-events="all" x="{frame.x(left):.1f}" y="{_TOP}" '
        f'width="{max(frame.x(right) - frame.x(left), 0.5):.1f}" height="{height}">'
        f"<title>{escape(chr(10).join(values[x]))}</title></rect>"
        for x, (left, right) in zip(xs, pairwise(edges), strict=True)
    ]


def _axes(frame: Frame) -> list[str]:
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


def _time_axis(frame: Frame, bottom: int) -> list[str]:
    parts = [f'<path class="axis" d="M{frame.left} {bottom}H{frame.width - _RIGHT}"/>']
    for value in ticks(frame.x0, frame.x1, 10):
        x = frame.x(value)
        words = f"{value * 1e3:.4g} ms" if frame.x1 < 1.5 else f"{value:.4g} s"
        parts.append(f'<path class="grid-line" d="M{x:.1f} 4V{bottom}"/>')
        parts.append(_text(x, bottom + 15, words, "middle"))
    return parts


def _legend(series: Iterable[Series]) -> str:
    """Names beside their colours."""
    items = "".join(
        f'<span><i class="key {one.color}"></i>{escape(one.name)}</span>' for one in series
    )
    return f'<div class="legend">{items}</div>'


def _svg(parts: Iterable[str], label: str, width: int, height: int, kind: str = "chart") -> str:
    """A drawing with a name for screen readers."""
    head = f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img"'
    return f'{head} aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return (
        f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
    )
