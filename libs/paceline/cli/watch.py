"""Follows a run through its facts, and reads a snapshot after a gap."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.cli.access import DEADLINE_S, coordinator_at
from paceline.config import ServiceConfig
from paceline.errors import DeadlineExceeded, PacelineError
from paceline.events import FactSubscriber
from paceline.rpc import channel, check_events, rpc_errors
from paceline.v1 import coordinator_pb2 as pb

_QUIET_S = 30.0
"""Seconds without a fact after which the coordinator is polled: it may have restarted."""
_ASK_AGAIN_S = 1.0
"""Minimum seconds between polls of a coordinator that did not reply."""

OnRecord = Callable[[pb.StepRecord], None]
OnAway = Callable[[tuple[str, ...]], None]


@dataclass(slots=True)
class RunState:
    """The current state of a run; bounded in size, whatever the run's length."""

    run_id: str
    total_steps: int
    on_record: OnRecord  # receives each finished step once
    on_away: OnAway = lambda services: None  # receives the unreachable services at each change
    phase: str = "starting"
    holders: dict[int, str] = field(default_factory=dict)  # slot -> its holder
    complete: int = 0  # steps received without a gap, from the first
    ahead: set[int] = field(default_factory=set)  # received steps after a gap
    failure: str = ""
    finished: bool = False
    away: tuple[str, ...] = ()  # unreachable services

    def apply_fact(self, fact: pb.Fact) -> None:
        """Applies a fact."""
        if fact.HasField("step_began"):
            self.phase, self.failure, self.finished = "rollout", "", False
        for slots in fact.slots:
            self._slots(slots)
        if fact.HasField("paused"):
            self.phase = "paused" if fact.paused else "ready"
        if fact.HasField("services_away"):
            self._away(fact.services_away.services)
        if fact.HasField("step_finished"):
            self.apply_record(fact.step_finished.record)
        if fact.HasField("run_finished"):
            self.finished, self.failure = True, fact.run_finished.failure
            self.phase = "failed" if self.failure else "finished"

    def apply_snapshot(self, snapshot: pb.GetSnapshotResponse) -> None:
        """Applies a snapshot after a gap."""
        if snapshot.phase == "new":  # its coordinator has not read its settings yet
            return
        self.total_steps, self.phase = snapshot.total_steps, snapshot.phase
        self.failure = snapshot.failure
        self._away(snapshot.away)
        for slots in snapshot.slots:
            self._slots(slots)
        if snapshot.last_step.step_s:
            self.apply_record(snapshot.last_step)

    def apply_record(self, record: pb.StepRecord) -> None:
        """Applies a finished step once: its record is repeated when an evaluation is added."""
        if record.step < self.complete or record.step in self.ahead:
            return
        self.ahead.add(record.step)
        while self.complete in self.ahead:
            self.ahead.remove(self.complete)
            self.complete += 1
        self.on_record(record)

    def _away(self, services: Sequence[str]) -> None:
        if tuple(services) != self.away:
            self.away = tuple(services)
            self.on_away(self.away)

    def _slots(self, slots: pb.SlotRange) -> None:
        holder = enum_word(pb.Holder, slots.holder)
        self.holders.update(dict.fromkeys(range(slots.first, slots.first + slots.count), holder))
        if holder in ("policy", "drafter"):
            self.phase = {"policy": "policy step", "drafter": "rollout, drafter training"}[holder]


async def follow(config: ServiceConfig, state: RunState) -> None:
    """Keeps `state` up to date until the run has ended."""
    async with channel(config.addresses.coordinator, config.security) as connection:
        stub = coordinator_at(connection)
        behind, asked_s = False, 0.0

        async def catch_up(first: int, last: int) -> None:
            nonlocal behind, asked_s
            behind = True
            try:
                with rpc_errors():
                    snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=DEADLINE_S)
                    while page := await _steps_after(stub, state.complete):
                        for record in page:
                            state.apply_record(record)
            except PacelineError:
                return  # It restarts or has ended; retried with a later fact.
            finally:
                asked_s = time.monotonic()
            behind = False
            state.apply_snapshot(snapshot)

        events, curve_key = config.addresses.events, config.security.curve_key
        check_events(events, config.security)
        with FactSubscriber(events, config.run.id, catch_up, curve_key=curve_key) as facts:
            await catch_up(0, 0)
            # The next coordinator resumes a failed run.
            while not state.finished or state.failure:
                try:
                    state.apply_fact(await facts.next(_QUIET_S))
                except DeadlineExceeded:
                    behind = True
                if behind and time.monotonic() - asked_s >= _ASK_AGAIN_S:
                    await catch_up(0, 0)
            if behind:
                await catch_up(0, 0)


async def _steps_after(stub: Any, complete: int) -> Sequence[pb.StepRecord]:
    """The next page of step records; empty at the end."""
    wanted = pb.ListStepsRequest(from_step=complete)
    page: pb.ListStepsResponse = await stub.ListSteps(wanted, timeout=DEADLINE_S)
    return page.steps


def enum_word(kind: object, value: int) -> str:
    """Last word of an enum value's name in lower case: HOLDER_ENGINE -> engine."""
    return str(kind.Name(value)).rsplit("_", 1)[-1].lower()  # type: ignore[attr-defined]
