"""Draws the policy's learning, step by step. A figure that a step did not measure is a gap."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.charts import empty, stacked_columns
from paceline.report.measures import (
    AGE,
    DIVERGENCE,
    ENTROPY,
    GRADIENT,
    LOSS,
    SOLVED_BY_ALL,
    SOLVED_BY_NONE,
    TRUNCATED,
    alone,
)
from paceline.report.solved import BY_ALL, BY_NONE, BY_SOME
from paceline.v1.coordinator_pb2 import StepRecord

_GROUPS = (
    (BY_NONE, SOLVED_BY_NONE.label, "c5"),
    (BY_SOME, "by some", "c0"),
    (BY_ALL, SOLVED_BY_ALL.label, "c2"),
)
"""Share of a group's samples that solved its task, in words and as a colour."""


def health_sections(records: Sequence[StepRecord]) -> list[tuple[str, str, str]]:
    """(title, note, drawing) of the charts about the policy's learning."""
    groups = "by who of a group's samples solved its task: all or none of them teach nothing"
    ages = "trained trajectories by their age in policy versions"
    return [
        *(alone(records, one) for one in (LOSS, ENTROPY, DIVERGENCE, GRADIENT)),
        ("Groups solved", groups, _groups(records)),
        alone(records, TRUNCATED),
        (AGE.title, ages, _staleness(records)),
    ]


def _groups(records: Sequence[StepRecord]) -> str:
    known = [one for one in records if one.groups_solved]
    columns = [
        (float(one.step + 1), [float(one.groups_solved.get(who, 0)) for who, *_ in _GROUPS])
        for one in known
    ]
    names, colors = [name for _, name, _ in _GROUPS], [color for *_, color in _GROUPS]
    return stacked_columns(names, columns, colors=colors, y_label="groups")


def _staleness(records: Sequence[StepRecord]) -> str:
    lags = sorted({lag for one in records for lag in one.staleness}, key=int)[:7]
    if lags in ([], ["0"]):
        return empty("every trajectory was trained at the version that drew it")
    columns = [
        (float(one.step + 1), [float(one.staleness.get(lag, 0)) for lag in lags]) for one in records
    ]
    names, colors = [f"lag {lag}" for lag in lags], [f"c{i}" for i in range(len(lags))]
    return stacked_columns(names, columns, colors=colors, y_label="trajectories")
