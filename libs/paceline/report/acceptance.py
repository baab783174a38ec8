"""Draws tokens per drafted round: over the steps, by arm, and by drafter version beside the gate's
projection.

An arm's figure covers its own rounds alone: the sum of tokens over the sum of rounds. A step in
which an arm drafted nothing does not count for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from paceline.arm_names import read_arm
from paceline.report.charts import Series, empty, line_chart
from paceline.report.journal import PROBE, Ruling, RunHistory
from paceline.report.measures import ACCEPTANCE
from paceline.v1.coordinator_pb2 import StepRecord

NAN = float("nan")
_ARMS = 7  # lines of the chart, one colour each
_VERSIONS = 12  # rows of the table


def acceptance_charts(history: RunHistory) -> list[tuple[str, str, str]]:
    """(title, note, drawing) of the charts by RL step."""
    whole = "live, and a fixed probe outside timed windows; dashed: a new drafter serves"
    by_arm = "live, of each arm's own rounds; dashed: a new drafter serves"
    return [
        (ACCEPTANCE.title, whole, _whole(history)),
        ("Acceptance by arm", by_arm, _by_arm(history.records)),
    ]


def acceptance_table(history: RunHistory) -> str:
    """A row for each arm of each drafter version, the newest version first."""
    served: dict[int, list[StepRecord]] = {}
    for record in history.records:
        if record.arm_drafted_rounds:
            served.setdefault(record.versions.drafter, []).append(record)
    if not served:
        return empty("nothing was drafted")
    figures = ("accepted length", "projected", "rounds", "tokens", "steps")
    head = "<th>drafter</th><th>arm</th>"
    head += "".join(f'<th class="n">{name}</th>' for name in figures)
    rows = "".join(
        _rows(version, served[version], history.promoted.get(version))
        for version in sorted(served, reverse=True)[:_VERSIONS]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def projected(ruling: Ruling | None, arm: str) -> float | None:
    """The projected acceptance length of an arm, from the gate's measured survival of its drafter.
    None if the gate has no measurement: for other kinds, deeper chains and trees.
    """
    name = read_arm(arm)
    if ruling is None or name is None or name.shape.topk > 1:
        return None
    survival: Sequence[float] = ruling.figures.get("survival", ())
    if ruling.figures.get("kind") != name.speculator or len(survival) < name.shape.steps:
        return None
    return 1.0 + sum(survival[: name.shape.steps])


def _whole(history: RunHistory) -> str:
    live = ACCEPTANCE.points(history.records)
    probe = [(float(step), value) for step, value in history.evaluated(PROBE)]
    series = [Series(ACCEPTANCE.label, live, "c0"), Series("probe", probe, "c2", dots=True)]
    return line_chart(series, y_label=ACCEPTANCE.unit, marks=_swaps(history.records))


def _by_arm(records: Sequence[StepRecord]) -> str:
    """The arms that drafted most, in the order of their names."""
    most = [arm for arm, _ in _summed(records)[0].most_common(_ARMS)]
    series = [
        Series(arm, [(float(one.step + 1), _length(one, arm)) for one in records], f"c{i}")
        for i, arm in enumerate(sorted(most))
    ]
    return line_chart(series, y_label=ACCEPTANCE.unit, marks=_swaps(records))


def _length(record: StepRecord, arm: str) -> float:
    rounds = record.arm_drafted_rounds.get(arm, 0)
    return record.arm_round_tokens.get(arm, 0) / rounds if rounds else NAN


def _swaps(records: Sequence[StepRecord]) -> list[float]:
    """Steps served by another drafter than the step before."""
    return [
        float(later.step + 1)
        for earlier, later in pairwise(records)
        if earlier.versions.drafter != later.versions.drafter
    ]


def _summed(records: Iterable[StepRecord]) -> tuple[Counter[str], Counter[str]]:
    """Drafted rounds and their tokens, by arm."""
    rounds: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for one in records:
        rounds.update(one.arm_drafted_rounds)
        tokens.update(one.arm_round_tokens)
    return rounds, tokens


def _rows(version: int, records: Sequence[StepRecord], ruling: Ruling | None) -> str:
    rounds, tokens = _summed(records)
    steps = _ranges([one.step + 1 for one in records])
    rows = []
    for arm in sorted(rounds):
        gate = projected(ruling, arm)
        figures = (
            f"{tokens[arm] / rounds[arm]:.2f}",
            "–" if gate is None else f"{gate:.2f}",
            f"{rounds[arm]:,}",
            f"{tokens[arm]:,}",
            steps,
        )
        cells = f"<td>d{version}</td><td>{escape(arm)}</td>"
        cells += "".join(f'<td class="n">{figure}</td>' for figure in figures)
        rows.append(f"<tr>{cells}</tr>")
    return "".join(rows)


def _ranges(steps: Sequence[int]) -> str:
    """Ascending numbers, with neighbours joined: 1–3, 7."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join("–".join(map(str, run)) for run in runs)
