"""Applies events: the machine decides, the journal remembers, subscribers are told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from coordinator.calls.groups import ClosedGroups
from coordinator.journal.entry import changed_slots, entry_of
from coordinator.journal.facts import fact_of
from coordinator.journal.journal import Journal
from coordinator.journal.records import StepRecords
from coordinator.machine.commands import Command
from coordinator.machine.events import Event, StepBegan
from coordinator.machine.state import MachineError, State
from coordinator.machine.step import step
from coordinator.watch import AcceptanceWatch
from paceline.errors import DataLoss, InternalError
from paceline.telemetry import get_logger
from paceline.v1.coordinator_pb2 import Fact, StepRecord

Publish = Callable[[Fact], Awaitable[object]]


class Applied(NamedTuple):
    """What follows from an event."""

    before: State
    issued: tuple[Command, ...]
    fell: dict[str, float] | None  # figures of an acceptance that fell


class Transitions:
    """The state of one run, and what its events build beside it, live and in a replay alike."""

    def __init__(
        self,
        run_id: str,
        samples: int,
        rollback_drop: float,
        snapshot_entries: int,
        journal: Journal,
        publish: Publish,
    ) -> None:
        """`samples`: samples that a step asks for; `rollback_drop` and `snapshot_entries`: as in
        the configuration.
        """
        self.state = State()
        self.records = StepRecords()
        self.groups = ClosedGroups()
        self.at_s = 0.0  # of the newest event
        self.traceparent = ""  # of the newest step
        self._run_id = run_id
        self._samples = samples
        self._snapshot_entries = snapshot_entries
        self._journal = journal
        self._publish = publish
        self._watch = AcceptanceWatch(rollback_drop)
        self._log = get_logger("coordinator")

    async def replay(self) -> None:
        """Applies the events of the journal, once: those behind its newest snapshot, where it has
        one. Raises what reading raises.
        """
        try:
            newest = await self._journal.newest()
        except DataLoss as error:
            self._log.error("the whole journal is replayed", fault=str(error))
            newest = None
        if newest is not None:
            snapshot, finished = newest
            self.state, self.records = snapshot.state, StepRecords(finished, snapshot.records)
            self.at_s, self.traceparent = snapshot.at_s, snapshot.traceparent
            self._watch.last = snapshot.watched
        async for entry in self._journal.entries():
            after = step(self.state, entry.event)[0]
            self._observe(self.state, entry.event, after)
            self.state = after

    async def apply(self, event: Event) -> Applied:
        """One transition: durable, then told. Raises InternalError for an illegal event, and errors
        of the journal.
        """
        before = self.state
        try:
            after, issued = step(before, event)
        except MachineError as error:
            raise InternalError(str(error), reason="ILLEGAL_EVENT") from error

        changed = changed_slots(before, after)
        record, fell = self._observe(before, event, after)
        await self._journal.append(entry_of(before, event, after, changed, record))
        self.state = after
        if after.step > before.step and self._journal.since_snapshot >= self._snapshot_entries:
            watched = self._watch.last
            await self._journal.save(after, self.records, self.traceparent, self.at_s, watched)
        fact = fact_of(
            *(self._run_id, before, event, after, issued, changed),
            record=record,
            samples=self._samples,
        )
        if fact is not None:
            await self._publish(fact)
        name = type(event).__name__
        say = self._log.debug if after.phase is before.phase else self._log.info
        say(name, step=before.step, phase=after.phase.value, epoch=after.epoch)
        return Applied(before, issued, fell)

    def _observe(
        self, before: State, event: Event, after: State
    ) -> tuple[StepRecord | None, dict[str, float] | None]:
        """The record that was closed or amended, and the figures of an acceptance that fell."""
        self.at_s = max(self.at_s, event.at_s)
        if isinstance(event, StepBegan):
            self.traceparent = event.traceparent
        self.groups.observe(before, event, after)
        return self.records.observe(before, event, after), self._watch.observe(before, event)
