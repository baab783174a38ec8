"""Draws the decisions of the drafter's gate, with their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from paceline.report.charts import empty
from paceline.report.journal import Ruling

_SHOWN = 20
_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "accepted length": lambda of: _compared(of, "accept_length"),
    "speed-up": lambda of: _compared(of, "speedup"),
    "noise": lambda of: _two(of.get("noise")),
    "positions": lambda of: f"{int(of.get('positions', 0)):,}",
    "its steps": lambda of: f"{int(of.get('optimizer_steps', 0)):,}",
}


def gate_table(rulings: Sequence[Ruling]) -> str:
    """The newest decisions, newest first: candidate against serving drafter."""
    if not rulings:
        return empty("the gate has not judged any drafter")
    head = "".join(f"<th>{name}</th>" for name in ("step", "decision", "drafter", "kind"))
    head += "".join(f'<th class="n">{name}</th>' for name in _COLUMNS)
    rows = "".join(_row(one) for one in list(rulings)[-_SHOWN:][::-1])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(one: Ruling) -> str:
    words = (one.step + 1, one.decision, f"d{one.drafter_version}", one.figures.get("kind", ""))
    cells = "".join(f"<td>{escape(str(word))}</td>" for word in words)
    cells += "".join(f'<td class="n">{show(one.figures)}</td>' for show in _COLUMNS.values())
    return f"<tr>{cells}</tr>"


def _compared(of: Mapping[str, Any], name: str) -> str:
    """The candidate's figure against the serving drafter's."""
    return f"{_two(of.get(f'candidate_{name}'))} : {_two(of.get(f'serving_{name}'))}"


def _two(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) and value else "–"
