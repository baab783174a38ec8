"""An oracle for journals: no slot has two holders at once."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.journal import SlotInterval, StepWindow


def overlaps(intervals: Sequence[SlotInterval]) -> list[tuple[SlotInterval, SlotInterval]]:
    """Pairs of intervals that share time on one slot; empty in a right journal."""
    found: list[tuple[SlotInterval, SlotInterval]] = []
    ordered = sorted(intervals, key=lambda one: (one.slot, one.start_s, one.end_s))
    for i, earlier in enumerate(ordered):
        for later in ordered[i + 1 :]:
            if later.slot != earlier.slot or later.start_s >= earlier.end_s:
                break
            if later.end_s > later.start_s:
                found.append((earlier, later))
    return found


def held_seconds(
    intervals: Sequence[SlotInterval], holder: str, windows: Sequence[StepWindow]
) -> float:
    """Slot-seconds of one holder inside the windows."""
    return sum(
        max(0.0, min(interval.end_s, window.end_s) - max(interval.start_s, window.start_s))
        for interval in intervals
        if interval.holder == holder
        for window in windows
    )
