"""Carries out the machine's commands, with one coroutine per command and one running call per kind.

A newer command of a kind cancels the older call. The machine rejects late answers of the older call
by their epoch.
"""

import asyncio
import contextvars
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.rpc.progress import ASK_S, ask_progress
from paceline.services.coordinator.calls import rollouts, slots, trainers, weights
from paceline.services.coordinator.calls.base import Absence, Calls, Reported, each, log
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.commands import Command
from paceline.services.coordinator.machine.state import OPTIONAL

CLOSE_S = 10.0
"""Seconds that cancelled calls have for their cleanup."""

_LONGEST_PAUSE_S = 5.0


async def await_service(calls: Calls, command: commands.AwaitService) -> None:
    """Emits ServiceBack when the peer is healthy again. Emits CallFailed when a required peer does
    not recover in time.
    """
    service = command.service
    absence = calls.absent.setdefault(service, Absence(calls.now()))
    while True:
        try:
            await _healthy_again(calls, command, absence)
        except PacelineError as error:
            if service not in OPTIONAL:
                calls.emit(events.CallFailed(calls.now(), service, "recovery", str(error)))
                return
            absence.since_s = calls.now()  # an optional service may return at any time
        else:
            calls.emit(events.ServiceBack(calls.now(), service))
            return


async def _healthy_again(calls: Calls, command: commands.AwaitService, absence: Absence) -> None:
    """Returns when the peer is healthy. Raises the last error when the recovery time is over."""
    service, limit_s = command.service, calls.config.service_recovery_s
    left_s = absence.since_s + limit_s - calls.now()
    if left_s <= 0:
        raise Unavailable(f"{service} kept failing{absence.why}", seen=f"{limit_s:g} s")
    # A healthy peer may still fail: if its own peers are away, its calls fail at once. Hence the
    # pause.
    await asyncio.sleep(min(absence.pause_s, left_s))
    absence.pause_s = min(2 * absence.pause_s, _LONGEST_PAUSE_S)
    if late := await calls.peers.unhealthy(service, left_s):
        channels = calls.peers.channels[service]
        if not all(await each(_gets_on(channels[number], limit_s) for number in late)):
            raise next(iter(late.values()))
        absence.since_s = calls.now()  # the service loads or replays: its time starts again
        await _healthy_again(calls, command, absence)


async def _gets_on(channel: Any, limit_s: float) -> bool:
    """Whether an unhealthy process still answers and one of its parts has made progress."""
    try:
        parts = (await ask_progress(channel, patient(ASK_S))).parts
    except PacelineError:
        return False
    return any(part.still_s < limit_s for part in parts if part.doing)


CALLS: dict[type[Command], Callable[[Calls, Any], Coroutine[Any, Any, None]]] = {
    commands.RunTasks: rollouts.run_tasks,
    commands.ResumeWorkers: slots.resume_workers,
    commands.Evaluate: rollouts.evaluate,
    commands.ActivateDrafter: trainers.activate_drafter,
    commands.JoinDrafter: trainers.join_drafter,
    commands.PreemptDrafter: trainers.preempt_drafter,
    commands.TrainPolicy: trainers.train_policy,
    commands.Quarantine: slots.quarantine,
    commands.Commit: weights.commit,
    commands.AbortDrafter: weights.abort_drafter,
    commands.SaveCheckpoints: trainers.save_checkpoints,
    commands.HandBack: slots.hand_back,
    commands.AwaitService: await_service,
}
"""The commands that are calls; the runner handles all other commands."""


class Executor:
    """Runs the calls of one run; `close` ends all calls."""

    def __init__(self, calls: Calls, on_defect: Callable[[BaseException], None]) -> None:
        """`on_defect` receives every exception that is not a PacelineError. Such a defect ends the
        process.
        """
        self._calls = calls
        self._on_defect = on_defect
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # including replaced calls

    def execute(self, command: Command, context: contextvars.Context) -> None:
        """Starts a call in the given context (of the step's span) and returns at once."""
        kind = type(command).__name__
        if isinstance(command, commands.AwaitService):
            kind += f" {command.service}"  # several services may be awaited at once
        if isinstance(command, commands.RunTasks):
            kind += f" of step {command.step}"  # several steps may be in rollout at once
        if (older := self._running.get(kind)) is not None:
            older.cancel()
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._carry_out(command), name=kind, context=context)
        self._running[kind] = task
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def ended(self, kind: type[Command], deadline_s: float) -> None:
        """Returns when no call for this kind of command runs any more, or after the deadline."""
        if (task := self._running.get(kind.__name__)) is not None:
            await until_gone({task}, deadline_s)

    async def close(self, deadline_s: float = CLOSE_S) -> None:
        """Cancels every call and waits as `until_gone` does."""
        for task in self._tasks:
            task.cancel()
        await until_gone(set(self._tasks), deadline_s)

    async def _carry_out(self, command: Command) -> None:
        with suppress(Reported):
            await CALLS[type(command)](self._calls, command)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        kind = task.get_name()
        if self._running.get(kind) is task:
            del self._running[kind]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("call failed", call=kind, exc_info=error)
            self._on_defect(error)


async def until_gone(tasks: Collection[asyncio.Task[None]], deadline_s: float) -> None:
    """Returns when the tasks have ended. After the deadline it logs the running tasks
    and returns.
    """
    left = (await asyncio.wait(tasks, timeout=deadline_s))[1] if tasks else ()
    if left:
        names = sorted(task.get_name() for task in left)
        log.error("calls did not end in time", calls=names, after_s=deadline_s)
