"""Explains the duration of a step or a trace of a run: `paceline why`."""

from __future__ import annotations

import json
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli import access, run_files
from paceline.config import ServiceConfig, load_config
from paceline.report import critical_path, why

LEAST_SHARE = 0.005
"""Minimum share of the trace; smaller parts and pieces are combined."""
LONGEST_PIECES = 24


def show_why(run: str, which: str, console: Console, *, as_json: bool) -> None:
    """Prints the time on the critical path, as tables or as one JSON object.

    Raises NotFound for an absent run, step or trace, InvalidInput for an invalid name.
    """
    config = load_config(ServiceConfig, "local", [access.run_directory(run) / "config.toml"])
    found = why.explain(run_files.files_of(config).spans, which)
    if as_json:
        console.print_json(json.dumps(found.as_json()))
        return
    console.print(f"[bold]{escape(found.culprit)}[/]", highlight=False)
    console.print()
    console.print(_shares(found))
    console.print(_path(found))


def _shares(found: why.Explanation) -> Table:
    """A row for each edge, followed by a row for each kind of span in it."""
    beside = f"median of {found.peers}" if found.peers else "median"
    table = Table(
        title=f"critical path of {found.title}, {found.seconds:.2f} s: share by edge",
        title_justify="left",
    )
    table.add_column("edge, and its spans")
    for name in ("s", "share", beside, "more"):
        table.add_column(name, justify="right")
    parts = {
        edge: list(each)
        for edge, each in groupby(
            sorted(found.parts, key=lambda one: (one.edge, -one.seconds)), lambda one: one.edge
        )
    }
    large = [edge for edge in found.edges if edge.share >= LEAST_SHARE]
    for edge in large:
        table.add_row(*_cells(edge, f"[bold]{escape(edge.edge)}[/]"))
        for part in parts[edge.edge]:
            if part.share >= LEAST_SHARE:
                table.add_row(*_cells(part, f"  {escape(part.name)}"))
    if rest := len(found.edges) - len(large):
        table.add_row(f"[dim]{rest} more edges below {LEAST_SHARE:.1%} each[/]")
    whole = why.PathShare("", "", found.seconds, 1.0, found.median_s)
    table.add_section()
    table.add_row(*_cells(whole, "whole"))
    return table


def _cells(one: why.PathShare, label: str) -> list[str]:
    cells = [label, f"{one.seconds:.3f}", f"{one.share:.1%}"]
    if one.median_s is None:
        return [*cells, "", ""]
    return [*cells, f"{one.median_s:.3f}", f"{one.more_s:+.3f}"]


def _path(found: why.Explanation) -> Table:
    """The longest pieces in time order."""
    least = LEAST_SHARE * found.seconds
    shown = sorted(found.path, key=lambda one: -one.seconds)[:LONGEST_PIECES]
    kept = {id(one) for one in shown if one.seconds >= least}
    left = [one for one in found.path if id(one) not in kept]
    table = Table(title="from begin to end", title_justify="left")
    for name in ("at s", "s"):
        table.add_column(name, justify="right")
    for name in ("service", "span", "about"):
        table.add_column(name)
    start = found.path[0].start_ns
    for piece in found.path:
        if id(piece) in kept:
            table.add_row(*_piece(piece, start))
    if left:
        seconds = sum(one.seconds for one in left)
        table.add_row("", f"{seconds:.3f}", "", f"[dim]{len(left)} shorter pieces[/]", "")
    return table


def _piece(piece: critical_path.PathPiece, start_ns: int) -> list[str]:
    told = ", ".join(f"{key} {value}" for key, value in why.about(piece).items())
    at_s = (piece.start_ns - start_ns) / 1e9
    return [
        f"{at_s:.3f}",
        f"{piece.seconds:.3f}",
        piece.span.service,
        piece.span.name,
        escape(told),
    ]
