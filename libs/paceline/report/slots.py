"""Who held which slot when, from the entries of a run's journal. Owns the arithmetic of
slot-seconds, no drawing.

A journal entry is plain JSON: `at_s` (wall clock, seconds), `event`, `step`, and under `slots` the
slots that the event changed: `{"slot", "holder", "epoch", "worker_state"}`. A step's window runs
from its StepBegan to the entry that carries its `record`; evaluations lie outside all windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        """Length."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The timed part of one step."""

    step: int
    start_s: float
    end_s: float


def slot_intervals(entries: Iterable[Entry]) -> list[SlotInterval]:
    """All intervals in the order in which they end; those still open end with the last entry."""
    intervals: list[SlotInterval] = []
    held: dict[int, tuple[str, float, int, int]] = {}
    now = 0.0
    for entry in entries:
        now = float(entry["at_s"])
        for change in entry.get("slots", ()):
            slot = int(change["slot"])
            holder, epoch = str(change["holder"]), int(change["epoch"])
            before = held.get(slot)
            if before is not None and before[0] == holder and before[2] == epoch:
                continue  # only the worker's state changed
            if before is not None:
                intervals.append(
                    SlotInterval(slot, before[0], before[1], now, before[2], before[3])
                )
            held[slot] = (holder, now, epoch, int(entry["step"]))
    intervals += [
        SlotInterval(slot, h[0], h[1], now, h[2], h[3]) for slot, h in sorted(held.items())
    ]
    return intervals


def step_windows(entries: Iterable[Entry]) -> list[StepWindow]:
    """Windows of the finished steps, in order."""
    began: dict[int, float] = {}
    windows: list[StepWindow] = []
    for entry in entries:
        if entry["event"] == "StepBegan":
            began.setdefault(int(entry["data"]["step"]), float(entry["at_s"]))
        if entry.get("record"):
            step = int(entry["record"].get("step", 0))
            windows.append(StepWindow(step, began[step], float(entry["at_s"])))
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


def drafter_train_slot_s(intervals: Iterable[SlotInterval]) -> float:
    """Slot-seconds that the drafter held, in and outside windows."""
    return sum(interval.seconds for interval in intervals if interval.holder == "drafter")


def idle_slot_s(intervals: Iterable[SlotInterval], windows: Sequence[StepWindow]) -> float:
    """Slot-seconds inside the windows that nobody held."""
    return held_seconds(intervals, "none", windows)


def slot_wall_s(slots: int, windows: Iterable[StepWindow]) -> float:
    """All slot-seconds inside the windows."""
    return slots * sum(window.end_s - window.start_s for window in windows)


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
