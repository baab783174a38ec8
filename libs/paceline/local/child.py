"""Supervises one process: starts it, watches it, restarts it with backoff and stops its group."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

from paceline.errors import ConfigError, PacelineError, RunFailed, Unavailable
from paceline.local import news
from paceline.local.disk import lack_of_room
from paceline.local.heartbeat import LIMIT_S, Heartbeat
from paceline.local.hung import HUNG_S, Turns, unanswered
from paceline.local.launch import ChildEvent, EventKind, Launch, Needed, RestartPolicy
from paceline.local.processes import (
    EXIT_CONFIG,
    EXIT_FULL,
    EXIT_RUN_FAILED,
    child_environment,
    describe_exit,
    last_lines,
    last_words,
    signal_group,
)

_LOOK_S = 1.0
_FAILED = "SERVICE_FAILED"
_GIVE_UP_GRACE_S = 5.0


class Child:
    """Keeps one process running until it finishes, fails too often or is stopped."""

    def __init__(
        self,
        launch: Launch,
        logs: Path,
        policy: RestartPolicy,
        on_event: Callable[[ChildEvent], None],
        health_s: float,
        needs: Sequence[Needed] = (),
        heartbeat_s: float = LIMIT_S,
        hung_s: float = HUNG_S,
    ) -> None:
        """Creates the supervised process without starting it.

        `needs`: dependencies; the process starts once all are healthy. `heartbeat_s`: seconds of
        silence after which the process is killed; 0: no limit. `hung_s`: seconds without progress
        after which it is killed; 0 or no heartbeats: no limit.
        """
        self.launch = launch
        self.log = logs / f"{launch.name}.log"
        self.is_healthy = asyncio.Event()
        self._policy = policy
        self._on_event = on_event
        self._health_s = health_s
        self.needs = needs
        self._was_healthy = False
        self._heartbeat_s = heartbeat_s
        self._heartbeat = Heartbeat(0)
        self._hung_s = hung_s if heartbeat_s else 0.0
        self._turns = Turns(0)
        self._verdict = ""  # reason of a kill other than a heartbeat
        self._process: asyncio.subprocess.Process | None = None
        self._log_begins = 0  # byte offset of the current process in the log
        self._crashes: deque[float] = deque()

    @property
    def pid(self) -> int:
        """Process id; 0 if it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    async def run(self) -> None:
        """Starts and restarts the process; returns when it exits with status 0.

        Raises RunFailed if its exit status reports a failed run. Raises Unavailable with the end of
        the log after a death before it was ever healthy, or an unhealthy start. A config error and
        too many deaths also raise Unavailable. A death counts only if the disk has room and all
        dependencies are healthy. Otherwise the restart waits for room or health without limit. An
        optional process is given up instead, unless its settings are wrong at its first start.
        """
        await self._needs_healthy()
        if not self.launch.command:
            await self._become_healthy()
            await self._hung(math.inf)
            return
        try:
            await self._keep_running()
        except Unavailable as failure:
            if not self.launch.optional or failure.reason == ConfigError.reason:
                raise
            await self.stop(_GIVE_UP_GRACE_S)
            what = str(failure).partition("; its log ")[0]
            self._tell("given_up", f"{what}; the run goes on without it; log {self.log}")
            self.is_healthy.set()  # release any process that waits for it

    async def _keep_running(self) -> None:
        first = True
        while True:
            news_pipe = await self._spawn("started" if first else "restarted")
            code = await self._live(news_pipe)
            if code == 0:
                self.is_healthy.set()  # it may have finished before its first health check
                self._tell("finished")
                return
            self.is_healthy.clear()
            verdict = self._heartbeat.verdict or self._verdict
            self._tell("died", last_words(code, self.log, self._log_begins, verdict))
            await self._pause_before_restart(code)
            first = False

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, waits `grace_s` seconds, then sends SIGKILL to the whole group.

        Call it after run() has been cancelled.
        """
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()

        signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        self._tell("stopped")
        self._process = None

    async def _spawn(self, kind: EventKind) -> int:
        """Starts the process. Returns the read end of its news pipe."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = news.news_pipe()
        listening = self.launch.listening
        self._heartbeat = Heartbeat(self._heartbeat_s)
        self._turns, self._verdict = Turns(self._hung_s), ""
        with self.log.open("ab") as log, os.fdopen(writing, "wb"):
            self._log_begins = log.tell()
            # Use a separate session: Ctrl-C reaches the supervisor only, and the group can be
            # killed as a whole.
            self._process = await asyncio.create_subprocess_exec(
                *self.launch.command,
                stdin=asyncio.subprocess.DEVNULL if listening is None else listening.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(writing,),
                env=child_environment(
                    {
                        **self.launch.environment,
                        **self._heartbeat.environment,
                        news.VARIABLE: str(writing),
                    }
                ),
            )
        self._tell(kind)
        return reading

    async def _hear(self, reading: int) -> None:
        async with aclosing(news.heard(reading)) as lines:
            async for kind, what in lines:
                if kind == news.TURN:
                    self._turns.note(what)
                else:
                    self._tell(kind, what)

    async def _hung(self, limit_s: float) -> str:
        """Returns the reason to kill the process once it makes no progress.

        An external server is never killed; only its outages and recoveries are reported.
        """

        def tell(answers: bool) -> None:
            if answers:
                self._tell("recovered", "it answers again")
            else:
                self._tell("impaired", f"it does not answer within {every_s:g} s")

        ping, every_s = self.launch.ping, self._heartbeat_s / 2
        if ping is None:
            return await self._turns.end()
        await self.is_healthy.wait()  # the start has its own check
        return await unanswered(ping, every_s, limit_s, tell)

    async def _live(self, news_pipe: int) -> int:
        """Waits for health, then for the end. Returns the exit status.

        Afterwards all processes of its group are dead.
        """
        process = self._running
        ending = asyncio.create_task(self._heartbeat.outlived(process))
        health = asyncio.create_task(self._become_healthy())
        hearing = asyncio.create_task(self._hear(news_pipe))
        hung = asyncio.create_task(self._hung(self._hung_s))
        try:
            await asyncio.wait({ending, health}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                await health
            await asyncio.wait({ending, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                self._verdict = hung.result()
                process.kill()
            return await ending
        except PacelineError as error:
            raise self._failure(f"is not healthy: {error}") from error
        finally:
            tasks = (health, ending, hearing, hung)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if process.returncode is not None:
                signal_group(process.pid, signal.SIGKILL)

    async def _become_healthy(self) -> None:
        check = self.launch.healthy
        remark = await check(self._health_s) if check is not None else None
        self._was_healthy = True
        self.is_healthy.set()
        self._tell("healthy", remark or "")

    async def _pause_before_restart(self, code: int) -> None:
        if code == EXIT_RUN_FAILED:
            end = last_lines(self.log, since=self._log_begins)
            printed = end.rfind(f"\n{self.launch.name}: ") + 1  # the last message with its name
            raise RunFailed(f"{end[printed:]}; log {self.log}")
        if not self._was_healthy or code == EXIT_CONFIG:
            wrong = code == EXIT_CONFIG and not self._was_healthy
            reason = ConfigError.reason if wrong else _FAILED
            raise self._failure(f"{describe_exit(code)} at its start", reason)
        if await self._room() or await self._needs_healthy():
            return
        if code == EXIT_FULL:
            await asyncio.sleep(self._policy.cap_s)
            return
        now = asyncio.get_running_loop().time()
        self._crashes.append(now)
        while now - self._crashes[0] > self._policy.window_s:
            self._crashes.popleft()
        if len(self._crashes) > self._policy.tries:
            raise self._failure(
                f"{describe_exit(code)}, time {len(self._crashes)} in {self._policy.window_s:.0f} s"
            )
        await asyncio.sleep(
            min(self._policy.base_s * 2 ** (len(self._crashes) - 1), self._policy.cap_s)
        )

    async def _room(self) -> bool:
        """Waits until the disk has room. Returns whether it was full."""
        waited = False
        while lack := lack_of_room(self.log.parent):
            if not waited:
                self._tell("waits", lack)
            waited = True
            await asyncio.sleep(_LOOK_S)  # no event reports free space
        return waited

    async def _needs_healthy(self) -> bool:
        """Waits for healthy dependencies. Returns whether any was unhealthy.

        Optional dependencies matter only before the first healthy state.
        """
        needs = [one for one in self.needs if not (one.launch.optional and self._was_healthy)]
        waited = False
        while late := [need for need in needs if not need.is_healthy.is_set()]:
            waited = True
            await late[0].is_healthy.wait()
        return waited

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise Unavailable(f"{self.launch.name} does not run")
        return self._process

    def _failure(self, what: str, reason: str = _FAILED) -> Unavailable:
        end = last_lines(self.log, since=self._log_begins)
        quoted = f"; its log {self.log} ends:\n{end}" if end else ""
        return Unavailable(f"{self.launch.name} {what}{quoted}", reason=reason)

    def _tell(self, kind: EventKind, detail: str = "") -> None:
        self._on_event(
            ChildEvent(self.launch.name, kind, self._process.pid if self._process else 0, detail)
        )
