"""Live acceptance across a change of drafter."""

from __future__ import annotations

import pytest

from coordinator.watch import AcceptanceWatch


def observe(watch: AcceptanceWatch, *steps: tuple[int, float]) -> list[dict[str, float] | None]:
    return [watch.observe(drafter, round(length * 100), 100) for drafter, length in steps]


def test_a_fall_is_told_once_with_both_lengths() -> None:
    watch = AcceptanceWatch(drop=0.3, window_steps=1)
    told = observe(watch, (1, 3.0), (2, 2.5), (2, 2.0))
    assert told == [None, {"before": 3.0, "now": 2.5, "drop": 0.3}, None]


def test_a_rise_or_a_small_fall_is_not_told() -> None:
    assert observe(AcceptanceWatch(0.3, 1), (1, 3.0), (2, 3.5), (3, 3.3), (4, 3.1)) == [None] * 4


def test_windows_of_several_steps_are_compared_whole() -> None:
    told = observe(AcceptanceWatch(0.3, 2), (1, 3.0), (1, 3.2), (2, 2.0), (2, 3.0))
    assert told[:3] == [None] * 3
    assert told[3] is not None
    assert (told[3]["before"], told[3]["now"]) == (pytest.approx(3.1), pytest.approx(2.5))


def test_the_first_drafter_and_a_watch_that_is_off_tell_nothing() -> None:
    assert observe(AcceptanceWatch(0.3, 1), (1, 1.0)) == [None]
    assert observe(AcceptanceWatch(0.0, 1), (1, 3.0), (2, 1.0)) == [None, None]


def test_steps_without_drafts_do_not_count() -> None:
    watch = AcceptanceWatch(0.3, 1)
    assert watch.observe(1, 300, 100) is None
    assert watch.observe(2, 0, 0) is None
    assert watch.observe(2, 200, 100) == {"before": 3.0, "now": 2.0, "drop": 0.3}
