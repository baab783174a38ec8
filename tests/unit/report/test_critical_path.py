"""The critical path of steps with an expected path."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.report.spans import SpanRecord
from paceline.report.why import critical_path
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


def path_of(spans: Sequence[SpanRecord]) -> dict[str, float]:
    """Milliseconds of the path by name of the span."""
    found: dict[str, float] = {}
    for (_, name), spent_ns in critical_path(spans).items():
        found[name] = found.get(name, 0.0) + spent_ns / MS
    return found


def root(end_ms: float = 100, service: str = "gateway") -> SpanRecord:
    return one(names.STEP, "1", 0, end_ms, service=service)


def test_what_no_span_below_covers_is_the_spans_own_time() -> None:
    spans = [root(), one("b", "2", 20, 50, "1"), one("c", "3", 60, 95, "1")]
    assert path_of(spans) == {names.STEP: 35, "b": 30, "c": 35}


def test_of_spans_side_by_side_the_last_to_end_was_waited_for() -> None:
    spans = [
        root(),
        one("short", "2", 0, 40, "1"),
        one("long", "3", 1, 99, "1"),
        one("middle", "4", 0, 80, "1"),
    ]
    assert path_of(spans) == {names.STEP: 2, "long": 98}


def test_a_span_that_outlives_its_parent_held_nothing_up() -> None:
    spans = [root(), one("work", "2", 10, 90, "1"), one("background", "3", 60, 400, "1")]
    assert path_of(spans) == {names.STEP: 20, "work": 80}


def test_a_server_that_notes_its_end_after_its_caller_is_still_what_was_waited_for() -> None:
    spans = [
        root(service="coordinator"),
        one("P.Train", "2", 10, 90, "1", "client", "coordinator"),
        one("train", "3", 11, 130, "2", "server", "policy_trainer"),
    ]
    call = "coordinator → policy_trainer P.Train"
    assert critical_path(spans) == {
        ("coordinator", names.STEP): 20 * MS,
        (call, "P.Train"): 1 * MS,
        (call, "train"): 79 * MS,
    }


def test_a_gap_in_which_another_span_ran_was_waited_for_it() -> None:
    spans = [  # the last answer of the stream was used before the stream closed
        root(200),
        one("stream", "2", 0, 120, "1"),
        one("next", "3", 90, 200, "1"),
    ]
    assert path_of(spans) == {"stream": 90, "next": 110}


def test_streams_between_services_are_edges_of_their_own() -> None:
    spans = [
        root(service="coordinator"),
        one("append", "2", 0, 40, "1", "producer", "gateway"),
        one("read", "3", 50, 100, "1", "consumer", "policy_trainer"),
    ]
    edges = {edge for edge, _ in critical_path(spans)}
    assert edges == {"gateway → redis append", "coordinator", "redis → policy_trainer read"}


def test_a_step_that_two_coordinators_began_is_one_step() -> None:
    spans = [
        one(names.STEP, "2", 50, 100, "killed"),
        one(names.STEP, "1", 0, 40, ""),
        one("orphan", "3", 20, 35, "killed too"),
    ]
    assert path_of(spans) == {names.STEP: 85, "orphan": 15}


def test_spans_that_are_their_own_ancestors_end_the_walk() -> None:
    spans = [
        root(),
        one("b", "2", 0, 100, "3"),
        one("c", "3", 0, 100, "2"),
        one("d", "4", 10, 90, "1"),
    ]
    assert sum(path_of(spans).values()) == 100


@st.composite
def traces(draw: st.DrawFn) -> list[SpanRecord]:
    """Spans under one root, below each other in any way, that may outlive their parents."""
    spans = [root(1000)]
    for number in range(2, draw(st.integers(2, 25))):
        parent = draw(st.integers(1, number - 1))
        start = draw(st.integers(0, 1000))
        end = start + draw(st.integers(0, 1500))
        kind = draw(st.sampled_from(["internal", "client", "server", "producer"]))
        spans.append(one(f"s{number % 4}", str(number), start, end, str(parent), kind))
    return spans


@given(traces())
def test_the_path_is_as_long_as_the_step_and_no_span_is_longer_than_itself(
    spans: list[SpanRecord],
) -> None:
    path = path_of(spans)
    assert sum(path.values()) == 1000
    for name, spent_ms in path.items():
        assert (
            spent_ms
            <= sum((one.end_ns - one.start_ns) / 1e6 for one in spans if one.name == name) + 1e-6
        )
