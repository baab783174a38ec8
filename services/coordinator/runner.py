"""Runs a run: event -> machine -> journal -> facts -> commands, until it is over.

The journal has an event before anybody acts on it, so a new runner of the same run takes up where
this one ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from coordinator.calls.base import Calls
from coordinator.calls.executor import Executor
from coordinator.calls.gateway import run_started
from coordinator.calls.groups import ClosedGroups
from coordinator.calls.peers import Peers
from coordinator.calls.tasks import TaskSource
from coordinator.config import CoordinatorConfig
from coordinator.journal.entry import changed_slots, entry_of
from coordinator.journal.facts import fact_of
from coordinator.journal.journal import Journal
from coordinator.journal.records import StepRecords
from coordinator.machine import commands, events
from coordinator.machine.commands import Command
from coordinator.machine.events import Event
from coordinator.machine.state import IN_STEP, OPTIONAL, MachineError, Phase, Service, State
from coordinator.machine.step import step
from coordinator.stall import StallWatch
from coordinator.step_span import StepSpan
from coordinator.watch import AcceptanceWatch
from paceline.errors import InternalError
from paceline.telemetry import get_logger
from paceline.v1.coordinator_pb2 import Fact, StepRecord

Publish = Callable[[Fact], Awaitable[object]]


class Runner:
    """One run; `run` returns when it is over or asked to leave."""

    def __init__(
        self,
        config: CoordinatorConfig,
        journal: Journal,
        peers: Peers,
        publish: Publish,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is the wall clock in seconds.

        Raises TaskFileError when the tasks cannot be read.
        """
        self.state = State()
        self.records = StepRecords()
        self._config = config
        self._journal = journal
        self._peers = peers
        self._publish = publish
        self._clock = clock
        self._last_s = 0.0
        self._queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._groups = ClosedGroups()
        self._source = TaskSource(config)
        emit = self._queue.put_nowait
        self._calls = Calls(config, peers, self._source, self._groups, emit, self.now)
        self._executor = Executor(self._calls, emit)
        self.stall = StallWatch(self._calls)
        self._watch = AcceptanceWatch(config.rollback_drop)
        self._span = StepSpan()
        self._log = get_logger("coordinator")

    def now(self) -> float:
        """The wall clock, but never backwards: journal intervals have no negative length."""
        self._last_s = max(self._last_s, round(self._clock(), 6))
        return self._last_s

    def request_stop(self) -> int:
        """Asks for the end of the run; returns the number of steps that it will have."""
        event = events.StopRequested(self.now())
        self._queue.put_nowait(event)
        return step(self.state, event)[0].settings.total_steps

    async def run(self, stop: asyncio.Event) -> bool:
        """Runs to the end; False when `stop` came first. Raises errors of the machine and of the
        journal.

        The outcome stands in `state`: phase FINISHED, or FAILED with its failure.
        """
        stall = asyncio.create_task(self.stall.run())
        stall.add_done_callback(self._stall_ended)
        try:
            await self._replay()
            running = await _unless(stop, self._begin())
            while running and self.state.phase not in (Phase.FINISHED, Phase.FAILED):
                running = await _unless(stop, self._next_event())
            return running
        finally:
            stall.cancel()
            await self._executor.close()
            self._span.end()

    def _stall_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._queue.put_nowait(defect)

    async def _next_event(self) -> None:
        event = await self._queue.get()
        if isinstance(event, BaseException):
            raise event
        await self._apply(event)

    async def _apply(self, event: Event) -> None:
        """One transition."""
        before = self.state
        try:
            after, issued = step(before, event)
        except MachineError as error:
            raise InternalError(str(error), reason="ILLEGAL_EVENT") from error

        record, fell = self._observe(before, event, after)
        changed = changed_slots(before, after)
        await self._journal.append(entry_of(before, event, after, changed, record))
        self.state = after
        self.stall.observe(event, after)
        if fell is not None:
            drafter = before.versions.drafter
            self._queue.put_nowait(events.AcceptanceFell(self.now(), drafter, fell))
        samples = self._source.samples_per_step
        run_id = self._config.run.id
        fact = fact_of(
            run_id, before, event, after, issued, changed, record=record, samples=samples
        )
        if fact is not None:
            await self._publish(fact)
        name = type(event).__name__
        self._log.info(name, step=before.step, phase=after.phase.value, epoch=after.epoch)
        for command in issued:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case commands.BeginStep(number):
                traceparent = self._span.begin(self._config.run.id, number)
                self._queue.put_nowait(events.StepBegan(self.now(), number, traceparent))
            case commands.CloseStep():
                self._span.end()
            case commands.Refuse(event, seen, current):
                self._log.info("late event refused", event_name=event, seen=seen, current=current)
            case commands.FinishRun():
                pass  # the phase says so
            case _:
                self._executor.execute(command, self._span.context())

    def _observe(
        self, before: State, event: Event, after: State
    ) -> tuple[StepRecord | None, dict[str, float] | None]:
        """What the journal's events build beside the state, live and in a replay alike: the record
        that was closed or amended, and the figures of an acceptance that fell.
        """
        self._groups.observe(before, event, after)
        return self.records.observe(before, event, after), self._watch.observe(before, event)

    # --- begin ------------------------------------------------------------------------------------

    async def _replay(self) -> None:
        traceparent = ""
        async for entry in self._journal.entries():
            before, event = self.state, entry.event
            self.state = step(before, event)[0]
            self._observe(before, event, self.state)
            self._last_s = max(self._last_s, event.at_s)
            if isinstance(event, events.StepBegan):
                traceparent = event.traceparent
        if self.state.phase in IN_STEP or self.state.failed_phase:
            self._span.take_up(traceparent)

    async def _begin(self) -> None:
        new = self.state.phase is Phase.NEW
        if self.state.phase is not Phase.FINISHED or self.state.step < self._config.steps:
            await self._wait_for_peers()
        resumed = events.Resumed(self.now(), self._config.steps)
        await self._apply(await run_started(self._calls) if new else resumed)

    async def _wait_for_peers(self) -> None:
        for service in (one for one in Service if one not in OPTIONAL):
            self.stall.waits_healthy(service)
            await self._peers.wait_healthy(service, self._config.service_recovery_s)


async def _unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Awaits work unless `stop` is set first; then the work is cancelled and the answer is
    False.
    """
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
