"""Live acceptance across a change of drafter."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.state import DrawnStep, Phase, RolloutTrack, State
from paceline.services.coordinator.transitions import AcceptanceWatch
from paceline.trajectory import VersionSet


def observe(
    watch: AcceptanceWatch, drafter: int, tokens: int, rounds: int
) -> Mapping[str, float] | None:
    draws, versions = (DrawnStep(0, 0, epoch=1, called=True),), VersionSet(1, 1, drafter)
    state = State(phase=Phase.RUNNING, rollouts=RolloutTrack(draws=draws), versions=versions)
    figures = {"trained_round_tokens": tokens, "trained_rounds": rounds}
    return watch.observe(state, events.TasksFinished(1.0, 1, figures))


def compare(watch: AcceptanceWatch, *steps: tuple[int, float]) -> list[Mapping[str, float] | None]:
    return [observe(watch, drafter, round(length * 100), 100) for drafter, length in steps]


def test_a_fall_is_told_once_with_both_lengths() -> None:
    told = compare(AcceptanceWatch(drop=0.3), (1, 3.0), (2, 2.5), (2, 2.0))
    assert told == [None, {"before": 3.0, "now": 2.5, "drop": 0.3}, None]


def test_a_rise_or_a_small_fall_is_not_told() -> None:
    assert compare(AcceptanceWatch(0.3), (1, 3.0), (2, 3.5), (3, 3.3), (4, 3.1)) == [None] * 4


def test_the_step_just_before_the_change_is_compared() -> None:
    told = compare(AcceptanceWatch(0.3), (1, 9.0), (1, 3.0), (2, 2.5))
    assert told[2] == {"before": 3.0, "now": 2.5, "drop": 0.3}


def test_the_first_drafter_and_a_watch_that_is_off_tell_nothing() -> None:
    assert compare(AcceptanceWatch(0.3), (1, 1.0)) == [None]
    assert compare(AcceptanceWatch(0.0), (1, 3.0), (2, 1.0)) == [None, None]


def test_steps_without_drafts_do_not_count() -> None:
    watch = AcceptanceWatch(0.3)
    assert observe(watch, 1, 300, 100) is None
    assert observe(watch, 2, 0, 0) is None
    assert observe(watch, 2, 200, 100) == {"before": 3.0, "now": 2.0, "drop": 0.3}


def test_only_finished_rollouts_of_the_running_step_are_taken() -> None:
    watch = AcceptanceWatch(0.3)
    good = {"trained_round_tokens": 300, "trained_rounds": 100}
    worse = {"trained_round_tokens": 200, "trained_rounds": 100}

    def rolling_out(version: int, *, called: bool = True) -> State:
        draws = (DrawnStep(0, 0, epoch=version, called=called),)
        versions = VersionSet(version, version, version)
        return State(phase=Phase.RUNNING, rollouts=RolloutTrack(draws=draws), versions=versions)

    first, second, late = rolling_out(1), rolling_out(2), rolling_out(2, called=False)
    assert watch.observe(first, events.TasksFinished(1.0, 1, good)) is None
    assert watch.observe(late, events.TasksFinished(2.0, 1, worse)) is None
    assert watch.observe(second, events.TasksFinished(2.5, 1, worse)) is None, "of a former call"
    assert watch.observe(second, events.PolicyStepped(3.0, 1, 1, worse)) is None
    assert watch.observe(second, events.TasksFinished(4.0, 2)) is None
    fell = watch.observe(second, events.TasksFinished(5.0, 2, worse))
    assert fell == {"before": 3.0, "now": 2.0, "drop": 0.3}
