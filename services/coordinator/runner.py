"""Runs a run until it is over: events -> machine -> journal -> facts -> commands.

Waiting events are decided, journaled and published together. Events are durable before their
commands run, so a new runner can continue the run.
"""

import asyncio
import contextvars
from collections.abc import Callable
from pathlib import Path

from opentelemetry import context as otel_context
from opentelemetry.trace import Span, set_span_in_context

from paceline.errors import FailedPrecondition
from paceline.local.patience import unless
from paceline.services.coordinator import metrics, observed, trackers, transitions
from paceline.services.coordinator.calls import base, executor, rollouts, slots, tasks
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.journal.journal import TOGETHER, Journal
from paceline.services.coordinator.journal.records import values_of
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.commands import Command
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import OPTIONAL, Phase, Service, State
from paceline.services.coordinator.machine.step import step
from paceline.streams import Ledger
from paceline.telemetry import extract, get_logger, inject, names, tracer


class StepSpans:
    """The spans of the running steps; asynchronous schedules have several."""

    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}

    def begin(self, run_id: str, step: int) -> str:
        """Starts a step's span, and replaces an existing span of the step; returns its
        traceparent.
        """
        self.end(step)
        attributes: dict[str, str | int] = {names.RUN: run_id, names.RL_STEP: step}
        # A root span regardless of the caller's span: one trace per RL step.
        root = otel_context.Context()
        span = tracer().start_span(names.STEP, context=root, attributes=attributes)
        self._spans[step] = span
        return inject(set_span_in_context(span)).get("traceparent", "")

    def take_up(self, step: int, traceparent: str) -> None:
        """Continues the trace of a step that a former coordinator began."""
        parent = extract({"traceparent": traceparent})
        self._spans[step] = tracer().start_span(
            names.STEP, context=parent, attributes={names.RL_STEP: step}
        )

    def context(self, step: int | None) -> contextvars.Context:
        """A copy of the caller's context, with the step's span as current span if the step runs."""
        context = contextvars.copy_context()
        span = None if step is None else self._spans.get(step)
        if span is not None:
            context.run(otel_context.attach, set_span_in_context(span))
        return context

    def end(self, step: int | None = None) -> None:
        """Ends the step's span, or all spans; without a span it has no effect."""
        for ended in [one for one in self._spans if step in (None, one)]:
            self._spans.pop(ended).end()


HAND_BACK_S = 180.0
"""Seconds that a failed run waits for the return of its slots to the engine."""


class Runner:
    """One run; `run` returns at its end or on a stop request."""

    def __init__(
        self,
        config: CoordinatorConfig,
        journal: Journal,
        peers: base.Peers,
        publish: transitions.Publish,
        clock: Callable[[], float],
        ledger: Ledger | None = None,
    ) -> None:
        """`clock`: the wall clock in seconds. `ledger`: source of the trajectory counts, if any.

        Raises TaskFileError for unreadable tasks.
        """
        self._config = config
        self._peers = peers
        self._clock = clock
        self._last_s = 0.0
        self._queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        source = tasks.TaskSource(config)
        self.transitions = transitions.Transitions(
            config.run.id,
            source.samples_per_step,
            config.rollback_drop,
            config.snapshot_entries,
            journal,
            publish,
        )
        self._asked: dict[int, asyncio.Future[State]] = {}  # by the id of an operator's event
        emit = self._queue.put_nowait
        groups = self.transitions.groups
        self._calls = base.Calls(config, peers, source, groups, emit, self.now, self._state)
        self._executor = executor.Executor(self._calls, emit)
        self.stall = observed.StallWatch(self._calls)
        self._observed = observed.ObservedRun(ledger)
        self._spans = StepSpans()
        self._tracking = trackers.Tracking(config.trackers, config.run.id, Path(config.run.dir))
        self._log = get_logger("coordinator")

    def now(self) -> float:
        """The wall clock, but never backwards: journal intervals have no negative length."""
        self._last_s = max(self._last_s, round(self._clock(), 6))
        return self._last_s

    def request_stop(self) -> int:
        """Requests the end of the run; returns the number of steps that it will have."""
        event = events.StopRequested(self.now())
        self._queue.put_nowait(event)
        return step(self.transitions.state, event)[0].settings.total_steps

    async def choose(self, event: Event) -> State:
        """Applies an operator's event after the events before it; returns the state before it.
        Raises FailedPrecondition when the run ends first.
        """
        applied: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._asked[id(event)] = applied
        self._queue.put_nowait(event)
        try:
            return await applied
        finally:
            del self._asked[id(event)]

    def _state(self) -> State:
        return self.transitions.state

    async def run(self, stop: asyncio.Event) -> bool:
        """Runs to the end; returns False when `stop` was set first. Raises errors of the machine
        and of the journal.

        The outcome is in `transitions.state`: phase FINISHED, or FAILED with its failure.
        """
        beside = [
            asyncio.create_task(self.stall.run(), name="stall watch"),
            asyncio.create_task(slots.listen(self._calls), name="traffic"),
            asyncio.create_task(self._observed.run(), name="ledger"),
        ]
        for task in beside:
            task.add_done_callback(self._beside_ended)
        try:
            await self._replay()
            return await unless(stop, self._to_the_end())
        finally:
            for task in beside:
                task.cancel()
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(FailedPrecondition("the run has ended"))
            await executor.until_gone(beside, executor.CLOSE_S)
            await self._executor.close()
            self._spans.end()
            await asyncio.to_thread(self._tracking.close)

    def _beside_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._queue.put_nowait(defect)

    async def _to_the_end(self) -> None:
        await self._begin()
        while self.transitions.state.phase not in (Phase.FINISHED, Phase.FAILED):
            await self._apply(*await self._waiting())
        if self.transitions.state.phase is Phase.FAILED:
            await self._executor.ended(commands.HandBack, HAND_BACK_S)
        await self._observed.count()

    async def _waiting(self) -> list[Event]:
        """Waits for at least one event and returns up to one journal write of events. Raises
        defects of the calls.
        """
        found: list[Event] = []
        while not found or (len(found) < TOGETHER and not self._queue.empty()):
            one = await self._queue.get()
            if isinstance(one, BaseException):
                raise one
            found.append(one)
        return found

    async def _apply(self, *happened: Event) -> None:
        """Applies events, then their effects: metrics, trackers, answers to operators
        and commands.
        """
        for one in await self.transitions.apply(*happened):
            self.stall.observe(one.event, one.after)
            self._observed.observe(one.before, one.event, one.after)
            if isinstance(one.event, events.EvaluationDone):
                for kind, value in values_of(one.event).items():
                    metrics.EVALUATION.record(value, kind=kind)
                    self._tracking.evaluated(one.after.step, kind, value)
            asked = self._asked.get(id(one.event))
            if asked is not None and not asked.done():
                asked.set_result(one.before)
            if one.fell is not None:
                drafter = one.before.versions.drafter
                self._queue.put_nowait(events.AcceptanceFell(self.now(), drafter, one.fell))
            for command in one.issued:
                self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case commands.BeginStep(number):
                traceparent = self._spans.begin(self._config.run.id, number)
                self._queue.put_nowait(events.StepBegan(self.now(), number, traceparent))
            case commands.CloseStep(number):
                self._spans.end(number)
                metrics.record_step(self.transitions.records.finished[-1])
                self._observed.step_ended()
                self._tracking.step(self.transitions.records.finished[-1])
            case commands.Refuse(event, seen, current):
                metrics.REFUSED.record(event=event)
                self._log.info("late event refused", event_name=event, seen=seen, current=current)
            case commands.FinishRun():
                pass  # the phase already shows the end
            case _:
                step = getattr(command, "step", self.transitions.state.step)
                self._executor.execute(command, self._spans.context(step))

    # --- begin ------------------------------------------------------------------------------------

    async def _replay(self) -> None:
        await self.transitions.replay()
        self._last_s = max(self._last_s, self.transitions.at_s)
        state = self.transitions.state
        for number, traceparent in self.transitions.traceparents.items():
            if number >= state.step:
                self._spans.take_up(number, traceparent)

    async def _begin(self) -> None:
        state = self.transitions.state
        if state.phase is Phase.FINISHED and state.step >= self._config.steps:
            await self._apply(events.Resumed(self.now(), self._config.steps))
            return
        for service in (one for one in Service if one not in OPTIONAL):
            self.stall.waits_healthy(service)
            late = await self._peers.unhealthy(service, self._config.service_recovery_s)
            for error in late.values():
                raise error
        begins = rollouts.run_started if state.phase is Phase.NEW else rollouts.run_resumed
        await self._apply(await begins(self._calls))
