"""Draws durations as inline SVG: timelines of slots, waterfalls of spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from paceline.report.charts import RIGHT, Frame, duration, svg, text, ticks

_ROW = 22


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
    width, left, foot = 1140, 62, 30
    height = len(rows) * _ROW + foot + 4
    frame = Frame(0.0, max(end - start, 1e-6), 0.0, 1.0, width, height, left)
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
    return svg(parts, label, width, height, wide=True, scale=scale)


def waterfall(labels: Sequence[str], bars: Sequence[Bar], *, label: str) -> str:
    """One bar per row under a common time axis. Labels are on the left; the duration is right of
    the bar, or left of it near the edge.
    """
    width, left = 1140, 330
    start = min(bar.start for bar in bars)
    end = max(bar.end for bar in bars)
    height = len(labels) * _ROW + 34
    frame = Frame(0.0, max(end - start, 1e-6), 0.0, 1.0, width, height, left)
    parts = _time_axis(frame, len(labels) * _ROW + 4)
    for i, words in enumerate(labels):
        parts.append(text(8, 4 + i * _ROW + 14, words))
    for bar in bars:
        x0, x1 = frame.x(bar.start - start), frame.x(bar.end - start)
        y, w = 6 + bar.row * _ROW, max(x1 - x0, 1.0)
        at, anchor = (x1 + 5, "start") if x1 < width - 80 else (x0 - 5, "end")
        parts.append(
            _rect(bar, x0, y, w, _ROW - 6) + text(at, y + 12, duration(bar.end - bar.start), anchor)
        )

    return svg(parts, label, width, height, wide=True)


def _time_axis(frame: Frame, bottom: int) -> list[str]:
    right = frame.width - RIGHT
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
