"""The ranks as the service sees them: started, watched, commanded, restarted. Owns their life; imports no torch."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from pathlib import Path

from paceline.errors import DeadlineExceeded, InternalError, PacelineError, Unavailable
from paceline.local.ranks import RankGroup
from paceline.telemetry import get_logger
from policy_trainer.config import PolicyTrainerConfig
from policy_trainer.messages import (
    Batched,
    Failed,
    Message,
    Progress,
    Pushed,
    Report,
    Save,
    Saved,
    Started,
    Stepped,
    Train,
    decode,
    encode,
)

CONFIG_VARIABLE = "PACELINE_POLICY_TRAINER_CONFIG"
News = Batched | Stepped | Pushed | Saved
_RESTARTS = 5
_BACKOFF_S = 0.5
_IDLE_S = 3600.0
_log = get_logger(__name__)


class TrainerRanks:
    """One group of ranks; commands run one at a time. `supervise` must be running."""

    def __init__(self, config: PolicyTrainerConfig) -> None:
        self._config = config
        self.progress = Progress()
        self._group = RankGroup(
            "policy_trainer.rank",
            world_size=config.ranks or min(2, os.cpu_count() or 1),
            threads_per_rank=config.threads_per_rank,
            log_dir=Path(config.run.dir) / "logs",
            env={CONFIG_VARIABLE: config.model_dump_json()},
        )
        self._ready = asyncio.Event()
        self._down = asyncio.Event()
        self._turn = asyncio.Lock()
        self._news: asyncio.Queue[Message | PacelineError] = asyncio.Queue()
        self._commands = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        return self._group.pids

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self._turn.locked()

    @property
    def ready(self) -> bool:
        """Whether the ranks take commands."""
        return self._ready.is_set()

    async def supervise(self) -> None:
        """Starts the ranks and starts them again when one is lost, from the newest checkpoint.

        Raises what the first start raised, or the last one after several in a row.
        """
        failures = 0
        while True:
            try:
                await self._start()
                failures = 0
                await self._listen()
            except PacelineError as error:
                failures += 1
                was_ready = self.ready
                self._ready.clear()
                self._down.set()
                self._news.put_nowait(Unavailable(f"the ranks are restarted: {error}", reason=error.reason))
                await self._group.stop(0.0)
                if failures > _RESTARTS or (self._commands == 0 and not was_ready):
                    raise
                _log.error("ranks_lost", error=str(error), failures=failures)
                await asyncio.sleep(_BACKOFF_S * failures)

    async def wait_ready(self, deadline_s: float) -> None:
        """Waits until the ranks take commands; Unavailable when they do not in time."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._ready.wait()
        except TimeoutError as error:
            raise Unavailable("the ranks are not ready", seen=f"{deadline_s} s", reason="RANK_LOST") from error

    async def changed(self, *, serving: bool) -> None:
        """Waits until the ranks take commands, or until they do not."""
        await (self._ready if serving else self._down).wait()

    def next_command_id(self) -> int:
        """A number no earlier command has."""
        self._commands += 1
        return self._commands

    async def run(self, command: Train | Save, deadline_s: float) -> AsyncIterator[News]:
        """Sends a command and yields its news up to the last.

        Raises what the ranks report, Unavailable when one is lost, DeadlineExceeded when they stay silent; then the
        ranks are killed, because nobody knows where they are.
        """
        async with self._turn:
            await self.wait_ready(self._config.start_deadline_s)
            self._news = asyncio.Queue()
            await self._group.send(encode(command))
            last: type[Message] = Pushed if isinstance(command, Train) else Saved
            while True:
                news = await self._next(command.command_id, deadline_s)
                yield news
                if isinstance(news, last):
                    return

    async def stop(self, grace_s: float) -> None:
        """Ends all ranks."""
        await self._group.stop(grace_s)

    async def _start(self) -> None:
        deadline_s = self._config.start_deadline_s
        await self._group.start(deadline_s)
        await self._group.send(encode(Report(0)))
        _, data = await self._group.receive(deadline_s)
        started = decode(data)
        if not isinstance(started, Started):
            raise InternalError("rank 0 began with other news", seen=type(started).__name__)
        self.progress = started.progress
        self._down.clear()
        self._ready.set()
        _log.info("ranks_ready", pids=self.pids, policy_version=self.progress.policy_version, step=self.progress.step)

    async def _listen(self) -> None:
        """Takes news for ever; ends with RankLost."""
        while True:
            try:
                _, data = await self._group.receive(_IDLE_S)
            except DeadlineExceeded:
                continue
            news = decode(data)
            match news:
                case Stepped():
                    self.progress = news.progress
                case Saved():
                    self.progress = dataclasses.replace(self.progress, checkpoint_version=news.policy_version)
            self._news.put_nowait(news)

    async def _next(self, command_id: int, deadline_s: float) -> News:
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    news = await self._news.get()
                    if isinstance(news, PacelineError):
                        raise news
                    if isinstance(news, Batched | Stepped | Pushed | Saved | Failed) and news.command_id == command_id:
                        break
        except TimeoutError as error:
            self._group.kill()
            raise DeadlineExceeded("the ranks stay silent and are restarted", seen=f"{deadline_s} s") from error
        if isinstance(news, Failed):
            raise news.error()
        return news
