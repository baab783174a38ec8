"""The state of a terminal view and its drawing."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from paceline.cli.picture import clock, draw, remaining_s, slot_line, sparkline
from paceline.cli.run_state import NOTES_KEPT, STEPS_KEPT, RunState, SlotChange, step_line
from paceline.local.child import ChildEvent
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext, VersionSet


def record(step: int, **more: object) -> pb.StepRecord:
    return pb.StepRecord(
        step=step,
        versions=VersionSet(policy=step, drafter=step // 5),
        reward_mean=0.5,
        response_tokens=4000,
        rollout_s=2.0,
        step_s=4.0,
        accept_length=1.5 + step,
        arm_rounds={"off": 30, "eagle:3_1_4": 10},
        drafter_steps=2,
        finished_at_s=100.0 + 4 * step,
        **more,  # type: ignore[arg-type]
    )


def slot_fact(slot: int, holder: int, at_s: float) -> pb.Fact:
    status = pb.SlotStatus(slot=slot, holder=holder)
    return pb.Fact(
        context=CommandContext(step=1), at_s=at_s, slot_changed=pb.SlotChanged(slot=status)
    )


def finished(step: int, **more: object) -> pb.Fact:
    return pb.Fact(
        context=CommandContext(step=step),
        step_finished=pb.StepFinished(record=record(step, **more)),
    )


def text_of(state: RunState, width: int = 100) -> str:
    console = Console(width=width, file=StringIO())
    console.print(draw(state, 110.0, 65.0, width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_step_is_told_once_and_amended_by_its_evaluation() -> None:
    state = RunState("demo-0-1", 10)
    assert state.take_fact(finished(0)) is not None
    assert state.take_fact(finished(0, evaluations={"accuracy": 0.6})) is None
    assert len(state.records) == 1
    assert state.newest("accuracy") == 0.6


def test_a_step_that_was_missed_is_put_in_its_place() -> None:
    state = RunState("demo-0-1", 10)
    assert state.take_fact(finished(1)) is not None
    assert state.complete == 0
    assert state.take_fact(finished(0)) is not None
    assert [kept.step for kept in state.records] == [0, 1]
    assert state.complete == 2


def test_a_run_that_has_not_begun_says_nothing_about_its_length() -> None:
    state = RunState("demo-0-1", 10)
    state.take_snapshot(pb.GetSnapshotResponse(phase="new", total_steps=1), 0.0)
    assert (state.total_steps, state.phase) == (10, "starting")
    state.take_snapshot(pb.GetSnapshotResponse(phase="evaluate", total_steps=12), 0.0)
    assert (state.total_steps, state.phase) == (12, "evaluate")


def test_the_state_is_bounded() -> None:
    state = RunState("demo-0-1", 10_000)
    for step in range(STEPS_KEPT + 50):
        state.take_fact(finished(step))
        state.take_event(ChildEvent("gateway", "died", step))
    assert len(state.records) == STEPS_KEPT
    assert len(state.notes) == NOTES_KEPT
    assert len(state.acceptance) == 6


def test_a_failed_run_that_begins_again_is_not_failed() -> None:
    state = RunState("demo-0-1", 10)
    state.take_fact(pb.Fact(run_finished=pb.RunFinished(failure="the gateway kept failing")))
    assert (state.finished, state.phase) == (True, "failed")
    state.take_fact(pb.Fact(context=CommandContext(step=4), step_began=pb.StepBegan(samples=8)))
    assert (state.finished, state.failure, state.phase, state.step) == (False, "", "rollout", 4)


def test_the_timeline_shows_who_held_a_slot_at_the_end_of_each_moment() -> None:
    changes = [
        SlotChange(2.0, 0, "engine"),
        SlotChange(6.0, 0, "drafter"),
        SlotChange(3.0, 1, "policy"),
    ]
    line = slot_line(changes, 0, now_s=10.0, width=10, seconds=10.0)
    assert line.plain == " " + "█" * 9
    styles = {str(span.style): span.end - span.start for span in line.spans}
    assert [style for span in line.spans if (style := str(span.style))] == ["blue"] * 4 + [
        "green"
    ] * 5
    assert set(styles) == {"blue", "green"}


def test_a_sparkline_maps_the_newest_values_between_their_extremes() -> None:
    assert sparkline([9.0, 0.0, 1.0, 2.0], 3) == "▁▅█"
    assert sparkline([2.0, 2.0], 5) == "▁▁"
    assert sparkline([], 5) == ""


def test_the_time_left_follows_the_pace_of_the_steps() -> None:
    state = RunState("demo-0-1", 10)
    state.take_fact(finished(0))
    assert remaining_s(state) is None
    state.take_fact(finished(3))
    assert remaining_s(state) == pytest.approx(6 * 4.0)
    assert clock(125.9) == "2:05"


def test_the_picture_shows_services_first_and_then_the_run() -> None:
    state = RunState("demo-0-1", 10)
    state.take_event(ChildEvent("redis", "healthy", 1))
    state.take_event(ChildEvent("gateway", "started", 2))
    assert "✓ redis" in text_of(state)
    assert "… gateway" in text_of(state)
    for step in range(6):
        state.take_fact(finished(step, evaluations={"accuracy": 0.6, "accept_length_probe": 2.25}))
    state.take_fact(slot_fact(0, pb.HOLDER_DRAFTER, 105.0))
    state.take_fact(
        pb.Fact(
            version_committed=pb.VersionCommitted(versions=VersionSet(seq=6, policy=6, drafter=1))
        )
    )
    state.take_event(ChildEvent("gateway", "died", 2, "was killed by SIGKILL"))
    shown = text_of(state)
    for part in (
        "step 6 of 10",
        "0.600",
        "2,000",
        "2.25",
        "d1 6.50",
        "off 75%",
        "eagle:3_1_4 25%",
        "p6.d1",
        "slot 0",
    ):
        assert part in shown
    for part in (
        "1:05 elapsed",
        "0:16 left",
        "drafter training",
        "gateway died: was killed by SIGKILL",
    ):
        assert part in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_fits_its_width(width: int) -> None:
    state = RunState("demo-0-1", 500)
    for step in range(300):
        state.take_fact(finished(step))
    state.take_fact(slot_fact(0, pb.HOLDER_ENGINE, 100.0))
    assert max(len(line) for line in text_of(state, width).splitlines()) <= width


def test_a_finished_step_is_one_line() -> None:
    line = step_line(record(4, evaluations={"accuracy": 0.5}), 10)
    assert "\n" not in line
    for part in (
        "step 5/10",
        "reward 0.500",
        "2,000 tokens/s",
        "acceptance 5.50",
        "p4.d0",
        "held-out accuracy 0.500",
    ):
        assert part in line
