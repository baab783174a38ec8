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
from coordinator.calls.peers import Peers
from coordinator.calls.tasks import TaskSource
from coordinator.config import CoordinatorConfig
from coordinator.journal.journal import Journal
from coordinator.machine import commands, events
from coordinator.machine.commands import Command
from coordinator.machine.events import Event
from coordinator.machine.state import IN_STEP, OPTIONAL, Phase, Service, State
from coordinator.machine.step import step
from coordinator.metrics import SLOT_TIME
from coordinator.stall import StallWatch
from coordinator.step_span import StepSpan
from coordinator.transitions import Publish, Transitions
from paceline.telemetry import get_logger


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
        self._config = config
        self._peers = peers
        self._clock = clock
        self._last_s = 0.0
        self._queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        source = TaskSource(config)
        self.transitions = Transitions(
            config.run.id,
            source.samples_per_step,
            config.rollback_drop,
            config.snapshot_entries,
            journal,
            publish,
        )
        emit = self._queue.put_nowait
        groups = self.transitions.groups
        self._calls = Calls(config, peers, source, groups, emit, self.now, self._state)
        self._executor = Executor(self._calls, emit)
        self.stall = StallWatch(self._calls)
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
        return step(self.transitions.state, event)[0].settings.total_steps

    def _state(self) -> State:
        return self.transitions.state

    async def run(self, stop: asyncio.Event) -> bool:
        """Runs to the end; False when `stop` came first. Raises errors of the machine and of the
        journal.

        The outcome stands in `transitions.state`: phase FINISHED, or FAILED with its failure.
        """
        stall = asyncio.create_task(self.stall.run())
        stall.add_done_callback(self._stall_ended)
        try:
            await self._replay()
            return await _unless(stop, self._to_the_end())
        finally:
            stall.cancel()
            await self._executor.close()
            self._span.end()

    def _stall_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._queue.put_nowait(defect)

    async def _to_the_end(self) -> None:
        await self._begin()
        while self.transitions.state.phase not in (Phase.FINISHED, Phase.FAILED):
            event = await self._queue.get()
            if isinstance(event, BaseException):
                raise event
            await self._apply(event)

    async def _apply(self, event: Event) -> None:
        """One transition, and what follows from it."""
        before, issued, fell = await self.transitions.apply(event)
        self.stall.observe(event, self.transitions.state)
        if fell is not None:
            drafter = before.versions.drafter
            self._queue.put_nowait(events.AcceptanceFell(self.now(), drafter, fell))
        for command in issued:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case commands.BeginStep(number):
                traceparent = self._span.begin(self._config.run.id, number)
                self._queue.put_nowait(events.StepBegan(self.now(), number, traceparent))
            case commands.CloseStep():
                self._span.end()
                for use, seconds in self.transitions.records.finished[-1].slot_s.items():
                    SLOT_TIME.record(seconds, use=use)
            case commands.Refuse(event, seen, current):
                self._log.info("late event refused", event_name=event, seen=seen, current=current)
            case commands.FinishRun():
                pass  # the phase says so
            case _:
                self._executor.execute(command, self._span.context())

    # --- begin ------------------------------------------------------------------------------------

    async def _replay(self) -> None:
        await self.transitions.replay()
        self._last_s = max(self._last_s, self.transitions.at_s)
        state = self.transitions.state
        if state.phase in IN_STEP or state.failed_phase:
            self._span.take_up(self.transitions.traceparent)

    async def _begin(self) -> None:
        state = self.transitions.state
        new = state.phase is Phase.NEW
        if state.phase is not Phase.FINISHED or state.step < self._config.steps:
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
