"""Explains the duration of a step or any trace of a run: its critical path from the span files,
beside the run's median step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import NotFound
from paceline.report.critical_path import (
    CALLER,
    PathPiece,
    critical_path,
    merged_pieces,
    tree_of,
)
from paceline.report.run_traces import EndedStep, alike, ended_steps, load, spread, trace_of
from paceline.report.spans import SpanRecord
from paceline.telemetry import names

_STEP_DIGITS = 9
_ID_DIGITS = 8
_SLOWER = 1.1
"""A step slower than this multiple of the median is slow."""
_TOLD = {
    names.SESSION_ID: "session",
    names.WORKER: "worker",
    names.POLICY_VERSION: "policy version",
    names.GEN_AI_OUTPUT_TOKENS: "tokens said",
    names.TRAJECTORIES: "trajectories",
    names.BYTES: "bytes",
    names.HTTP_ROUTE: "route",
}
"""Attributes that distinguish spans of one name, and their labels."""
_INHERITED = (names.SESSION_ID, names.WORKER, names.GEN_AI_OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True)
class PathShare:
    """Time on the critical path in one edge, or in one kind of span within it."""

    edge: str
    name: str  # of the span; empty: the whole edge
    seconds: float
    share: float  # of the trace
    median_s: float | None  # of the compared traces; None without any

    @property
    def more_s(self) -> float:
        """Seconds above the median."""
        return self.seconds - (self.median_s or 0.0)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of one trace's time."""

    title: str  # "step 5", "trace 0af76519"
    trace_id: str
    seconds: float
    median_s: float | None  # of the compared traces
    peers: int  # number of compared traces
    edges: tuple[PathShare, ...]  # longest first
    parts: tuple[PathShare, ...]  # longest first
    path: tuple[PathPiece, ...]  # from start to end, with adjacent pieces of a kind merged
    culprit: str

    def as_json(self) -> dict[str, Any]:
        """For programs, with times in seconds; times of the path count from the trace's start."""
        start = self.path[0].start_ns
        return {
            "what": self.title,
            "trace_id": self.trace_id,
            "seconds": self.seconds,
            "median_s": self.median_s,
            "compared_with": self.peers,
            "culprit": self.culprit,
            "edges": [_share_json(one) for one in self.edges],
            "parts": [_share_json(one) for one in self.parts],
            "path": [
                {
                    "at_s": (one.start_ns - start) / 1e9,
                    "seconds": one.seconds,
                    "edge": one.edge,
                    "service": one.span.service,
                    "span": one.span.name,
                    "span_id": one.span.span_id,
                    "about": about(one),
                }
                for one in self.path
            ],
        }


def explain(directory: Path, which: str = "") -> Explanation:
    """Explains a step by number, or a trace by the beginning of its id; "" is the slowest step.

    Raises NotFound if no span file has it, InvalidInput for neither form.
    """
    if not which or (which.isdecimal() and len(which) <= _STEP_DIGITS):
        steps = ended_steps(directory)
        chosen = _chosen_step(steps, which)
        others = spread([one.trace_id for one in steps if one is not chosen])
        found = load(directory, [chosen.trace_id, *others])
        return _explained(f"step {chosen.number}", chosen.trace_id, found)
    trace = trace_of(directory, which)
    found = load(directory, [trace])
    root, _ = tree_of(found[trace])
    if root.name == names.STEP:
        return explain(directory, str(root.attributes[names.RL_STEP]))
    if root.name != CALLER:
        found |= load(directory, alike(directory, root))
    return _explained(f"trace {trace[:_ID_DIGITS]}", trace, found)


def about(piece: PathPiece) -> dict[str, Any]:
    """Named attributes of a piece: of its span, and inherited from the spans above it."""
    known: dict[str, Any] = {}
    for span in piece.above:
        known |= {key: value for key, value in span.attributes.items() if key in _INHERITED}
    known |= piece.span.attributes
    return {called: known[key] for key, called in _TOLD.items() if key in known}


def _explained(title: str, trace_id: str, found: Mapping[str, Sequence[SpanRecord]]) -> Explanation:
    paths = {trace: critical_path(*tree_of(spans)) for trace, spans in found.items()}
    path = paths.pop(trace_id)
    seconds, peers = _seconds(path), list(paths.values())
    median_s = median(map(_seconds, peers)) if peers else None
    edges = _shares(path, peers, by_name=False)
    parts = _shares(path, peers, by_name=True)
    culprit = _culprit(title, seconds, median_s, parts, path)
    merged = tuple(merged_pieces(path))
    return Explanation(
        title, trace_id, seconds, median_s, len(peers), edges, parts, merged, culprit
    )


def _shares(
    path: Sequence[PathPiece], peers: Sequence[Sequence[PathPiece]], *, by_name: bool
) -> tuple[PathShare, ...]:
    own, whole = _by_key(path, by_name=by_name), _seconds(path)
    others = [_by_key(one, by_name=by_name) for one in peers]
    found = [
        PathShare(
            *key,
            spent,
            spent / whole if whole else 0.0,
            median(one.get(key, 0.0) for one in others) if others else None,
        )
        for key, spent in own.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _by_key(path: Iterable[PathPiece], *, by_name: bool) -> dict[tuple[str, str], float]:
    spent: defaultdict[tuple[str, str], float] = defaultdict(float)
    for piece in path:
        spent[piece.edge, piece.span.name if by_name else ""] += piece.seconds
    return dict(spent)


def _culprit(
    title: str,
    seconds: float,
    median_s: float | None,
    parts: Sequence[PathShare],
    path: Sequence[PathPiece],
) -> str:
    """One sentence: the cause of a slow trace, or the parts of one that is not slow."""
    slow = median_s is not None and seconds > _SLOWER * median_s
    part = max(parts, key=lambda one: one.more_s) if slow else parts[0]
    longest = max(
        (one for one in path if one.key == (part.edge, part.name)), key=lambda one: one.seconds
    )
    told = ", ".join(f"{key} {value}" for key, value in about(longest).items())
    what = f"{part.name} in {longest.span.service}"
    aside = f"longest piece {longest.seconds:.2f} s{f': {told}' if told else ''}"
    if slow and median_s is not None:
        return (
            f"{title} took {seconds:.2f} s, {seconds - median_s:.2f} s more than the median, and "
            f"{max(part.more_s, 0.0):.2f} s more of it went to {what} ({aside})"
        )
    usual = "" if median_s is None else f", {_beside(seconds, median_s)}"
    return f"{title} took {seconds:.2f} s{usual}, and {part.share:.0%} of it is {what} ({aside})"


def _chosen_step(steps: Sequence[EndedStep], which: str) -> EndedStep:
    """The last attempt of the step with that number; without a number, the slowest step."""
    if not steps:
        raise NotFound("no step of the run has ended, or it keeps no spans", seen="no span of one")
    if not which:
        return max(steps, key=lambda one: one.seconds)
    wanted = [one for one in steps if one.number == int(which)]
    if not wanted:
        allowed = f"{steps[0].number} to {steps[-1].number}"
        raise NotFound("no such step has ended", seen=which, allowed=allowed)
    return wanted[-1]


def _beside(seconds: float, median_s: float) -> str:
    """Wording for a trace that is not slow."""
    if seconds * _SLOWER < median_s:
        return f"{median_s - seconds:.2f} s less than the median"
    return f"as long as others (median {median_s:.2f} s)"


def _seconds(path: Iterable[PathPiece]) -> float:
    return sum(piece.seconds for piece in path)


def _share_json(one: PathShare) -> dict[str, Any]:
    found = {"edge": one.edge, "seconds": one.seconds, "share": one.share, "median_s": one.median_s}
    return found | ({"span": one.name} if one.name else {})
