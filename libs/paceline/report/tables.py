"""Draws the tables of the pages about a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from paceline.arm_names import read_arm
from paceline.report.charts import duration, empty, number
from paceline.report.figures import AUDIT_GAP
from paceline.report.journal import Ruling, RunHistory
from paceline.report.spans import Edge
from paceline.report.summary import Summary
from paceline.streams.journal import IdleCause
from paceline.v1.coordinator_pb2 import StepRecord

_VERSIONS, _RULINGS = 12, 20
"""Rows of the tables."""
_UPPER, _TOKENS = "audit_upper/", "audit_tokens/"
_PATHS = {
    "plain": "computed for the token alone, without drafts",
    "drafted": "drafted, several arms together",
    "reused": "keys and values of another sequence",
    "swapped": "keys and values of an earlier policy",
}
_IDLE = {
    IdleCause.UNTRAINED: "no drafter was to be trained",
    IdleCause.TRAINER_AWAY: "its trainer was away",
    IdleCause.TRAINER_DONE: "it had learned all rows",
    IdleCause.COMMIT: "a set was committed",
    IdleCause.ENOUGH: "it had its maximum of slots",
    IdleCause.GIVING_BACK: "it was returning its slots",
    IdleCause.SERIAL: "its turn was after the policy's step",
    IdleCause.HAND_OVER: "all rollouts were done, the policy was next",
    IdleCause.TOO_FEW: "too few workers were released",
    IdleCause.LEASING: "they were about to be leased",
}


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    words: int,
    bad: Collection[object] = (),
) -> str:
    """A table with `words` columns of text, then columns of figures. Rows whose first cell is in
    `bad` are marked.
    """

    def cells(tag: str, row: Sequence[object]) -> str:
        kinds = ("", ' class="n"')
        return "".join(
            f"<{tag}{kinds[i >= words]}>{escape(str(cell))}</{tag}>" for i, cell in enumerate(row)
        )

    body = "".join(
        f"<tr{' class=bad-row' if row[0] in bad else ''}>{cells('td', row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{cells('th', heads)}</tr></thead><tbody>{body}</tbody></table>"


def acceptance_table(history: RunHistory) -> str:
    """A row for each arm of each drafter version, the newest version first."""
    served: dict[int, list[StepRecord]] = {}
    for record in history.records:
        if record.arm_drafted_rounds:
            served.setdefault(record.versions.drafter, []).append(record)
    if not served:
        return empty("nothing was drafted")
    heads = ("drafter", "arm", "accepted length", "projected", "rounds", "tokens", "steps")
    rows = [
        row
        for version in sorted(served, reverse=True)[:_VERSIONS]
        for row in _by_arm(version, served[version], history.promoted.get(version))
    ]
    return table(heads, rows, 2)


def _by_arm(
    version: int, records: Sequence[StepRecord], ruling: Ruling | None
) -> Iterable[Sequence[str]]:
    rounds: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for one in records:
        rounds.update(one.arm_drafted_rounds)
        tokens.update(one.arm_round_tokens)
    steps = _ranges([one.step + 1 for one in records])
    for arm in sorted(rounds):
        length = f"{tokens[arm] / rounds[arm]:.2f}"
        counts = (f"{rounds[arm]:,}", f"{tokens[arm]:,}", steps)
        yield f"d{version}", arm, length, figure(projected(ruling, arm), 2), *counts


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


def _ranges(steps: Sequence[int]) -> str:
    """Ascending numbers, with neighbours joined: 1–3, 7."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join("–".join(map(str, run)) for run in runs)


def exactness_table(history: RunHistory) -> str:
    """A row for each path of the audit: audited tokens, result, and whether the path is off."""
    names = {name for one in history.records for name in one.policy if name.startswith(AUDIT_GAP)}
    paths = [name.removeprefix(AUDIT_GAP) for name in names] + [*history.beyond]
    if not paths:
        return empty("no token was audited: policy_trainer.audit.share draws the sample")
    heads = ("path", "state", "meaning", "tokens", "mean gap", "99th percentile", "bounds")
    ordered = sorted(set(paths), key=lambda one: (len(one), one))
    return table(heads, [_audited(history, path) for path in ordered], 3, history.beyond)


def _audited(history: RunHistory, path: str) -> Sequence[str]:
    measured = [one.policy for one in history.records if one.policy.get(_TOKENS + path)]
    tokens = sum(one[_TOKENS + path] for one in measured)
    mean = sum(one[AUDIT_GAP + path] * one[_TOKENS + path] for one in measured) / max(tokens, 1)
    upper = max((one[_UPPER + path] for one in measured), default=0.0)
    state, bounds = "within its bound", "–"
    if found := history.beyond.get(path):
        tokens, mean, upper = (found.get(name, 0) for name in ("tokens", "mean", "upper"))
        state = f"beyond its bound, in step {int(found['step']) + 1}"
        bounds = f"{number(found.get('mean_bound', 0))}, {number(found.get('upper_bound', 0))}"
    kind, _, name = path.partition("=")
    by_name = {"arm": f"drafted by {name}", "numbers": f"weights rounded to {name}"}
    meaning = _PATHS.get(path) or by_name.get(kind, "")
    return path, state, meaning, f"{int(tokens):,}", f"{mean:.2g}", f"{upper:.2g}", bounds


def gate_table(rulings: Sequence[Ruling]) -> str:
    """The newest decisions, newest first: candidate against serving drafter."""
    if not rulings:
        return empty("the gate has not judged any drafter")
    heads = ("step", "decision", "drafter", "kind", "accepted length", "speed-up", "noise")
    rows = [_ruled(one, one.figures) for one in list(rulings)[-_RULINGS:][::-1]]
    return table((*heads, "positions", "its steps"), rows, 4)


def _ruled(one: Ruling, of: Mapping[str, Any]) -> Sequence[object]:
    def compared(name: str) -> str:
        """The candidate's figure against the serving drafter's."""
        return " : ".join(figure(of.get(f"{which}_{name}") or None, 2) for which in sides)

    sides = ("candidate", "serving")
    words = (one.step + 1, one.decision, f"d{one.drafter_version}", of.get("kind", ""))
    lengths = (compared("accept_length"), compared("speedup"), figure(of.get("noise") or None, 2))
    return *words, *lengths, *(f"{int(of.get(n, 0)):,}" for n in ("positions", "optimizer_steps"))


def latency_table(edges: Sequence[Edge]) -> str:
    """One row per edge between services."""
    if not edges:
        return empty("no spans were written")
    ordered = sorted(edges, key=lambda edge: (edge.transport, edge.source, edge.target, edge.what))
    heads = ("edge", "call or hop", "over", "count", "p50", "p95", "p99")
    rows = [
        (
            *(f"{one.source} → {one.target}", one.what, one.transport, f"{one.count:,}"),
            *map(duration, (one.p50_s, one.p95_s, one.p99_s)),
        )
        for one in ordered
    ]
    return table(heads, rows, 3)


def counts_table(summary: Summary) -> str:
    """Ledger, versions and provenance as two columns."""
    of = summary
    first_step, waited = of["drafter_first_step_s"], of["preempt_wait_share"]
    rows: list[tuple[str, Any]] = [
        ("trajectories published", of["trajectories_published"]),
        ("trained", of["trajectories_trained"]),
        ("dropped", _counted(of["trajectories_dropped"])),
        ("never final", _counted(of["trajectories_unpublished"])),
        ("still open", of["trajectories_open"]),
        ("lost", of["trajectories_lost"]),
        ("policy versions served", of["policy_versions"]),
        ("drafter versions served", of["drafter_versions"]),
        ("drafter optimiser steps", of["drafter_steps"]),
        ("drafter's tokens per slot-second", figure(of["drafter_tokens_per_slot_s"], 0)),
        ("from a lease to its first step", "–" if first_step is None else duration(first_step)),
        ("gate decisions", _counted(of["gate_decisions"])),
        ("samples without a reward", _counted(of["samples_unscored"])),
        ("samples with a near-tie draw", of["near_ties"]),
        ("slot-seconds", _uses(of["slot_s"], of["slot_wall_s"])),
        ("idle slot-seconds by cause", _idle(of["idle_s"])),
        (
            "wait for a drafter-held slot",
            "not measured" if waited is None else f"{number(waited * 100)} % of step time",
        ),
        ("trace shown", of["trace_id"]),
        ("processes", ", ".join(f"{name} {pid}" for name, pid in of["pids"].items())),
        ("versions", ", ".join(f"{name} {one}" for name, one in of["versions"].items())),
        *((f"sha256 of {name}", value) for name, value in of["sha256"].items()),
    ]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td class='w'>{escape(str(value))}</td></tr>"
        for name, value in rows
    )
    return f"<table class='facts'><tbody>{cells}</tbody></table>"


def figure(value: float | None, digits: int) -> str:
    """A number, or a dash if it was not measured."""
    return "–" if value is None else f"{value:,.{digits}f}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "0"


def _uses(used: Mapping[str, float], wall_s: float) -> str:
    """Shares of the slots' time, and their sum."""
    if not wall_s:
        return "not measured"
    shares = [f"{use} {seconds / wall_s:.1%}" for use, seconds in used.items()]
    return f"{', '.join(shares)}; together {sum(used.values()) / wall_s:.1%} of slots times wall"


def _idle(idle_s: Mapping[IdleCause, float]) -> str:
    """Reasons for idle slots without drafter training."""
    causes = sorted(idle_s.items(), key=lambda one: -one[1])
    return ", ".join(f"{_IDLE[cause]} {duration(s)}" for cause, s in causes if s) or "none"
