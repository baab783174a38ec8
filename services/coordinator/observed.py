"""Follows a run's transitions for its metrics: phases, leases, slots, samples, trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from paceline.errors import PacelineError
from paceline.services.coordinator import metrics
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.rollout import draw_of
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Service, State
from paceline.streams import Ledger
from paceline.telemetry import get_logger

COUNT_S = 5.0
"""Deadline for counting the ledger, seconds; after it the gauges keep their values."""


class ObservedRun:
    """The metrics of one run, from its first live transition on. Replayed transitions were counted
    by the earlier process.
    """

    def __init__(self, ledger: Ledger | None) -> None:
        """`ledger`: None counts no trajectories."""
        self._ledger = ledger
        self._due = asyncio.Event()
        self._since_s: float | None = None  # time of entry into the phases
        self._held: dict[Holder, int] = {}  # slots by holder, as last recorded
        self._lost: frozenset[Service] | None = None

    def observe(self, before: State, event: Event, after: State) -> None:
        """Processes one transition."""
        if self._since_s is None:
            self._since_s = event.at_s
        if after.doing != before.doing:
            metrics.PHASE_TIME.record(max(event.at_s - self._since_s, 0.0), phase=before.doing)
            self._since_s = event.at_s
        if after.lost != self._lost:
            self._lost = after.lost
            for service in Service:
                metrics.AWAY.record(int(service in after.lost), service=service)
        if after.slots is not before.slots or not self._held:
            self._note_slots(before, after)
        if isinstance(event, events.TasksFinished) and draw_of(before, event.epoch) is not None:
            _note_samples(event.details)

    def _note_slots(self, before: State, after: State) -> None:
        held = {holder: after.slots.counted(holder) for holder in Holder}
        for holder in Holder:
            if held[holder] != self._held.get(holder):
                metrics.SLOTS.record(held[holder], holder=holder)
        if after.lease_epoch > before.lease_epoch:
            metrics.LEASES.record(holder=Holder.DRAFTER)
        if held[Holder.POLICY] and not before.slots.counted(Holder.POLICY):
            metrics.LEASES.record(holder=Holder.POLICY)
        self._held = held

    def step_ended(self) -> None:
        """Requests a new count of the trajectories."""
        self._due.set()

    async def run(self) -> None:
        """Counts trajectories after every step; never returns."""
        while True:
            await self._due.wait()
            self._due.clear()
            await self.count()

    async def count(self) -> None:
        """Records the number of the run's trajectories by fate."""
        if self._ledger is None:
            return
        try:
            async with asyncio.timeout(COUNT_S):
                counted = await self._ledger.count()
        except (PacelineError, TimeoutError) as error:
            get_logger("coordinator").info("trajectories are not counted", error=str(error))
            return
        for fate, count in {
            "published": counted.final,
            "trained": counted.trained,
            "dropped": sum(counted.dropped.values()),
            "open": counted.open,
            "lost": counted.lost,
        }.items():
            metrics.TRAJECTORIES.record(count, fate=fate)


def _note_samples(details: Mapping[str, object]) -> None:
    unscored = details.get(events.UNSCORED)
    others = unscored if isinstance(unscored, Mapping) else {}
    counts = {"scored": details.get("scored"), **others}
    for outcome, count in counts.items():
        if isinstance(count, int) and count:
            metrics.SAMPLES.record(count, outcome=outcome)
