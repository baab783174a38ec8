"""The critical path of traces whose path is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.report.critical_path import CALLER, critical_path, merged_pieces, tree_of
from paceline.report.spans import SpanRecord
from paceline.telemetry import names

MS = 1_000_000


def one(
    name: str,
    span_id: str,
    start_ms: float,
    end_ms: float,
    parent: str = "",
    kind: str = "internal",
    service: str = "gateway",
) -> SpanRecord:
    times = (int(start_ms * MS), int(end_ms * MS))
    return SpanRecord("t", span_id, parent, name, kind, service, *times)


def path_of(spans: Sequence[SpanRecord]) -> list[tuple[str, float, float]]:
    """Name, begin and end of the pieces in ms."""
    pieces = critical_path(*tree_of(spans))
    return [(piece.span.name, piece.start_ns / MS, piece.end_ns / MS) for piece in pieces]


def test_what_no_span_below_covers_is_the_spans_own_time() -> None:
    spans = [one("a", "1", 0, 100), one("b", "2", 20, 50, "1"), one("c", "3", 60, 95, "1")]
    assert path_of(spans) == [
        ("a", 0, 20),
        ("b", 20, 50),
        ("a", 50, 60),
        ("c", 60, 95),
        ("a", 95, 100),
    ]


def test_of_spans_side_by_side_the_last_to_end_was_waited_for() -> None:
    spans = [
        one("a", "1", 0, 100),
        one("short", "2", 0, 40, "1"),
        one("long", "3", 1, 99, "1"),
        one("middle", "4", 0, 80, "1"),
    ]
    assert path_of(spans) == [("a", 0, 1), ("long", 1, 99), ("a", 99, 100)]


def test_a_span_that_outlives_its_parent_held_nothing_up() -> None:
    spans = [
        one("a", "1", 0, 100),
        one("work", "2", 10, 90, "1"),
        one("background", "3", 60, 400, "1"),
    ]
    assert path_of(spans) == [("a", 0, 10), ("work", 10, 90), ("a", 90, 100)]


def test_a_server_that_notes_its_end_after_its_caller_is_still_what_was_waited_for() -> None:
    spans = [
        one("step", "1", 0, 100, service="coordinator"),
        one("P.Train", "2", 10, 90, "1", "client", "coordinator"),
        one("P.Train", "3", 11, 130, "2", "server", "policy_trainer"),
    ]
    pieces = critical_path(*tree_of(spans))
    assert [(piece.span.service, piece.seconds) for piece in pieces] == [
        ("coordinator", 0.01),
        ("coordinator", 0.001),
        ("policy_trainer", 0.079),
        ("coordinator", 0.01),
    ]
    assert [piece.edge for piece in pieces] == [
        "coordinator",
        "coordinator → policy_trainer P.Train",
        "coordinator → policy_trainer P.Train",
        "coordinator",
    ]


def test_a_gap_in_which_another_span_ran_was_waited_for_it() -> None:
    spans = [  # a stream whose last answer was acted on before it was closed
        one("step", "1", 0, 200),
        one("stream", "2", 0, 120, "1"),
        one("next", "3", 90, 200, "1"),
    ]
    assert path_of(spans) == [("stream", 0, 90), ("next", 90, 200)]


def test_streams_between_services_are_edges_of_their_own() -> None:
    spans = [
        one("step", "1", 0, 100, service="coordinator"),
        one("append", "2", 0, 40, "1", "producer", "gateway"),
        one("read", "3", 50, 100, "1", "consumer", "policy_trainer"),
    ]
    edges = [piece.edge for piece in critical_path(*tree_of(spans))]
    assert edges == ["gateway → redis append", "coordinator", "redis → policy_trainer read"]


def test_a_step_that_two_coordinators_began_is_one_step() -> None:
    spans = [
        one(names.STEP, "2", 50, 100, "killed"),
        one(names.STEP, "1", 0, 40, ""),
        one("orphan", "3", 20, 35, "killed too"),
    ]
    root, _ = tree_of(spans)
    assert (root.start_ns, root.end_ns) == (0, 100 * MS)
    assert path_of(spans)[1] == ("orphan", 20, 35)


def test_calls_of_a_caller_outside_the_run_have_it_as_their_root() -> None:
    spans = [one("http.request", "1", 10, 20, "agent"), one("http.request", "2", 40, 60, "agent")]
    root, _ = tree_of(spans)
    assert (root.name, root.start_ns, root.end_ns) == (CALLER, 10 * MS, 60 * MS)
    assert path_of(spans)[1] == (CALLER, 20, 40)


def test_spans_that_are_their_own_ancestors_end_the_walk() -> None:
    spans = [
        one("a", "1", 0, 100),
        one("b", "2", 0, 100, "3"),
        one("c", "3", 0, 100, "2"),
        one("d", "4", 10, 90, "1"),
    ]
    assert sum(end - start for _, start, end in path_of(spans)) == 100


def test_neighbours_of_a_kind_are_one_piece_about_the_longest() -> None:
    spans = [
        one("a", "0", 0, 100),
        one("m", "1", 0, 20, "0"),
        one("m", "2", 20, 80, "0"),
        one("m", "3", 80, 100, "0"),
    ]
    (merged,) = merged_pieces(critical_path(*tree_of(spans)))
    assert (merged.span.span_id, merged.seconds) == ("2", 0.1)


@st.composite
def traces(draw: st.DrawFn) -> list[SpanRecord]:
    """Spans under one root, below each other in any way, that may outlive their parents."""
    spans = [one("root", "0", 0, 1000)]
    for number in range(1, draw(st.integers(1, 25))):
        parent = draw(st.integers(0, number - 1))
        start = draw(st.integers(0, 1000))
        end = start + draw(st.integers(0, 1500))
        kind = draw(st.sampled_from(["internal", "client", "server", "producer"]))
        spans.append(one(f"s{number % 4}", str(number), start, end, str(parent), kind))
    return spans


@given(traces())
def test_the_pieces_cover_the_root_without_gap_or_overlap(spans: list[SpanRecord]) -> None:
    pieces = critical_path(*tree_of(spans))
    assert (pieces[0].start_ns, pieces[-1].end_ns) == (0, 1000 * MS)
    for before, after in pairwise(pieces):
        assert before.end_ns == after.start_ns
    by_id = {span.span_id: span for span in spans}
    for piece in pieces:
        span = by_id[piece.span.span_id]
        assert span.start_ns <= piece.start_ns < piece.end_ns <= span.end_ns
