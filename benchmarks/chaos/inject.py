"""Injects one fault and measures the recovery."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.happenings import Happening
from benchmarks.chaos.schedule import SUPERVISOR, Action, Fault, Trigger
from benchmarks.chaos.system import COMMIT_S, CONSOLE, System, service_of
from paceline.errors import DeadlineExceeded
from paceline.local.patience import patient

STOPPED_S = 5.0
DELAY_S, DELAYED_S = 0.2, 3.0
LEFT_BYTES = 1 << 20
_FULL_S = 15.0  # less time than services may fail for, however busy the machine is
_TRIGGER_S = 60.0


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault and its cost."""

    number: int
    kind: str
    targets: tuple[str, ...]
    trigger: str
    step: int  # RL step of the fault
    recovery_s: float  # from the fault to the next step committed
    whole_s: float  # from the fault until every service serves again
    killed_s: float | None  # from SIGSTOP until the process was killed; None: it was not killed
    note: str = ""


class Injector:
    """Injects faults into one system."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._killed_s: float | None = None

    async def inject(self, fault: Fault) -> Injected:
        """Waits for the fault's trigger and injects the fault. Then waits until the run has
        committed a step and all services serve.

        Raises DeadlineExceeded if a wait is too long.
        """
        system = self._system
        asked_s, note = time.monotonic(), ""
        try:
            seen = await system.seen(fault.trigger, asked_s, patient(_TRIGGER_S))
        except DeadlineExceeded:
            note = f"{fault.trigger} did not come; done anyway"
            seen = await system.seen(Trigger.ROLLOUT, asked_s, patient(_TRIGGER_S))
        self._killed_s = None
        began_s = await self._carry_out(fault)
        committed = await system.happenings.first(
            lambda one: one.what == Trigger.COMMITTED, began_s, patient(COMMIT_S), "a step's commit"
        )
        await system.all_up(began_s, patient(COMMIT_S))
        return Injected(
            fault.number,
            fault.kind.name,
            fault.targets,
            fault.trigger,
            max(seen.step, committed.step),
            committed.at_s - began_s,
            time.monotonic() - began_s,
            self._killed_s,
            note,
        )

    async def _carry_out(self, fault: Fault) -> float:
        """Injects the fault; returns the start of the recovery time.

        The start is the begin of the fault, or for a full disk the time at which it has room again.
        """
        began_s = time.monotonic()
        match fault.kind.action:
            case Action.KILL:
                await self._kill(self._handles(fault), fault.targets, began_s)
            case Action.STOP:
                await self._stop(self._handles(fault), fault.targets, began_s)
            case Action.FILL:
                return await self._fill(began_s)
            case Action.CORRUPT:
                pushing = self._system.proxies[fault.targets[0]][1]
                with suppress(TimeoutError):
                    await pushing.corrupt(patient(_TRIGGER_S))
                return time.monotonic()
            case Action.DELAY:
                proxies = self._system.proxies[fault.targets[0]]
                await asyncio.gather(*(one.delay(DELAY_S, DELAYED_S) for one in proxies))
            case Action.RESET:
                for one in self._system.proxies[fault.targets[0]]:
                    one.reset()
            case Action.HALF_CLOSE:
                for one in self._system.proxies[fault.targets[0]]:
                    one.half_close()
        return began_s

    def _handles(self, fault: Fault) -> list[int]:
        """A pidfd for a process of each target, since the kernel may reuse a process id."""
        handles = []
        for target in fault.targets:
            pids = self._system.pids(target)
            handles.append(os.pidfd_open(pids[int(fault.pick * len(pids))]))
        return handles

    async def _kill(self, handles: Sequence[int], targets: Sequence[str], began_s: float) -> None:
        for handle in handles:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        for handle in handles:
            os.close(handle)
        await self._replaced(targets, began_s)

    async def _replaced(self, targets: Sequence[str], began_s: float) -> None:
        """Waits until the end of the targets is noticed and they serve again."""
        if SUPERVISOR in targets:
            await self._system.serves(began_s)
            return
        for service in dict.fromkeys(map(service_of, targets)):
            ended = await self._system.told(service, ("died", "impaired"), began_s)
            await self._system.told(service, ("healthy", "recovered"), ended.at_s)

    async def _stop(self, handles: Sequence[int], targets: Sequence[str], began_s: float) -> None:
        """Stops the targets by SIGSTOP for STOPPED_S, or until they are killed."""
        for handle in handles:
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
        ended = await _end_of(handles[0], STOPPED_S)
        self._killed_s = time.monotonic() - began_s if ended else None
        for handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            os.close(handle)
        if ended:
            await self._replaced(targets, began_s)

    async def _fill(self, began_s: float) -> float:
        """Fills the disk of the run until a service waits for room."""

        def waits(one: Happening) -> bool:
            return one.what == CONSOLE and " waits: " in one.detail

        ballast = self._system.directory / "ballast"
        _fill(ballast)
        try:
            await self._system.happenings.first(waits, began_s, _FULL_S, "a service that waits")
        except DeadlineExceeded:
            pass  # no service had anything to write
        finally:
            ballast.unlink()
        return time.monotonic()


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        zeros = bytes(1 << 20)
        while shutil.disk_usage(ballast.parent).free > LEFT_BYTES + len(zeros):
            file.write(zeros)


async def _end_of(handle: int, limit_s: float) -> bool:
    """Whether a process ends within the limit."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        async with asyncio.timeout(limit_s):
            await ended.wait()
    except TimeoutError:
        return bool(select.select([handle], [], [], 0)[0])
    finally:
        loop.remove_reader(handle)
    return True
