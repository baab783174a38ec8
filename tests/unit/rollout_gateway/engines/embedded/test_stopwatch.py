"""Laps of a stopwatch."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.services.rollout_gateway.engines.requests.timing import Stopwatch


def test_laps_are_of_the_last_start_and_totals_of_all() -> None:
    times: Iterator[float] = iter((10.0, 11.0, 14.0, 20.0, 22.0))
    stopwatch = Stopwatch(lambda: next(times))
    stopwatch.start()
    stopwatch.lap("draft")
    stopwatch.lap("forward")
    assert stopwatch.laps == {"draft": 1.0, "forward": 3.0}
    assert stopwatch.seconds == 4.0
    stopwatch.start()
    stopwatch.lap("draft")
    assert (stopwatch.laps, stopwatch.seconds) == ({"draft": 2.0}, 2.0)
    assert stopwatch.totals == {"draft": 3.0, "forward": 3.0}
