"""Makes a picture of lines for a page of docs/: the report's chart, by itself and on white."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from paceline.report.charts import HEIGHT, WIDTH, Series, line_chart

_LEGEND_PX, _NAME_PX = 26, 12
_FONT = "text{font-family:system-ui,sans-serif}"


def picture(series: Sequence[Series], y_label: str) -> str:
    """An SVG file with its legend; series of one name have one entry."""
    drawing = line_chart(series, y_label=y_label).partition("</div>")[2]
    inner = re.sub(r"^<svg[^>]*>|</svg>$", "", drawing)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT + _LEGEND_PX}" width="{2 * WIDTH}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_style()}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{_legend(series)}'
        f'<g transform="translate(0 {_LEGEND_PX})">{inner}</g></svg>\n'
    )


def _style() -> str:
    """The report's, its light colours written out."""
    text = files("paceline.report").joinpath("style.css").read_text(encoding="utf-8")
    rules = "".join(re.findall(r"^\.(?:tick|grid-line|axis|line|faint|fill)[^\n]*$", text, re.M))
    colours = dict(re.findall(r"--(\w+):(#\w+)", text.partition("@media")[0]))
    return _FONT + re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], rules)


def _legend(series: Sequence[Series]) -> str:
    parts, at = [], 46.0
    for name, color in dict.fromkeys((one.name, one.color) for one in series):
        parts.append(f'<rect class="fill {color}" x="{at}" y="8" width="9" height="9" rx="2"/>')
        parts.append(f'<text class="tick" x="{at + 13}" y="16">{escape(name)}</text>')
        at += 34 + 0.5 * _NAME_PX * len(name)
    return "".join(parts)
