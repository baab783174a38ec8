"""Counts work on a slot, shown by spans, while the journal has another holder for the slot."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.report.journal import Entry, SlotInterval, read_entries, slot_intervals
from paceline.report.spans import SpanRecord, read_spans
from paceline.telemetry import names

WORK = {
    names.ENGINE_BUSY: "engine",
    names.OPTIMIZER_STEP: "policy",
    names.DRAFTER_MICRO_STEP: "drafter",
}
"""Spans of work that needs a slot -> its holder."""


def read_trespasses(run: Path) -> dict[str, int]:
    """As `trespasses`, from the journal and the spans in the directory of an ended run."""
    return trespasses(list(read_entries(run / "journal.jsonl")), read_spans(run / "spans"))


def trespasses(entries: Sequence[Entry], spans: Iterable[SpanRecord]) -> dict[str, int]:
    """By holder, pieces of work during which another holder had one of its slots: stretches of
    engine rounds, optimiser steps, and the drafter's micro-steps. All 0 in a correct run.

    A trainer's lease of a worker's slot counts from the entry WorkersReleased of its epoch and
    worker. Until then the slot is still the engine's, which is returning its memory. Slots of the
    learner's own have no worker.
    """
    leases = _Leases(entries)
    found = dict.fromkeys(WORK.values(), 0)
    for span in spans:
        if span.name in WORK:
            found[WORK[span.name]] += leases.trespassed(span)
    return found


class _Leases:
    """Holders of each slot over time, as far as a holder excludes others."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._of_slot: dict[int, list[SlotInterval]] = defaultdict(list)
        self._of_epoch: dict[int, list[int]] = defaultdict(list)  # a drafter's lease -> its slots
        self._of_policy: set[int] = set()
        self._per_worker, engine_slots = 1, 0
        released: dict[tuple[int, int], float] = {}  # by epoch and worker
        for entry in entries:
            if entry["event"] == "WorkersReleased":
                data, at_s = entry["data"], float(entry["at_s"])
                for worker in data["details"]["workers"]:
                    released.setdefault((int(data["epoch"]), int(worker)), at_s)
            elif entry["event"] == "RunStarted":
                settings = entry["data"].get("settings", {})
                self._per_worker = int(settings.get("slots_per_worker", 1))
                engine_slots = int(settings.get("workers", 1)) * self._per_worker
        for interval in slot_intervals(entries):
            if interval.holder == "drafter":
                self._of_epoch[interval.epoch].append(interval.slot)
            elif interval.holder == "policy":
                self._of_policy.add(interval.slot)
            worker = interval.slot // self._per_worker
            lent = interval.slot < engine_slots
            began_s = released.get((interval.epoch, worker), interval.end_s)
            self._of_slot[interval.slot] += _binding(
                interval, began_s if lent else interval.start_s
            )
        for held in self._of_slot.values():
            held.sort(key=lambda one: one.end_s)

    def trespassed(self, span: SpanRecord) -> bool:
        """Whether another holder had a slot of this work, or no lease for it ever existed."""
        slots, holder = list(self._slots(span)), WORK[span.name]
        start_s, end_s = span.start_ns / 1e9, span.end_ns / 1e9
        return not slots or any(
            one.holder != holder and max(one.start_s, start_s) < min(one.end_s, end_s)
            for slot in slots
            for one in self._of_slot[slot][
                bisect_left(self._of_slot[slot], start_s, key=lambda held: held.end_s) :
            ]
        )

    def _slots(self, span: SpanRecord) -> Iterable[int]:
        match WORK[span.name]:
            case "engine":
                first = int(span.attributes.get(names.WORKER, 0)) * self._per_worker
                return range(first, first + self._per_worker)
            case "drafter":
                leased = self._of_epoch.get(int(span.attributes.get(names.EPOCH, 0)), ())
                trained_on = span.attributes.get(names.SLOTS, leased)
                return tuple(trained_on) if leased else ()
            case _:
                return self._of_policy


def _binding(interval: SlotInterval, released_s: float) -> Iterator[SlotInterval]:
    if interval.holder == "engine":
        yield interval
    elif interval.holder in ("policy", "drafter"):
        began_s = min(released_s, interval.end_s)
        if began_s > interval.start_s:
            yield replace(interval, holder="engine", end_s=began_s)
        yield replace(interval, start_s=began_s)
