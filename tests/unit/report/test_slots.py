"""Slot intervals and slot-seconds against a journal worked out by hand."""

from __future__ import annotations

from typing import Any

from slot_overlaps import held_seconds, overlaps

from paceline.report.figures import CHARTS
from paceline.report.journal import SlotInterval, StepWindow, slot_intervals, step_windows
from paceline.streams.journal import SlotUse


def entry(
    at_s: float, event: str, *slots: tuple[int, str, int], step: int = 0, **more: Any
) -> dict[str, Any]:
    changes = [[s, 1, h, e] for s, h, e in slots]
    return {"at_s": at_s, "event": event, "step": step, "slots": changes, **more}


JOURNAL = [
    entry(0.0, "RunStarted", (0, "none", 0), (1, "none", 0)),
    entry(1.0, "StepBegan", (0, "engine", 1), (1, "engine", 1), data={"step": 0}),
    entry(3.0, "ShareDone", (0, "drafter", 2)),
    entry(5.0, "TasksFinished", (1, "none", 1)),
    entry(6.0, "Preempted", (0, "policy", 3), (1, "policy", 3)),
    entry(8.0, "PolicyStepped", (0, "none", 3), (1, "none", 3)),
    entry(9.0, "Committed", record={"reward_mean": 1.0}),
    entry(12.0, "EvaluationDone"),
]
WINDOWS = [StepWindow(0, 1.0, 9.0)]


def test_intervals_are_cut_where_the_holder_or_the_epoch_changes() -> None:
    intervals = slot_intervals(JOURNAL)
    assert [one for one in intervals if one.slot == 0] == [
        SlotInterval(0, "none", 0.0, 1.0, 0, 0),
        SlotInterval(0, "engine", 1.0, 3.0, 1, 0),
        SlotInterval(0, "drafter", 3.0, 6.0, 2, 0),
        SlotInterval(0, "policy", 6.0, 8.0, 3, 0),
        SlotInterval(0, "none", 8.0, 12.0, 3, 0),
    ]


def test_a_window_runs_from_the_step_s_begin_to_its_record_and_omitted_zeros_count() -> None:
    assert step_windows(JOURNAL) == WINDOWS


def test_slot_seconds_of_all_holders_make_up_the_wall() -> None:
    intervals = slot_intervals(JOURNAL)
    holders = ("engine", "policy", "drafter", "none")
    seconds = {holder: held_seconds(intervals, holder, WINDOWS) for holder in holders}
    assert (seconds["engine"], seconds["drafter"], seconds["none"]) == (6.0, 3.0, 3.0)
    assert sum(seconds.values()) == 2 * WINDOWS[0].seconds == 16.0


def test_a_range_of_slots_changes_hands_at_once() -> None:
    whole = entry(0.0, "a") | {"slots": [[0, 3, "engine", 1]]}
    found = slot_intervals([whole, entry(2.0, "b", (1, "none", 1)), entry(3.0, "c")])
    assert [(one.slot, one.holder, one.seconds) for one in found] == [
        (1, "engine", 2.0),
        (0, "engine", 3.0),
        (1, "none", 1.0),
        (2, "engine", 3.0),
    ]


def test_overlaps_are_found_on_one_slot_only() -> None:
    engine = SlotInterval(0, "engine", 0.0, 4.0, 1, 0)
    drafter = SlotInterval(0, "drafter", 3.0, 5.0, 2, 0)
    assert overlaps([drafter, engine, SlotInterval(1, "drafter", 0.0, 9.0, 2, 0)]) == [
        (engine, drafter)
    ]
    assert overlaps(slot_intervals(JOURNAL)) == []


def test_the_chart_of_the_slots_has_every_use_of_a_slot_and_no_other() -> None:
    (chart,) = (one for one in CHARTS if one.title == "What the slots did")
    assert list(chart.figures) == [f"slot_s/{use}" for use in SlotUse]
