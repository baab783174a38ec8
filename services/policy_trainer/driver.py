"""Sends commands to the ranks and takes their news. Imports no torch."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from pathlib import Path

from paceline.errors import DeadlineExceeded, InternalError, PacelineError, Unavailable
from paceline.ranks.group import RankGroup
from paceline.ranks.messages import Failed, Save, Saved
from paceline.ranks.watched import WatchedRanks
from paceline.telemetry import get_logger
from policy_trainer.config import PolicyTrainerConfig
from policy_trainer.messages import (
    MESSAGES,
    Batched,
    Message,
    Progress,
    Pushed,
    Started,
    Stepped,
    Train,
)

News = Batched | Stepped | Pushed | Saved
_log = get_logger(__name__)


class PolicyDriver:
    """Runs one command at a time. `watched.supervise` must be running."""

    def __init__(self, config: PolicyTrainerConfig) -> None:
        self._config = config
        self.progress = Progress()
        self.watched = WatchedRanks(
            RankGroup(
                "policy_trainer.rank",
                world_size=config.ranks or min(2, os.cpu_count() or 1),
                threads_per_rank=config.threads_per_rank,
                log_dir=Path(config.run.dir) / "logs",
                config=config,
            ),
            start_deadline_s=config.start_deadline_s,
            on_start=self._started,
            on_message=self._take,
            on_lost=self._lost,
        )
        self._turn = asyncio.Lock()
        self._news: asyncio.Queue[Message | PacelineError] = asyncio.Queue()
        self._commands = 0

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self._turn.locked()

    def next_command_id(self) -> int:
        """A number no earlier command has."""
        self._commands += 1
        return self._commands

    async def run(self, command: Train | Save, deadline_s: float) -> AsyncIterator[News]:
        """Sends a command and yields its news up to the last.

        Raises what the ranks report, Unavailable when one is lost, DeadlineExceeded when they stay
        silent; then the ranks are killed, because nobody knows where they are.
        """
        async with self._turn:
            await self.watched.wait_ready(self._config.start_deadline_s)
            self._news = asyncio.Queue()
            await self.watched.send(MESSAGES.encode(command))
            last: type[Message] = Pushed if isinstance(command, Train) else Saved
            while True:
                news = await self._next(command.command_id, deadline_s)
                yield news
                if isinstance(news, last):
                    return

    async def _started(self, group: RankGroup) -> None:
        """The ranks take commands once rank 0 has reported where it stands."""
        _, data = await group.receive(self._config.start_deadline_s)
        started = MESSAGES.decode(data)
        if not isinstance(started, Started):
            raise InternalError("rank 0 began with other news", seen=type(started).__name__)
        self.progress = started.progress
        _log.info(
            "ranks_ready",
            pids=group.pids,
            policy_version=self.progress.policy_version,
            step=self.progress.step,
        )

    def _take(self, rank: int, data: bytes) -> None:
        news = MESSAGES.decode(data)
        match news:
            case Stepped():
                self.progress = news.progress
            case Saved():
                self.progress = dataclasses.replace(self.progress, checkpoint_version=news.version)
        self._news.put_nowait(news)

    def _lost(self, error: PacelineError) -> None:
        self._news.put_nowait(Unavailable(f"the ranks are restarted: {error}", reason=error.reason))

    async def _next(self, command_id: int, deadline_s: float) -> News:
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    news = await self._news.get()
                    if isinstance(news, PacelineError):
                        raise news
                    if (
                        isinstance(news, Batched | Stepped | Pushed | Saved | Failed)
                        and news.command_id == command_id
                    ):
                        break
        except TimeoutError as error:
            self.watched.kill()
            raise DeadlineExceeded(
                "the ranks stay silent and are restarted", seen=f"{deadline_s} s"
            ) from error
        if isinstance(news, Failed):
            raise news.error()
        return news
