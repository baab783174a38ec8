"""Carries out the machine's commands, with one coroutine per command and one running call per kind.

A newer command of a kind cancels the older call. The machine rejects late answers of the older call
by their epoch.
"""

import asyncio
import contextvars
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

from paceline.services.coordinator.calls import (
    checkpoints,
    drafter_trainer,
    policy_trainer,
    quarantine,
    recovery,
    rollouts,
    slots,
    weights,
)
from paceline.services.coordinator.calls.base import Calls, Reported
from paceline.services.coordinator.machine import commands
from paceline.services.coordinator.machine.commands import Command
from paceline.telemetry import get_logger

CLOSE_S = 10.0
"""Seconds that cancelled calls have for their cleanup."""

CALLS: dict[type[Command], Callable[[Calls, Any], Coroutine[Any, Any, None]]] = {
    commands.RunTasks: rollouts.run_tasks,
    commands.ResumeWorkers: slots.resume_workers,
    commands.Evaluate: rollouts.evaluate,
    commands.ActivateDrafter: drafter_trainer.activate,
    commands.JoinDrafter: drafter_trainer.join,
    commands.PreemptDrafter: drafter_trainer.preempt,
    commands.TrainPolicy: policy_trainer.train,
    commands.Quarantine: quarantine.quarantine,
    commands.Commit: weights.commit,
    commands.AbortDrafter: weights.abort_drafter,
    commands.SaveCheckpoints: checkpoints.save,
    commands.HandBack: slots.hand_back,
    commands.AwaitService: recovery.await_service,
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
        self._log = get_logger("coordinator")
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
            self._log.error("call failed", call=kind, exc_info=error)
            self._on_defect(error)


async def until_gone(tasks: Collection[asyncio.Task[None]], deadline_s: float) -> None:
    """Returns when the tasks have ended. After the deadline it logs the running tasks
    and returns.
    """
    left = (await asyncio.wait(tasks, timeout=deadline_s))[1] if tasks else ()
    if left:
        names = sorted(task.get_name() for task in left)
        get_logger("coordinator").error(
            "calls did not end in time", calls=names, after_s=deadline_s
        )
