"""Summarises the cost of faults and the findings of the judge as figures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.chaos.inject import Injected
from benchmarks.chaos.verdict import RunVerdict
from benchmarks.result import Goal, machine

MEDIAN_S, WORST_S = 6.0, 15.0
_WRONG = ("lost", "duplicated", "wrong_weights", "disordered", "differing")


@dataclass
class Course:
    """Course of a run under faults."""

    done: list[Injected] = field(default_factory=list)
    runs_ended: list[str] = field(default_factory=list)  # reasons why the run was started again
    left: list[str] = field(default_factory=list)  # processes that outlived the run
    failure: str = ""  # failure from which the run did not recover
    steps: int = 0


def report(seed: int, course: Course, verdict: RunVerdict) -> dict[str, Any]:
    """Contents of the JSON file."""
    wrong = {name: len(getattr(verdict, name)) for name in _WRONG}
    recovery_s = _spread([one.recovery_s for one in course.done])
    return {
        "seed": seed,
        "faults": len(course.done),
        **wrong,
        "found": {name: getattr(verdict, name)[:20] for name in _WRONG},
        "failure": course.failure,
        "left_over": course.left,
        "steps": course.steps,
        "samples": verdict.samples,
        "trained": verdict.trained,
        "reported": dict(verdict.reported),
        "versions_compared": verdict.versions,
        "samples_compared": verdict.compared,
        "samples_not_comparable": verdict.not_comparable,
        "steps_with_near_ties": verdict.near_ties,
        "runs_ended": course.runs_ended,
        "recovery_s": recovery_s,
        "whole_s": _spread([one.whole_s for one in course.done]),
        "recovery_s_by_kind": _by_kind(course.done),
        "goals": [asdict(goal) for goal in _goals(wrong, recovery_s)],
        "log": [asdict(one) for one in course.done],
        "machine": machine(),
    }


def _goals(wrong: Mapping[str, int], recovery_s: Mapping[str, float]) -> Iterator[Goal]:
    for name, count in wrong.items():
        yield Goal(name, 0, count, count == 0)
    for name, goal in (("median", MEDIAN_S), ("worst", WORST_S)):
        yield Goal(f"recovery {name} s, below", goal, recovery_s[name], recovery_s[name] < goal)


def _by_kind(done: Sequence[Injected]) -> dict[str, dict[str, float]]:
    found = defaultdict[str, list[float]](list)
    for one in done:
        found[one.kind].append(one.recovery_s)
    return {kind: {"faults": len(took), **_spread(took)} for kind, took in sorted(found.items())}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"median": 0.0, "worst": 0.0}
    return {"median": round(statistics.median(seconds), 2), "worst": round(max(seconds), 2)}


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The same figures as lines of text."""
    for kind, figures in facts["recovery_s_by_kind"].items():
        yield f"{kind:38} {figures['faults']:3} {figures['median']:7.1f} {figures['worst']:7.1f} s"
    for found in facts["found"].values():
        yield from (f"wrong: {one}" for one in found)
    for goal in facts["goals"]:
        word = "met   " if goal["met"] else "MISSED"
        yield f"{word} {goal['name']} {goal['goal']}: {goal['value']}"
    yield (
        f"{facts['faults']} faults in {facts['steps']} steps; {facts['trained']} of "
        f"{facts['samples']} samples trained, reported {facts['reported']}; weights of "
        f"{facts['versions_compared']} versions and tokens of {facts['samples_compared']} samples "
        f"compared"
    )
