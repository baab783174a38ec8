"""Rows of the tables on the pages about a run."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from paceline.report.charts import number
from paceline.report.figures import AUDIT_GAP, OtherRun
from paceline.report.journal import DrafterDecision, RunHistory

_VERSIONS = 12
"""Maximum number of drafter versions."""
_PATHS = {
    "plain": "computed for the token alone, without drafts",
    "drafted": "drafted, several arms together",
    "reused": "keys and values of another sequence",
    "swapped": "keys and values of an earlier policy",
}


class Table(NamedTuple):
    """Heads and rows; the first `words` columns are text, the others figures."""

    title: str
    note: str
    heads: Sequence[str]
    words: int
    rows: Sequence[Sequence[object]]
    empty: str  # a sentence instead of a table without rows
    bad: Collection[object] = ()  # first cells of the marked rows


def settings_table(other: OtherRun) -> Table:
    """A row for each setting that differs between the two runs."""
    note = f"this run beside {other.run_id}, whose lines are dashed in the charts"
    heads = ("setting", "this run", other.run_id)
    return Table("Settings that differ", note, heads, 3, other.settings, "no setting differs")


def acceptance_table(history: RunHistory) -> Table:
    """A row for each arm of each drafter version, the newest version first."""
    steps: Counter[int] = Counter()
    rounds: dict[int, Counter[str]] = {}
    tokens: dict[int, Counter[str]] = {}
    for one in history.records:
        if one.arm_drafted_rounds:
            version = one.versions.drafter
            steps[version] += 1
            rounds.setdefault(version, Counter()).update(one.arm_drafted_rounds)
            tokens.setdefault(version, Counter()).update(one.arm_round_tokens)
    rows = [
        (
            *(f"d{version}", arm, f"{tokens[version][arm] / count:.2f}"),
            *(f"{count:,}", f"{tokens[version][arm]:,}", steps[version]),
        )
        for version in sorted(rounds, reverse=True)[:_VERSIONS]
        for arm, count in sorted(rounds[version].items())
    ]
    title = "Acceptance by drafter version and arm"
    note = "rollouts of the steps that a version served, newest version first"
    heads = ("drafter", "arm", "accepted length", "rounds", "tokens", "steps")
    return Table(title, note, heads, 2, rows, "nothing was drafted")


def exactness_table(history: RunHistory) -> Table:
    """A row for each path of the audit: audited tokens, result, and whether the path is off."""
    names = {name for one in history.records for name in one.policy if name.startswith(AUDIT_GAP)}
    paths = {name.removeprefix(AUDIT_GAP) for name in names} | set(history.beyond)
    rows = [_audited(history, path) for path in sorted(paths, key=lambda one: (len(one), one))]
    title = "Exactness audit by path"
    note = "tokens scored again by the trainer in the policy version that drew them"
    heads = ("path", "state", "meaning", "tokens", "mean gap", "99th percentile", "bounds")
    empty = "no token was audited: policy_trainer.audit.share draws the sample"
    return Table(title, note, heads, 3, rows, empty, history.beyond)


def _audited(history: RunHistory, path: str) -> Sequence[str]:
    names = [f"audit_{part}/{path}" for part in ("tokens", "gap", "upper")]
    found = ([one.policy.get(name, 0.0) for name in names] for one in history.records)
    measured = [figures for figures in found if figures[0]]
    tokens = sum(count for count, _, _ in measured)
    mean = sum(gap * count for count, gap, _ in measured) / max(tokens, 1)
    upper = max((most for _, _, most in measured), default=0.0)
    state, bounds = "within its bound", "–"
    if beyond := history.beyond.get(path):
        tokens, mean, upper = (beyond.get(name, 0) for name in ("tokens", "mean", "upper"))
        state = f"beyond its bound, in step {int(beyond['step']) + 1}"
        bounds = f"{number(beyond.get('mean_bound', 0))}, {number(beyond.get('upper_bound', 0))}"
    kind, _, name = path.partition("=")
    by_name = {"arm": f"drafted by {name}", "numbers": f"weights rounded to {name}"}
    meaning = _PATHS.get(path) or by_name.get(kind, "")
    return path, state, meaning, f"{int(tokens):,}", f"{mean:.2g}", f"{upper:.2g}", bounds


def gate_table(decisions: Sequence[DrafterDecision]) -> Table:
    """The newest decisions, newest first: candidate against serving drafter."""
    title = "The drafter's gate"
    note = "newest decisions: candidate against the drafter that served"
    judged = ("accepted length", "speed-up", "noise", "positions", "its steps")
    heads = ("step", "decision", "drafter", "kind", *judged)
    rows = [_decided(one) for one in reversed(decisions)]
    return Table(title, note, heads, 4, rows, "the gate has not judged any drafter")


def _decided(one: DrafterDecision) -> Sequence[object]:
    of = one.figures

    def compared(name: str) -> str:
        """The candidate's figure and the serving drafter's."""
        sides = (of.get(f"{side}_{name}") for side in ("candidate", "serving"))
        return " : ".join(figure(side or None, 2) for side in sides)

    counts = (f"{int(of.get(name, 0)):,}" for name in ("positions", "optimizer_steps"))
    return (
        *(one.step + 1, one.decision, f"d{one.drafter_version}", of.get("kind", "")),
        *(compared("accept_length"), compared("speedup"), figure(of.get("noise") or None, 2)),
        *counts,
    )


def figure(value: float | None, digits: int) -> str:
    """A number, or a dash if it was not measured."""
    return "–" if value is None else f"{value:,.{digits}f}"
