"""Derives slot holders over time from a run's journal, and counts slot-seconds.

A journal entry is plain JSON: `at_s` (wall clock, seconds), `event`, `step`, and under `slots` the
slots that the event changed: `[first, count, holder, epoch]`. A step's window runs from its
StepBegan, or from the end of the previous step if that is later, to the entry that carries its
`record`. Evaluations are outside all windows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlotInterval:
    """One holder had one slot during [start_s, end_s)."""

    slot: int
    holder: str  # "engine", "policy", "drafter" or "none"
    start_s: float
    end_s: float
    epoch: int
    step: int

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The timed part of one step."""

    step: int
    start_s: float
    end_s: float


def slot_intervals(entries: Iterable[Entry]) -> list[SlotInterval]:
    """All intervals in the order of their ends; an open interval ends with the last entry."""
    intervals: list[SlotInterval] = []
    held: dict[int, SlotInterval] = {}
    now = 0.0
    for entry in entries:
        now = float(entry["at_s"])
        for first, count, holder, epoch in entry.get("slots", ()):
            for slot in range(first, first + count):
                before = held.get(slot)
                if before is not None:
                    intervals.append(replace(before, end_s=now))
                held[slot] = SlotInterval(slot, holder, now, now, epoch, int(entry["step"]))
    return intervals + [replace(held[slot], end_s=now) for slot in sorted(held)]


def step_windows(entries: Iterable[Entry]) -> list[StepWindow]:
    """Windows of the finished steps, in order."""
    began: dict[int, float] = {}
    windows: list[StepWindow] = []
    for entry in entries:
        if entry["event"] == "StepBegan":
            began.setdefault(int(entry["data"]["step"]), float(entry["at_s"]))
        if entry.get("record"):
            step = int(entry["record"].get("step", 0))
            start_s = max(began[step], windows[-1].end_s if windows else 0.0)
            windows.append(StepWindow(step, start_s, float(entry["at_s"])))
    return windows


def held_seconds(
    intervals: Iterable[SlotInterval], holder: str, windows: Sequence[StepWindow]
) -> float:
    """Slot-seconds of one holder inside the windows."""
    return sum(
        max(0.0, min(interval.end_s, window.end_s) - max(interval.start_s, window.start_s))
        for interval in intervals
        if interval.holder == holder
        for window in windows
    )


def slot_seconds(
    intervals: Sequence[SlotInterval], windows: Sequence[StepWindow], slots: int
) -> dict[str, float]:
    """Slot-seconds: held by the drafter in and outside windows, free inside windows, and in all
    windows.
    """
    return {
        "drafter_train_slot_s": sum(one.seconds for one in intervals if one.holder == "drafter"),
        "idle_slot_s": held_seconds(intervals, "none", windows),
        "slot_wall_s": slots * sum(window.end_s - window.start_s for window in windows),
    }
