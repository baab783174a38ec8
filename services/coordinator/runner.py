"""The loop of a run: event, machine, journal, facts, commands. Owns the current state and the span
of the step.

Decides nothing (machine.py) and calls nobody itself (executor.py). What it applies is journaled
first, so a new runner of the same run takes up where this one ended.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry import context as otel_context
from opentelemetry.trace import Span, set_span_in_context

from coordinator.calls.executor import Executor
from coordinator.calls.groups import ClosedGroups
from coordinator.calls.peers import Peers
from coordinator.calls.rpc import Calls
from coordinator.calls.tasks import TaskSource
from coordinator.config import CoordinatorConfig
from coordinator.journal.facts import facts_of
from coordinator.journal.journal import Journal, entry_of
from coordinator.journal.records import StepRecords
from coordinator.machine import commands, events
from coordinator.machine.commands import Command
from coordinator.machine.events import Event
from coordinator.machine.state import MachineError, Phase, Service, State
from coordinator.machine.step import step
from coordinator.watch import AcceptanceWatch
from paceline.errors import InternalError
from paceline.messages import versions_from_proto
from paceline.rpc import rpc_errors
from paceline.telemetry import extract, get_logger, inject, tracer
from paceline.v1.coordinator_pb2 import Fact, StepRecord
from paceline.v1.weights_pb2 import GetVersionsRequest
from paceline.v1.weights_pb2_grpc import WeightServiceStub

Publish = Callable[[Fact], Awaitable[object]]
_QUERY_DEADLINE_S = 30.0
_IN_STEP = (Phase.ROLLOUT, Phase.PREEMPT, Phase.POLICY, Phase.DRAFTER, Phase.COMMIT)


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
        self._source = TaskSource(config)
        self._queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._groups = ClosedGroups()
        self._calls = Calls(
            config, peers, self._source, self._queue.put_nowait, self.now, self._groups
        )
        self._executor = Executor(self._calls, self._queue.put_nowait)
        self._watch = AcceptanceWatch(config.rollback.drop, config.rollback.window_steps)
        self._span: Span | None = None
        self._traceparent = ""  # of the newest step's span
        self._log = get_logger("coordinator")

    def now(self) -> float:
        """The wall clock, but never backwards: journal intervals have no negative length."""
        self._last_s = max(self._last_s, self._clock())
        return self._last_s

    def request_stop(self) -> int:
        """Asks for the end of the run; returns the number of steps that it will have."""
        event = events.StopRequested(self.now())
        self._queue.put_nowait(event)
        return step(self.state, event)[0].settings.total_steps

    async def run(self, stop: asyncio.Event) -> bool:
        """Runs to the end; False when `stop` came first. Raises MachineError and errors of the
        journal.

        The outcome stands in `state`: phase FINISHED, or FAILED with its failure.
        """
        try:
            await self._replay()
            if not await _unless(stop, self._wait_for_peers()):
                return False
            await self._apply(await self._first_event())
            while self.state.phase not in (Phase.FINISHED, Phase.FAILED):
                if not await _unless(stop, self._turn()):
                    return False
            return True
        finally:
            await self._executor.close()
            self._end_span()

    async def _turn(self) -> None:
        event = await self._queue.get()
        if isinstance(event, BaseException):
            raise event
        await self._apply(event)

    async def _apply(self, event: Event) -> None:
        """One transition. The journal has it before anybody acts on it."""
        before = self.state
        try:
            after, issued = step(before, event)
        except MachineError as error:
            raise InternalError(str(error), reason="ILLEGAL_EVENT") from error
        record = self.records.apply(before, event, after)
        self._groups.observe(before, event, after)
        await self._journal.append(entry_of(before, event, after, _closing_record(record, event)))
        self.state = after
        self._observe(before, event)
        await self._tell(before, event, issued, record)
        for command in issued:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        context = contextvars.copy_context()
        match command:
            case commands.BeginStep(number):
                traceparent = self._begin_span(number)
                self._queue.put_nowait(events.StepBegan(self.now(), number, traceparent))
            case commands.CloseStep():
                self._end_span()
            case commands.Refuse(event, seen, current):
                self._log.info("late event refused", event_name=event, seen=seen, current=current)
            case _:
                if self._span is not None:
                    context.run(otel_context.attach, set_span_in_context(self._span))
                self._executor.execute(command, context)

    def _observe(self, before: State, event: Event) -> None:
        """Watches live acceptance; what it sees comes back as an event."""
        fell = self._acceptance(before, event)
        if fell is not None:
            drafter = before.versions.drafter
            self._queue.put_nowait(events.AcceptanceFell(self.now(), drafter, dict(fell)))

    def _acceptance(self, before: State, event: Event) -> dict[str, float] | None:
        if not isinstance(event, events.TasksFinished) or before.phase is not Phase.ROLLOUT:
            return None
        tokens, rounds = (
            event.details.get("trained_round_tokens"),
            event.details.get("trained_rounds"),
        )
        if not isinstance(tokens, int) or not isinstance(rounds, int):
            return None
        return self._watch.observe(before.versions.drafter, tokens, rounds)

    async def _tell(
        self, before: State, event: Event, issued: tuple[Command, ...], record: StepRecord | None
    ) -> None:
        samples = self._source.samples_per_step
        run_id = self._config.run.id
        for fact in facts_of(
            run_id, before, event, self.state, issued, record=record, samples=samples
        ):
            await self._publish(fact)
        self._log.info(
            type(event).__name__,
            step=before.step,
            phase=self.state.phase.value,
            epoch=self.state.epoch,
        )

    # --- begin ------------------------------------------------------------------------------------

    async def _replay(self) -> None:
        async for entry in self._journal.entries():
            before = self.state
            self.state = step(before, entry.event)[0]
            self.records.apply(before, entry.event, self.state)
            self._groups.observe(before, entry.event, self.state)
            self._acceptance(before, entry.event)
            self._last_s = max(self._last_s, entry.event.at_s)
            if isinstance(entry.event, events.StepBegan):
                self._traceparent = entry.event.traceparent

    async def _wait_for_peers(self) -> None:
        if self.state.phase is Phase.FINISHED and self.state.step >= self._config.steps:
            return
        services = [Service.GATEWAY, Service.POLICY_TRAINER]
        if self._config.drafter_enabled:
            services.append(Service.DRAFTER_TRAINER)
        for service in services:
            await self._peers.wait_healthy(service, self._config.service_recovery_s)

    async def _first_event(self) -> Event:
        if self.state.phase is not Phase.NEW:
            if self.state.phase in _IN_STEP or self.state.failed_phase:
                self._span = tracer().start_span(
                    "step", context=extract({"traceparent": self._traceparent})
                )
            return events.Resumed(self.now(), self._config.steps)
        workers = self._config.workers or await self._calls.gateway_workers(_QUERY_DEADLINE_S)
        settings = self._config.machine_settings(workers)
        stub = WeightServiceStub(self._peers.channels[Service.GATEWAY])  # type: ignore[no-untyped-call]
        with rpc_errors():
            served = (
                await stub.GetVersions(GetVersionsRequest(), timeout=_QUERY_DEADLINE_S)
            ).versions
        return events.RunStarted(self.now(), settings, versions_from_proto(served))

    # --- the step's span --------------------------------------------------------------------------

    def _begin_span(self, number: int) -> str:
        self._end_span()
        attributes: dict[str, str | int] = {
            "paceline.run": self._config.run.id,
            "paceline.step": number,
        }
        # A root of its own, whatever span the caller is in: one trace per RL step.
        self._span = tracer().start_span(
            "step", context=otel_context.Context(), attributes=attributes
        )
        return inject(set_span_in_context(self._span)).get("traceparent", "")

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.end()
            self._span = None


def _closing_record(record: StepRecord | None, event: Event) -> dict[str, Any]:
    """The record as JSON with the event that ends its step; later evaluations stand in entries of
    their own.
    """
    if record is None or not isinstance(event, events.Committed):
        return {}
    return MessageToDict(record, preserving_proto_field_name=True)


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
