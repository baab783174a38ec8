"""Draws the report's line chart as an SVG picture on white, for a page of docs/."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from paceline.report.charts import HEIGHT, WIDTH, Series, line_chart

_LEGEND_PX, _ROW_PX, _NAME_PX = 26, 16, 11
_SWATCH_PX, _GAP_PX = 13, 16
"""Pixels from a swatch to its name, and least pixels from a name to the next swatch."""
_LEFT, _RIGHT = 46.0, 12.0
_EMS = {
    0.28: "'ijl",
    0.32: "IJ ,.",
    0.36: "f/:;\\|-",
    0.41: "()[]t!r",
    0.46: '"',
    0.53: "*_`sz?",
    0.56: "cL",
    0.64: "FkvxyPTYaoeESbdghnpqu$0123456789{}",
    0.7: "KAVBRXZC",
    0.79: "UHNDG&OQ",
    0.86: "w#+<=>^~M",
}
"""Advance widths of DejaVu Sans in em; other characters have 1 em. Other fonts of system-ui are
narrower.
"""
_ADVANCES = {character: width for width, group in _EMS.items() for character in group}
_FONT = "text{font-family:system-ui,sans-serif}"


def picture(series: Sequence[Series], y_label: str) -> str:
    """Returns an SVG file with its legend; series with one name share an entry."""
    drawing = line_chart(series, y_label=y_label).partition("</div>")[2]
    inner = re.sub(r"^<svg[^>]*>|</svg>$", "", drawing)
    entries, rows = _legend(series)
    top = _LEGEND_PX + (rows - 1) * _ROW_PX
    size = f'viewBox="0 0 {WIDTH} {HEIGHT + top}" width="{2 * WIDTH}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_style()}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{entries}'
        f'<g transform="translate(0 {top})">{inner}</g></svg>\n'
    )


def text_width(words: str, size_px: float) -> float:
    """Pixels that a line of text takes at most, in any common sans-serif font."""
    return size_px * sum(_ADVANCES.get(character, 1.0) for character in words)


def _style() -> str:
    """The report's styles, with its light colours written out."""
    text = files("paceline.report").joinpath("style.css").read_text(encoding="utf-8")
    rules = "".join(re.findall(r"^\.(?:tick|grid-line|axis|line|faint|fill)[^\n]*$", text, re.M))
    colours = dict(re.findall(r"--(\w+):(#\w+)", text.partition("@media")[0]))
    return _FONT + re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], rules)


def _legend(series: Sequence[Series]) -> tuple[str, int]:
    """Swatches and names side by side, and the number of rows that they fill."""
    parts, at, row = [], _LEFT, 0
    for name, color in dict.fromkeys((one.name, one.color) for one in series):
        width = _SWATCH_PX + text_width(name, _NAME_PX)
        if at > _LEFT and at + width > WIDTH - _RIGHT:
            at, row = _LEFT, row + 1
        y = 8 + row * _ROW_PX
        swatch = f'<rect class="fill {color}" x="{at:.1f}" y="{y}" width="9" height="9" rx="2"/>'
        words = f'<text class="tick" x="{at + _SWATCH_PX:.1f}" y="{y + 8}">{escape(name)}</text>'
        parts += [swatch, words]
        at += width + _GAP_PX
    return "".join(parts), row + 1
