"""Draws inline SVG (chart.html): lines and columns by RL step, and bars over time.

Colours are CSS classes c0..c7 of the page, so one drawing is readable on light and dark.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

WIDTH, HEIGHT = 560, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34
_POINTS_DRAWN = 600
_LEAST_OF_A_LINE = 3
"""Fewer measurements than this are drawn as dots alone."""
_WIDE, _ROW, _ROW_LABEL = 1140, 22, 62
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
    top: int = _TOP

    @property
    def right(self) -> int:
        """Right end of the plot area, pixels."""
        return self.width - _RIGHT

    @property
    def bottom(self) -> int:
        """Lower end of the plot area, pixels."""
        return self.height - _BOTTOM

    def x(self, value: float) -> float:
        """Pixels from the left."""
        room = self.right - self.left
        return self.left + (value - self.x0) / (self.x1 - self.x0) * room

    def y(self, value: float) -> float:
        """Pixels from the top."""
        room = self.bottom - self.top
        return self.bottom - (value - self.y0) / (self.y1 - self.y0) * room


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
    dashes = [
        f'<path class="mark" d="M{frame.x(x):.1f} {_TOP}V{frame.bottom}"/>'
        for x in marks[:_POINTS_DRAWN]
    ]
    lines = [*dashes, *(_line(one, frame) for one in drawn)]
    legend = [one for one in drawn if not one.faint]
    return str(_template().by_step(frame, y_label, legend, lines, _hover(drawn, frame)))


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
    return str(_template().by_step(frame, y_label, series, bars, _hover(series, frame)))


def timeline(rows: Sequence[str], bars: Iterable[Bar], start: float, end: float, label: str) -> str:
    """Bars in labelled rows over a time axis, from `start` to `end` in seconds."""
    height = len(rows) * _ROW + 34
    frame = Frame(0.0, max(end - start, 1e-6), 0.0, 1.0, _WIDE, height, _ROW_LABEL)
    shown = [bar for bar in bars if bar.end > start and bar.start < end]
    paths: dict[tuple[str, str], list[str]] = {}
    for bar in shown:
        x0, x1 = frame.x(max(bar.start, start) - start), frame.x(min(bar.end, end) - start)
        width = max(x1 - x0, 0.5)
        title = bar.title if len(shown) <= _TITLED_BARS else ""
        paths.setdefault((bar.color, title), []).append(
            f"M{x0:.1f} {6 + bar.row * _ROW}h{width:.1f}v{_ROW - 4}h{-width:.1f}z"
        )
    named = [(4 + i * _ROW + 14, row) for i, row in enumerate(rows)]
    return str(_template().over_time(frame, label, len(rows) * _ROW + 4, named, paths))


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


MARKUP = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
"""The templates of this folder."""
MARKUP.filters.update(duration=duration, number=number, pixels="{:.1f}".format)
MARKUP.globals.update(ticks=ticks)


def _template() -> Any:
    """The macros of chart.html."""
    return MARKUP.get_template("chart.html").module


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


def _hover(series: Sequence[Series], frame: Frame) -> list[tuple[float, float, str]]:
    """Left end, width and title of a column around each x, which lists the measured values."""
    values: dict[float, list[str]] = {}
    for one in series:
        for x, y in _thinned(one.points):
            if math.isfinite(y):
                values.setdefault(x, [f"RL step {number(x)}"]).append(f"{one.name}: {number(y)}")
    xs = sorted(values)
    edges = [frame.x0, *((a + b) / 2 for a, b in pairwise(xs)), frame.x1]
    return [
        (frame.x(left), max(frame.x(right) - frame.x(left), 0.5), "\n".join(values[x]))
        for x, (left, right) in zip(xs, pairwise(edges), strict=True)
    ]
