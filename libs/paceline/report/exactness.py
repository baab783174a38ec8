"""Draws the exactness audit: differences between the engine's and the trainer's log-probs by
generation path, and the paths turned off.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.report.charts import empty, number
from paceline.report.journal import RunHistory
from paceline.report.measures import split
from paceline.v1.coordinator_pb2 import StepRecord

_GAP, _UPPER, _TOKENS = "audit_gap/", "audit_upper/", "audit_tokens/"
_PATHS = 8  # lines of the chart, one colour each
_WORDS = {
    "plain": "computed for the token alone, without drafts",
    "drafted": "drafted, several arms together",
    "reused": "keys and values of another sequence",
    "swapped": "keys and values of an earlier policy",
}


def exactness_chart(records: Sequence[StepRecord]) -> tuple[str, str, str]:
    """(title, note, drawing)."""
    shown = _paths(records)[:_PATHS]
    note = "mean |log-prob of the trainer - of the engine| of audited tokens, by path, nats"
    return "Exactness audit", note, split(records, _GAP, shown)


def exactness_table(history: RunHistory) -> str:
    """A row for each path: audited tokens, result, and whether it is off."""
    paths = [*_paths(history.records)]
    paths += [path for path in history.beyond if path not in paths]
    if not paths:
        return empty("no token was audited: policy_trainer.audit.share draws the sample")
    names = ("path", "state", "what it is")
    head = "".join(f"<th>{name}</th>" for name in names)
    figures = ("tokens", "mean gap", "99th percentile", "bounds")
    head += "".join(f'<th class="n">{name}</th>' for name in figures)
    rows = "".join(_row(history, path) for path in paths)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(history: RunHistory, path: str) -> str:
    measured = [one.policy for one in history.records if one.policy.get(_TOKENS + path)]
    tokens = sum(one[_TOKENS + path] for one in measured)
    mean = sum(one[_GAP + path] * one[_TOKENS + path] for one in measured) / max(tokens, 1)
    upper = max((one[_UPPER + path] for one in measured), default=0.0)
    found, state, bounds = history.beyond.get(path), "within its bound", "–"
    if found:
        tokens, mean, upper = (found.get(name, 0) for name in ("tokens", "mean", "upper"))
        state = f"beyond its bound, in step {int(found['step']) + 1}"
        bounds = f"{number(found.get('mean_bound', 0))}, {number(found.get('upper_bound', 0))}"
    words = [path, state, _meaning(path)]
    cells = "".join(f"<td>{escape(word)}</td>" for word in words)
    shown = [f"{int(tokens):,}", f"{mean:.2g}", f"{upper:.2g}", bounds]
    cells += "".join(f'<td class="n">{value}</td>' for value in shown)
    return f"<tr{' class=bad-row' if found else ''}>{cells}</tr>"


def _meaning(path: str) -> str:
    kind, _, name = path.partition("=")
    by_name = {"arm": f"drafted by {name}", "numbers": f"weights rounded to {name}"}
    return _WORDS.get(path) or by_name.get(kind, "")


def _paths(records: Sequence[StepRecord]) -> list[str]:
    names = {name for one in records for name in one.policy if name.startswith(_GAP)}
    return sorted((name.removeprefix(_GAP) for name in names), key=lambda one: (len(one), one))
