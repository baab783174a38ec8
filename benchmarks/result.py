"""Compares paired measurements, prints a bench's results as tables and writes them as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.errors import InvalidInput
from paceline.report.machine import machine_in_words, versions

Row = Mapping[str, str | float | int | None]


RESAMPLES = 4000
RESOLVED_WITHIN = 0.05


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the pairs' ratios and its bootstrap 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def resolved(self) -> bool:
        """Whether the interval is within 5 % of the ratio."""
        return self.low >= self.value * (1 - RESOLVED_WITHIN) and self.high <= self.value * (
            1 + RESOLVED_WITHIN
        )

    def __str__(self) -> str:
        return (
            f"{self.value:.3f} [{self.low:.3f}, "
            f"{self.high:.3f}]{'' if self.resolved else ' unresolved'}"
        )


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """Returns the median of ours[i] / theirs[i] with the percentile bootstrap interval over pairs
    (Efron 1979).

    Raises InvalidInput for unequal or empty sequences and for numbers that are not positive.
    """
    if len(ours) != len(theirs) or not ours:
        raise InvalidInput(
            "paired measurements come in pairs",
            seen=(len(ours), len(theirs)),
            allowed="equal, >= 1",
        )

    if (least := min(*ours, *theirs)) <= 0:
        raise InvalidInput("measurements are positive", seen=least, allowed="> 0")
    ratios = np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


@dataclass(frozen=True, slots=True)
class Goal:
    """One number and its goal; `met` is None if the measurement does not resolve the goal."""

    name: str
    goal: float
    value: float
    met: bool | None


def at_least(name: str, goal: float, value: float) -> Goal:
    """A goal that larger values meet."""
    return Goal(name, goal, value, value >= goal)


def at_most(name: str, goal: float, value: float) -> Goal:
    """A goal that smaller values meet; goal and value change their signs."""
    return at_least(f"minus {name}", -goal, -value)


def ratio_goal(name: str, goal: float, ratio: Ratio, fewest_pairs: int = 1) -> Goal:
    """A goal on a ratio; open if the pairs are too few or do not resolve the ratio."""
    judged = ratio.resolved and ratio.pairs >= fewest_pairs
    return Goal(f"{name} {ratio}", goal, ratio.value, ratio.value >= goal if judged else None)


def cost_goal(name: str, most: float, ratio: Ratio, fewest_pairs: int = 1) -> Goal:
    """A ratio of costs is at most `most`; goal and value change their signs.

    The goal stays open while the interval contains `most`, and if the pairs are too few.
    """
    met = True if ratio.high <= most else False if ratio.low > most else None
    if ratio.pairs < fewest_pairs:
        met = None
    return Goal(f"minus {name} {ratio}", -most, -ratio.value, met)


def say(text: str) -> None:
    """Prints one line of progress."""
    sys.stderr.write(f"bench: {text}\n")


def machine() -> str:
    """Describes the machine and its load."""
    return f"{machine_in_words()}, load {os.getloadavg()[0]:.1f}"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Rows of the tables, and goals."""

    title: str
    rows: Sequence[Row]
    goals: Sequence[Goal]
    machine: str = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def write_json(self, path: Path) -> None:
        """Writes {"rows", "goals", "machine", "versions", "date"}."""
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = asdict(self)
        del facts["title"]
        path.write_text(json.dumps(facts, indent=2) + "\n")

    def print(self, console: Console | None = None) -> None:
        """Prints rows and goals as tables."""
        console = console or Console(width=None if sys.stdout.isatty() else 140)
        tables = _tables(self.title, self.rows)
        if self.title not in tables:
            console.print(self.title)
        for heading, rows in tables.items():
            console.print(_table(heading, rows))
        words = {True: "met", False: "missed", None: "unresolved"}
        goals: list[Row] = [
            {"goal": one.name, "at least": one.goal, "value": one.value, "": words[one.met]}
            for one in self.goals
        ]
        if goals:
            console.print(_table("goals", goals))
        console.print(self.machine, style="dim")


def _tables(title: str, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Groups rows by their column "section", which is then dropped, or else by the title."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        shown = {name: value for name, value in row.items() if name != "section"}
        tables.setdefault(str(row.get("section", title)), []).append(shown)
    return tables


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        numbers = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(name, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    return table


def _cell(value: str | float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
