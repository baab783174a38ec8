"""Finds the critical path of a trace: the work that its end waited for, at each moment.

The walk starts at the end. Of the child spans, the one that ended last was waited for until its
end. Before its start, the walk continues with the child that had ended by then. Time without a
child on the path is the span's own.

Children that overlap a waited one, or outlive their parent, delayed nothing. A child may outlive
its parent by SLACK_NS, since the end of a call can reach its caller before the server has recorded
it. If a gap remains in which such a child ran, the gap counts as waiting for it. Examples are a
stream closed after its last answer was used, and decode rounds of alternating arms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.report.spans import SpanRecord
from paceline.telemetry import names

CALLER = "caller"
"""Service and name of the root of a trace that began outside the run."""
SLACK_NS = 10_000_000
"""Time by which a span may outlast its waiter."""
Below = Mapping[str, Sequence[SpanRecord]]
"""Spans by the id of their parent."""


@dataclass(frozen=True, slots=True)
class PathPiece:
    """A stretch of the path that was one span's own time."""

    span: SpanRecord
    start_ns: int
    end_ns: int
    edge: str  # the surrounding call or stream: "coordinator → gateway RolloutService.RunTasks"
    above: tuple[SpanRecord, ...] = ()  # from the root down to the span's parent

    @property
    def seconds(self) -> float:
        """From start to end."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def key(self) -> tuple[str, str]:
        """Key for comparison: edge and name of the span."""
        return self.edge, self.span.name


def tree_of(spans: Iterable[SpanRecord]) -> tuple[SpanRecord, Below]:
    """The root of one trace, and the children of each span.

    Several step spans without a parent form one root, since a restarted coordinator begins another.
    Any other span without a parent has a caller outside. Children of a lost parent are attached to
    the root. Requires at least one span.
    """
    known = {one.span_id: one for one in spans}
    tops = [one for one in known.values() if one.parent_id not in known]
    steps = [one for one in tops if one.name == names.STEP]
    if steps:
        first = min(steps, key=lambda one: one.start_ns)
        root = replace(first, end_ns=max(one.end_ns for one in steps))
    elif len(tops) == 1:
        root = tops[0]
    else:
        start, end = min(one.start_ns for one in tops), max(one.end_ns for one in tops)
        root = replace(
            tops[0], span_id="", name=CALLER, service=CALLER, start_ns=start, end_ns=end, kind=""
        )
    below: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    for one in known.values():
        if one.span_id != root.span_id:
            below[one.parent_id if one.parent_id in known else root.span_id].append(one)
    return root, below


def critical_path(root: SpanRecord, below: Below) -> list[PathPiece]:
    """The pieces from the root's start to its end; their seconds sum to the root's."""
    walk = _Walk(below)
    walk.back(_Visit(root, root.service, ()), root.start_ns, root.end_ns)
    return walk.pieces[::-1]


@dataclass(frozen=True, slots=True)
class _Visit:
    """A span on the path, its edge and the spans above it."""

    span: SpanRecord
    edge: str
    above: tuple[SpanRecord, ...]


class _Walk:
    """The walk from end to start; the last piece is found first."""

    def __init__(self, below: Below) -> None:
        self._below = below
        self.pieces: list[PathPiece] = []

    def back(self, at: _Visit, start_ns: int, end_ns: int) -> None:
        """Covers the span's work between these times."""
        inner = () if at.span in at.above else self._below.get(at.span.span_id, ())
        cursor = end_ns
        for child in sorted(inner, key=lambda one: one.end_ns, reverse=True):
            begin, end = max(child.start_ns, start_ns), min(child.end_ns, cursor)
            served = (at.span.kind, child.kind) == ("client", "server")
            if end <= begin or (child.end_ns > cursor + SLACK_NS and not served):
                continue
            self._gap(at, inner, end, cursor)
            self.back(self._down(at, child), begin, end)
            cursor = begin
        self._gap(at, inner, start_ns, cursor)

    def _gap(self, at: _Visit, inner: Sequence[SpanRecord], start_ns: int, end_ns: int) -> None:
        """Covers the time between two waited spans: the child that ran there most of the time,
        otherwise the span's own time.
        """
        if end_ns <= start_ns:
            return
        filler, begin, end = None, 0, 0
        for child in inner if end_ns - start_ns > SLACK_NS else ():
            first, last = max(child.start_ns, start_ns), min(child.end_ns, end_ns)
            if last - first > end - begin:
                filler, begin, end = child, first, last
        if filler is None or end - begin <= SLACK_NS:
            self.pieces.append(PathPiece(at.span, start_ns, end_ns, at.edge, at.above))
            return
        self._gap(at, inner, end, end_ns)
        self.back(self._down(at, filler), begin, end)
        self._gap(at, inner, start_ns, begin)

    def _down(self, at: _Visit, child: SpanRecord) -> _Visit:
        return _Visit(child, _edge(child, self._below) or at.edge, (*at.above, at.span))


def merged_pieces(pieces: Iterable[PathPiece]) -> list[PathPiece]:
    """Adjacent pieces of the same key as one piece, which describes the longest one."""
    found: list[PathPiece] = []
    longest = 0
    for piece in pieces:
        length = piece.end_ns - piece.start_ns
        if found and found[-1].key == piece.key:
            about = piece if length > longest else found[-1]
            longest = max(length, longest)
            found[-1] = replace(about, start_ns=found[-1].start_ns, end_ns=piece.end_ns)
        else:
            found.append(piece)
            longest = length
    return found


def _edge(span: SpanRecord, below: Below) -> str:
    """The edge between services that begins with this span; empty if none begins."""
    if span.kind == "client":
        served = [one.service for one in below.get(span.span_id, ()) if one.kind == "server"]
        target = served[0] if served else "a peer"
        return f"{span.service} → {target} {span.name}"
    if span.kind == "producer":
        return f"{span.service} → redis {span.name}"
    if span.kind == "consumer":
        return f"redis → {span.service} {span.name}"
    return ""
