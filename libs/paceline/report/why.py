"""Explains the duration of a step: its critical path from the span files, beside other steps.

The critical path is the work that the end of the step waited for, at each moment. The walk starts
at the end. Of the child spans, the one that ended last was waited for until its end. Before its
start, the walk continues with the child that had ended by then. Time without a child on the path
is the span's own.

Children that overlap a waited one, or outlive their parent, delayed nothing. A child may outlive
its parent by SLACK_NS, since the end of a call can reach its caller before the server has recorded
it. If a gap remains in which such a child ran, the gap counts as waiting for it. Examples are a
stream closed after its last answer was used, and decode rounds of alternating arms.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from paceline.errors import NotFound
from paceline.report.spans import SpanRecord, read_spans
from paceline.telemetry import names

SLACK_NS = 10_000_000
_PEERS = 15
"""Maximum number of compared steps."""
_SPANS = 20_000
"""Maximum number of spans of a step."""
_SLOWER = 1.1
"""A step slower than this multiple of the median is slow."""
Spent = Counter[tuple[str, str]]


class PathPart(NamedTuple):
    """Time on the critical path in one kind of span."""

    edge: str  # the surrounding call or stream: "coordinator → gateway RolloutService.RunTasks"
    name: str  # of the span
    seconds: float
    median_s: float | None  # of the compared steps; None without any

    @property
    def more_s(self) -> float:
        """Seconds above the median."""
        return self.seconds - (self.median_s or 0.0)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of one step's time."""

    step: int
    seconds: float
    median_s: float | None  # of the compared steps; None without any
    peers: int  # number of compared steps
    parts: Sequence[PathPart]  # longest first

    @property
    def cause(self) -> str:
        """One sentence: the cause of a slow step, or the largest part of another step."""
        begin = f"step {self.step} took {self.seconds:.2f} s"
        if self.median_s is not None and self.seconds > _SLOWER * self.median_s:
            part = max(self.parts, key=lambda one: one.more_s)
            return (
                f"{begin}, {self.seconds - self.median_s:.2f} s more than the median, and "
                f"{part.more_s:.2f} s more of it went to {part.name} ({part.edge})"
            )
        usual = "" if self.median_s is None else f" (median {self.median_s:.2f} s)"
        part = self.parts[0]
        share = part.seconds / self.seconds
        return f"{begin}{usual}, and {share:.0%} of it went to {part.name} ({part.edge})"


def explain(directory: Path, step: int | None = None) -> Explanation:
    """Explains the last attempt of a step; None: of the slowest step.

    Raises NotFound if no span file has it.
    """
    numbers, seconds = dict[str, int](), Counter[str]()
    for span in read_spans(directory, [f'"{names.STEP}"']):
        if span.name == names.STEP:
            numbers[span.trace_id] = int(span.attributes.get(names.RL_STEP, -1))
            seconds[span.trace_id] += span.end_ns - span.start_ns
    if not numbers:
        raise NotFound(
            "no step of the run has a span",
            seen=directory,
            allowed="a run with telemetry.spans_dir after its first step",
        )
    wanted = [trace for trace, number in numbers.items() if step in (None, number)]
    if not wanted:
        allowed = f"{min(numbers.values())} to {max(numbers.values())}"
        raise NotFound("no such step has ended", seen=step, allowed=allowed)
    chosen = max(wanted, key=lambda trace: seconds[trace]) if step is None else wanted[-1]
    others = sorted(numbers.keys() - {chosen}, key=lambda trace: numbers[trace])
    peers = others[:: -(-len(others) // _PEERS) or 1]
    paths = {
        trace: critical_path(spans) for trace, spans in _load(directory, {chosen, *peers}).items()
    }
    return _compared(numbers[chosen], paths.pop(chosen), list(paths.values()))


def _compared(step: int, path: Spent, peers: Sequence[Spent]) -> Explanation:
    def median_s(values: Iterable[float]) -> float | None:
        return median(values) / 1e9 if peers else None

    parts = [
        PathPart(*key, spent_ns / 1e9, median_s(one[key] for one in peers))
        for key, spent_ns in path.most_common()
    ]
    whole = median_s(one.total() for one in peers)
    return Explanation(step, path.total() / 1e9, whole, len(peers), parts)


def _load(directory: Path, traces: Collection[str]) -> Mapping[str, Sequence[SpanRecord]]:
    found: dict[str, list[SpanRecord]] = {trace: [] for trace in traces}
    for span in read_spans(directory, list(traces)):
        kept = found.get(span.trace_id)
        if kept is not None and (len(kept) < _SPANS or span.name == names.STEP):
            kept.append(span)
    return found


def critical_path(spans: Iterable[SpanRecord]) -> Spent:
    """Nanoseconds of a step on its critical path, by edge and name of the span.

    Several step spans without a parent are one root, since a restarted coordinator begins another.
    Children of a lost parent are attached to the root.
    """
    known = {one.span_id: one for one in spans}
    tops = [one for one in known.values() if one.name == names.STEP]
    root = min(tops, key=lambda one: one.start_ns)
    below: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    for one in known.values():
        if one is not root:
            below[one.parent_id if one.parent_id in known else root.span_id].append(one)
    end_ns = max(one.end_ns for one in tops)
    walk = _Walk(below)
    walk.cover(replace(root, end_ns=end_ns), root.service, root.start_ns, end_ns)
    return walk.spent_ns


class _Walk:
    """The walk from the end of a step to its start."""

    def __init__(self, below: Mapping[str, Sequence[SpanRecord]]) -> None:
        self._below = below  # spans by the id of their parent
        self.spent_ns: Spent = Counter()

    def cover(self, span: SpanRecord, edge: str, start_ns: int, end_ns: int) -> None:
        """Counts the span's work between these times."""
        inner, cursor = self._below.get(span.span_id, ()), end_ns
        for child in sorted(inner, key=lambda one: one.end_ns, reverse=True):
            begin, end = max(child.start_ns, start_ns), min(child.end_ns, cursor)
            served = (span.kind, child.kind) == ("client", "server")
            if end <= begin or (child.end_ns > cursor + SLACK_NS and not served):
                continue
            self._fill(span, edge, end, cursor)
            self.cover(child, self._edge(child) or edge, begin, end)
            cursor = begin
        self._fill(span, edge, start_ns, cursor)

    def _fill(self, span: SpanRecord, edge: str, start_ns: int, end_ns: int) -> None:
        """Counts the time between two waited spans: of the child that ran there longest, otherwise
        the span's own time.
        """

        def part(child: SpanRecord) -> tuple[int, int]:
            return max(child.start_ns, start_ns), min(child.end_ns, end_ns)

        if end_ns <= start_ns:
            return
        inner = self._below.get(span.span_id, ()) if end_ns - start_ns > SLACK_NS else ()
        child = max(inner, key=lambda one: part(one)[1] - part(one)[0], default=None)
        begin, end = part(child) if child is not None else (0, 0)
        if child is None or end - begin <= SLACK_NS:
            self.spent_ns[edge, span.name] += end_ns - start_ns
            return
        self._fill(span, edge, end, end_ns)
        self.cover(child, self._edge(child) or edge, begin, end)
        self._fill(span, edge, start_ns, begin)

    def _edge(self, span: SpanRecord) -> str:
        """The edge between services that begins with this span; empty if none begins."""
        match span.kind:
            case "client":
                inner = self._below.get(span.span_id, ())
                served = [one.service for one in inner if one.kind == "server"]
                return f"{span.service} → {served[0] if served else 'a peer'} {span.name}"
            case "producer":
                return f"{span.service} → redis {span.name}"
            case "consumer":
                return f"redis → {span.service} {span.name}"
        return ""
