"""Counts the use that a drafter made of the slots that engines left idle, and the use allowed.

The rules: the slots of an idle worker may train the drafter while another worker generates, or
while a learner works on its own slots. Training begins as soon as the engine has given the memory
back. On the first slots it begins once the drafter has moved there. No other time is lost. The
allowed use is computed from a run without a drafter, so neither the machine nor its drafter
influences it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.simulation.run import VirtualRun
from benchmarks.simulation.slot_clock import Interval
from paceline.streams.journal import SlotUse


def idle_slot_s(undisturbed: VirtualRun) -> float:
    """Slot-seconds that engines leave idle while other engines compute."""
    return sum(one.end_s - one.begin_s for one in _idle(undisturbed))


def allowed_slot_s(undisturbed: VirtualRun) -> float:
    """Slot-seconds in which the rules let the drafter train; every step counts alone."""
    fleet = undisturbed.fleet
    found = trains_s = last_s = 0.0
    for one in _idle(undisturbed):
        released_s = one.begin_s + fleet.message_s + fleet.release_s
        if one.begin_s >= last_s:  # no slot is idle any more: a new activation
            trains_s = released_s + fleet.activate_s
        last_s = max(last_s, one.end_s)
        found += max(0.0, one.end_s - max(released_s, trains_s))
    return found


def harvested_slot_s(run: VirtualRun) -> float:
    """Slot-seconds in which the drafter trained while another holder computed."""
    return sum(one.end_s - one.begin_s for one in _while_others_compute(run, SlotUse.DRAFTER))


def _idle(run: VirtualRun) -> list[Interval]:
    """Idle slots of workers while another holder computes, by begin."""
    return sorted(_while_others_compute(run, SlotUse.IDLE), key=lambda one: one.begin_s)


def _while_others_compute(run: VirtualRun, use: SlotUse) -> list[Interval]:
    """Intervals of a use of workers' slots, cut to the times at which other slots generate or train
    a policy.
    """
    engine = run.settings.engine_slots

    def computes(one: Interval) -> bool:
        own = one.slot >= engine and one.use is not SlotUse.IDLE
        return own or one.use is SlotUse.GENERATING

    windows = _joined(run.slots.intervals, computes)
    pieces: list[Interval] = []
    used = sorted(
        (one for one in run.slots.intervals if one.use is use and one.slot < engine),
        key=lambda one: one.begin_s,
    )
    first = 0
    for one in used:
        while first < len(windows) and windows[first][1] <= one.begin_s:
            first += 1
        for begin_s, end_s in windows[first:]:
            if begin_s >= one.end_s:
                break
            piece = one._replace(begin_s=max(begin_s, one.begin_s), end_s=min(end_s, one.end_s))
            pieces.append(piece)
    return pieces


def _joined(
    intervals: Iterable[Interval], chosen: Callable[[Interval], bool]
) -> Sequence[tuple[float, float]]:
    """Times at which at least one of the chosen intervals lasts: begins and ends, in order."""
    windows: list[tuple[float, float]] = []
    for begin_s, end_s in sorted((one.begin_s, one.end_s) for one in intervals if chosen(one)):
        if windows and begin_s <= windows[-1][1]:
            windows[-1] = (windows[-1][0], max(end_s, windows[-1][1]))
        else:
            windows.append((begin_s, end_s))
    return windows
