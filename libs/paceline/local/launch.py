"""Describes the processes of a run, and keeps one of them running: awaits its dependencies, watches
its health and progress, restarts it with back-off, or gives it up.
"""

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from paceline.errors import ConfigError, PacelineError, RunFailed, Unavailable
from paceline.local import checks, news, patience, processes
from paceline.local.child import LIMIT_S, Child

_LOOK_S = 1.0
_MISSES = 2
_FAILED = "SERVICE_FAILED"
_GIVE_UP_GRACE_S = 5.0
EventKind = (
    Literal["started", "healthy", "died", "waits", "restarted", "given_up", "finished", "stopped"]
    | news.News
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of one process and its health check."""

    name: str
    command: tuple[str, ...]  # () for an external server: only its health is awaited
    # Gets a deadline in seconds. Returns a remark for the user. Raises PacelineError.
    healthy: Callable[[float], Awaitable[str | None]] | None = None
    depends_on: tuple[str, ...] = ()  # services that must be healthy first
    ports: tuple[tuple[str, str], ...] = ()  # (address, setting) pairs that it binds
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_run: bool = False  # the run ends when it exits with status 0
    optional: bool = False  # other services continue without it
    # Quick health check of a server that reports no turns; called repeatedly.
    ping: Callable[[float], Awaitable[object]] | None = None
    listening: socket.socket | None = None  # a socket as stdin that outlives restarts


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """An event in the life of a process, for display."""

    name: str
    kind: EventKind
    pid: int
    detail: str = ""


class Supervised(Protocol):
    """A supervised process, or the services of a node."""

    launch: Launch
    is_healthy: asyncio.Event
    """Set while it is healthy."""

    @property
    def pid(self) -> int:
        """Process id; 0 if it does not run."""
        ...

    async def run(self) -> None:
        """Starts and restarts the process; returns when it exits with status 0. Raises RunFailed
        and Unavailable.
        """
        ...

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, waits `grace_s` seconds, sends SIGKILL. Call it after run() is
        cancelled.
        """
        ...


Keep = Callable[[Launch, Sequence[Supervised]], Supervised]
"""Creates the supervised process of a launch from its dependencies."""


@dataclass(slots=True)
class RestartPolicy:
    """Allows at most `tries` restarts within `window_s` seconds. Pauses are base_s, 2 base_s, ...
    up to cap_s. Use one per process.
    """

    tries: int = 5
    window_s: float = 120.0
    base_s: float = 0.5
    cap_s: float = 10.0
    ends: deque[float] = field(default_factory=deque, init=False)  # time.monotonic()

    def note_end(self) -> bool:
        """Notes an end of the process. Returns whether it may start again."""
        self.ends.append(time.monotonic())
        while self.ends[-1] - self.ends[0] > self.window_s:
            self.ends.popleft()
        return len(self.ends) <= self.tries

    async def pause(self) -> None:
        """Waits before the next start."""
        doublings = min(len(self.ends) - 1, 32)
        await asyncio.sleep(min(self.base_s * 2.0**doublings, self.cap_s))


class KeptService:
    """Keeps one service running until it finishes, fails too often or is stopped."""

    def __init__(
        self,
        launch: Launch,
        logs: Path,
        policy: RestartPolicy,
        on_event: Callable[[ChildEvent], None],
        health_s: float,
        needs: Sequence[Supervised] = (),
        heartbeat_s: float = LIMIT_S,
        hung_s: float = news.HUNG_S,
    ) -> None:
        """Creates the service without starting it.

        `needs`: dependencies; the service starts once all are healthy. `heartbeat_s`: seconds of
        a stop after which the process is killed; 0: no limit. `hung_s`: seconds without progress
        after which it is killed; 0, or `heartbeat_s` 0: no limit.
        """
        self.launch = launch
        self.log = logs / f"{launch.name}.log"
        self.is_healthy = asyncio.Event()
        self._policy = policy
        self._on_event = on_event
        self._health_s = health_s
        self._needs = needs
        self._was_healthy = False
        self._heartbeat_s = heartbeat_s
        self._hung_s = hung_s if heartbeat_s else 0.0
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 if it does not run."""
        return self._child.pid if self._child and not self._child.ended.done() else 0

    async def run(self) -> None:
        """Starts and restarts the process; returns when it exits with status 0.

        Raises RunFailed if its exit status reports a failed run. Raises Unavailable with the end of
        the log after a death before it was ever healthy, or an unhealthy start. A config error and
        too many deaths also raise Unavailable. A death counts only if the disk has room and all
        dependencies are healthy. Otherwise the restart waits for room or health without limit. An
        optional process is given up instead, unless its settings are wrong at its first start.
        """
        await self._needs_healthy()
        try:
            if self.launch.command:
                await self._keep_running()
            else:
                await self._become_healthy()
                await self._ping(news.Turns(0))
        except Unavailable as failure:
            if not self.launch.optional or failure.reason == ConfigError.reason:
                raise
            await self.stop(_GIVE_UP_GRACE_S)
            what = str(failure).partition("; its log ")[0]
            self._report("given_up", f"{what}; the run goes on without it; log {self.log}")
            self.is_healthy.set()  # release any process that waits for it

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, waits `grace_s` seconds, then sends SIGKILL to the whole group.

        Call it after run() has been cancelled.
        """
        if self._child is not None:
            await self._child.stop(grace_s)
            self._report("stopped")
            self._child = None

    async def _keep_running(self) -> None:
        kind: EventKind = "started"
        while True:
            child, pipe = await self._start()
            self._report(kind)
            code = await self._live(child, pipe)
            if code == 0:
                self.is_healthy.set()  # the process may end before its first health check
                self._report("finished")
                return
            self.is_healthy.clear()
            self._report("died", child.last_words())
            await self._pause_before_restart(child, code)
            kind = "restarted"

    async def _start(self) -> tuple[Child, int]:
        """Starts the process. Returns it and the read end of its news pipe."""
        reading, writing = news.news_pipe()
        listening = self.launch.listening
        with os.fdopen(writing, "wb"):
            self._child = await Child.execute(
                *self.launch.command,
                log=self.log,
                stop_s=self._heartbeat_s,
                environment={**self.launch.environment, processes.NEWS_VARIABLE: str(writing)},
                stdin=asyncio.subprocess.DEVNULL if listening is None else listening.fileno(),
                pass_fds=(writing,),
            )
        return self._child, reading

    async def _live(self, child: Child, pipe: int) -> int:
        """Waits for health, then for the end. Returns the exit status."""
        turns = news.Turns(self._hung_s)
        health = asyncio.create_task(self._become_healthy())
        hung = asyncio.create_task(turns.end())
        work = (self._read_news(pipe, turns), self._ping(turns))
        tasks = [health, hung, *map(asyncio.create_task, work)]
        try:
            await asyncio.wait({child.ended, health}, return_when=asyncio.FIRST_COMPLETED)
            if not child.ended.done():
                await health
            await asyncio.wait({child.ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not child.ended.done():
                child.kill(hung.result())
            return await child.wait()
        except PacelineError as error:
            raise self._failure(f"is not healthy: {error}") from error
        finally:
            await patience.cancel(*tasks)

    async def _read_news(self, pipe: int, turns: news.Turns) -> None:
        async with aclosing(news.heard(pipe)) as lines:
            async for kind, what in lines:
                if kind == news.TURN:
                    turns.note(what)
                else:
                    self._report(kind, what)

    async def _ping(self, turns: news.Turns) -> None:
        """Pings a server that reports no turns, and reports its outages; never returns.

        A start has its own check. An external server is never killed.
        """
        ping, every_s, misses = self.launch.ping, self._heartbeat_s / 2, 0
        await self.is_healthy.wait()
        if ping is not None:
            turns.note()  # the limit begins
        while ping is not None and every_s:
            try:
                await ping(patience.patient(every_s))
            except PacelineError:
                misses += 1
                if misses == _MISSES:
                    self._report("impaired", f"it does not answer within {every_s:g} s")
            else:
                if misses >= _MISSES:
                    self._report("recovered", "it answers again")
                misses = 0
                turns.note()
            await asyncio.sleep(every_s)
        await asyncio.Event().wait()

    async def _become_healthy(self) -> None:
        check = self.launch.healthy
        remark = await check(self._health_s) if check is not None else None
        self._was_healthy = True
        self.is_healthy.set()
        self._report("healthy", remark or "")

    async def _pause_before_restart(self, child: Child, code: int) -> None:
        if code == processes.EXIT_RUN_FAILED:
            end = child.last_lines()
            printed = end.rfind(f"\n{self.launch.name}: ") + 1  # the last message with its name
            raise RunFailed(f"{end[printed:]}; log {self.log}")
        if not self._was_healthy or code == processes.EXIT_CONFIG:
            wrong = code == processes.EXIT_CONFIG and not self._was_healthy
            reason = ConfigError.reason if wrong else _FAILED
            raise self._failure(f"{processes.describe_exit(code)} at its start", reason)
        if await self._room() or await self._needs_healthy():
            return
        if code == processes.EXIT_FULL:
            await asyncio.sleep(self._policy.cap_s)
            return
        if not self._policy.note_end():
            times, window_s = len(self._policy.ends), self._policy.window_s
            message = f"{processes.describe_exit(code)}, time {times} in {window_s:.0f} s"
            raise self._failure(message)
        await self._policy.pause()

    async def _room(self) -> bool:
        """Waits until the disk has room. Returns whether it was full."""
        waited = False
        while lack := checks.lack_of_room(self.log.parent):
            if not waited:
                self._report("waits", lack)
            waited = True
            await asyncio.sleep(_LOOK_S)  # no event reports free space
        return waited

    async def _needs_healthy(self) -> bool:
        """Waits for healthy dependencies. Returns whether any was unhealthy.

        Optional dependencies matter only before the first healthy state.
        """
        needs = [one for one in self._needs if not (one.launch.optional and self._was_healthy)]
        waited = False
        while late := [need for need in needs if not need.is_healthy.is_set()]:
            waited = True
            await late[0].is_healthy.wait()
        return waited

    def _failure(self, what: str, reason: str = _FAILED) -> Unavailable:
        end = self._child.last_lines() if self._child else ""
        quoted = f"; its log {self.log} ends:\n{end}" if end else ""
        return Unavailable(f"{self.launch.name} {what}{quoted}", reason=reason)

    def _report(self, kind: EventKind, detail: str = "") -> None:
        pid = self._child.pid if self._child else 0
        self._on_event(ChildEvent(self.launch.name, kind, pid, detail))
