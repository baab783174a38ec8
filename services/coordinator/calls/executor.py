"""Turns commands into running calls and their failures into events. Owns the calls' lifetime and
waits for lost peers.

Decides nothing about the run: every outcome goes back to the machine through `emit`. One call per
kind of command lives at a time; a newer one cancels the older, whose late answers the machine
refuses by their epoch.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from coordinator.calls.rpc import COMMIT_DEADLINE_S, Calls
from coordinator.machine import commands, events
from coordinator.machine.commands import Command
from coordinator.machine.state import Service
from paceline.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    PacelineError,
    Unavailable,
)
from paceline.telemetry import get_logger

RANK_LOST = "RANK_LOST"
WORKER_LOST = "WORKER_LOST"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(slots=True)
class _Absence:
    """Since when a service fails, and how long to wait before the next try."""

    since_s: float
    pause_s: float = _FIRST_PAUSE_S


class Executor:
    """Runs commands; `close` ends all calls."""

    def __init__(self, calls: Calls, on_defect: Callable[[BaseException], None]) -> None:
        """`on_defect` is told of an exception that is no error of paceline: our own defect, which
        ends the process.
        """
        self._calls = calls
        self._on_defect = on_defect
        self._log = get_logger("coordinator")
        self._running: dict[str, asyncio.Task[None]] = {}
        self._absent: dict[Service, _Absence] = {}

    def execute(self, command: Command, context: contextvars.Context) -> None:
        """Starts a command in the given context (of the step's span) and returns at once."""
        match command:
            case commands.RunTasks():
                work: Coroutine[Any, Any, None] = self._run_tasks(command)
            case commands.ActivateDrafter():
                work = self._activate(command)
            case commands.PreemptDrafter():
                work = self._preempt(command)
            case commands.TrainPolicy():
                work = self._train_policy(command)
            case commands.Commit():
                work = self._commit(command)
            case commands.Evaluate():
                work = self._evaluate(command)
            case commands.SaveCheckpoints():
                work = self._save(command)
            case commands.AbortDrafter():
                work = self._abort_drafter(command)
            case commands.AwaitService(service):
                work = self._await_service(service)
                self._start(f"await {service}", work, context)
                return
            case _:
                return
        self._start(type(command).__name__, work, context)

    async def close(self) -> None:
        """Cancels every call and waits until they are gone."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(
        self, key: str, work: Coroutine[Any, Any, None], context: contextvars.Context
    ) -> None:
        if (older := self._running.get(key)) is not None:
            older.cancel()
        task = asyncio.get_running_loop().create_task(work, name=key, context=context)
        self._running[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        if self._running.get(key) is task:
            del self._running[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("call failed", call=key, exc_info=error)
            self._on_defect(error)

    async def _run_tasks(self, command: commands.RunTasks) -> None:
        def worker_lost(error: Unavailable) -> None:
            worker = int(error.seen) if error.seen and error.seen.isdecimal() else 0
            self._calls.emit(events.WorkerLost(self._now(), command.epoch, worker))

        await self._guard(
            Service.GATEWAY,
            "rollout",
            command.epoch,
            self._calls.run_tasks(command),
            {WORKER_LOST: worker_lost},
        )

    async def _activate(self, command: commands.ActivateDrafter) -> None:
        service = Service.DRAFTER_TRAINER
        try:
            await self._calls.activate(command)
            self._absent.pop(service, None)
        except Unavailable as error:
            if error.reason == RANK_LOST:
                self._calls.emit(
                    events.TrainerFailed(self._now(), command.epoch, service, str(error))
                )
            else:
                self._lost(service, error)
        except (TimeoutError, DeadlineExceeded):
            self._calls.emit(
                events.Deadline(self._now(), command.epoch, "activation", command.deadline_s)
            )
        except PacelineError as error:
            # Whatever ails the drafter, the run goes on without it.
            self._calls.emit(events.TrainerFailed(self._now(), command.epoch, service, str(error)))

    async def _preempt(self, command: commands.PreemptDrafter) -> None:
        service = Service.DRAFTER_TRAINER
        try:
            async with asyncio.timeout(command.deadline_s):
                await self._calls.preempt(command)
        except (TimeoutError, DeadlineExceeded):
            self._calls.emit(
                events.Deadline(self._now(), command.epoch, "preempt", command.deadline_s)
            )
        except Unavailable as error:
            self._lost(service, error)
        except PacelineError as error:
            self._calls.emit(events.TrainerFailed(self._now(), command.epoch, service, str(error)))

    async def _train_policy(self, command: commands.TrainPolicy) -> None:
        service = Service.POLICY_TRAINER

        def rank_lost(error: Unavailable) -> None:
            self._calls.emit(events.TrainerFailed(self._now(), command.epoch, service, str(error)))

        work = self._calls.train_policy(command)
        await self._guard(service, "policy", command.epoch, work, {RANK_LOST: rank_lost})

    async def _commit(self, command: commands.Commit) -> None:
        receivers = [Service.GATEWAY]
        if self._calls.config.drafter_enabled:
            receivers.append(Service.DRAFTER_TRAINER)
        for service in receivers:
            try:
                await self._calls.commit(command, service)
                self._absent.pop(service, None)
            except (FailedPrecondition, NotFound) as error:
                message = f"{service}: {error}"
                self._calls.emit(events.CommitFailed(self._now(), command.versions, message))
                return
            except Unavailable as error:
                self._lost(service, error)
                return
            except DeadlineExceeded:
                self._calls.emit(
                    events.Deadline(self._now(), command.epoch, "commit", COMMIT_DEADLINE_S)
                )
                return
            except PacelineError as error:
                self._failed(service, "commit", error)
                return
        self._calls.emit(events.Committed(self._now(), command.versions))

    async def _evaluate(self, command: commands.Evaluate) -> None:
        await self._guard(Service.GATEWAY, "evaluate", command.epoch, self._calls.evaluate(command))

    async def _save(self, command: commands.SaveCheckpoints) -> None:
        paths: dict[str, str] = {}

        async def save_policy() -> None:
            paths["policy"] = await self._calls.save_policy(command)

        async def save_drafter() -> None:
            paths["drafter"] = await self._calls.save_drafter(command)

        saved = await self._guard(Service.POLICY_TRAINER, "close", command.epoch, save_policy())
        if saved and await self._guard(
            Service.DRAFTER_TRAINER, "close", command.epoch, save_drafter()
        ):
            self._calls.emit(events.CheckpointsSaved(self._now(), command.epoch, dict(paths)))

    async def _abort_drafter(self, command: commands.AbortDrafter) -> None:
        try:
            await self._calls.abort_drafter(command)
        except (
            PacelineError
        ) as error:  # A candidate that stays costs disk until the next commit, nothing else.
            self._log.warning(
                "candidate not aborted", drafter_version=command.drafter_version, error=str(error)
            )

    async def _guard(
        self,
        service: Service,
        what: str,
        epoch: int,
        work: Awaitable[None],
        lost: dict[str, Callable[[Unavailable], None]] | None = None,
    ) -> bool:
        """Awaits a call; a failure becomes the event that says so.

        `lost`: reasons of Unavailable with their own.
        """
        try:
            await work
        except Unavailable as error:
            if lost and error.reason in lost:
                lost[error.reason](error)
            else:
                self._lost(service, error)
        except DeadlineExceeded:
            self._calls.emit(
                events.Deadline(self._now(), epoch, what, self._calls.config.step_deadline_s)
            )
        except PacelineError as error:
            self._failed(service, what, error)
        else:
            self._absent.pop(service, None)
            return True
        return False

    async def _await_service(self, service: Service) -> None:
        """ServiceBack when the peer is healthy again; CallFailed when it has been failing for too
        long.
        """
        limit_s = self._calls.config.service_recovery_s
        absence = self._absent.setdefault(service, _Absence(self._now()))
        left_s = absence.since_s + limit_s - self._now()
        try:
            if left_s <= 0:
                raise Unavailable(f"{service} kept failing", seen=f"{limit_s:g} s")
            # Healthy is not yet able: a peer whose own peers are away answers, and fails again at
            # once.
            await asyncio.sleep(min(absence.pause_s, left_s))
            absence.pause_s = min(2 * absence.pause_s, _LONGEST_PAUSE_S)
            await self._calls.peers.wait_healthy(service, left_s)
        except PacelineError as error:
            self._failed(service, "recovery", error)
            return
        self._calls.emit(events.ServiceBack(self._now(), service))

    def _lost(self, service: Service, error: PacelineError) -> None:
        self._absent.setdefault(service, _Absence(self._now()))
        self._calls.emit(events.ServiceLost(self._now(), service, str(error)))

    def _failed(self, service: Service, call: str, error: PacelineError) -> None:
        self._calls.emit(events.CallFailed(self._now(), service, call, str(error)))

    def _now(self) -> float:
        return self._calls.clock()
