"""Sends commands to the ranks and receives their news. Imports no torch."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from paceline.errors import DeadlineExceeded
from paceline.local.processes import usable_cores
from paceline.local.services import service
from paceline.ranks.group import RankGroup
from paceline.ranks.messages import Save, Saved
from paceline.ranks.watched import WatchedRanks
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.messages import (
    MESSAGES,
    Command,
    Keep,
    Kept,
    Message,
    News,
    Progress,
    Pushed,
    Started,
    Stepped,
    Train,
)
from paceline.telemetry import get_logger

_log = get_logger(__name__)


class PolicyDriver:
    """Runs one command at a time. `watched.supervise` must be running."""

    def __init__(self, config: PolicyTrainerConfig) -> None:
        self._config = config
        self.progress = Progress()
        self.world_size = config.ranks or min(2, usable_cores())
        """Number of ranks, each on its own slot."""
        group = RankGroup(
            "paceline.services.policy_trainer.rank",
            self.world_size,
            threads_per_rank=config.threads_per_rank,
            log_dir=Path(config.run.dir) / "logs",
            config=config,
            heartbeat_s=config.run.heartbeat_s,
            preload=service("policy_trainer").forked,
        )
        self.watched = WatchedRanks[Message](
            group,
            MESSAGES,
            service="policy_trainer",
            start_deadline_s=config.start_deadline_s,
            on_start=self._started,
            on_message=self._take,
        )
        self._turn = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self._turn.locked()

    async def idle(self, deadline_s: float) -> None:
        """Waits until no command is running, at most `deadline_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), self._turn:
                pass

    async def run(self, command: Command, deadline_s: float) -> AsyncIterator[News]:
        """Sends a command and yields its news up to the last.

        Raises the errors of WatchedRanks.run. On DeadlineExceeded the ranks are killed, because
        their state is unknown.
        """
        last = {Train: Pushed, Save: Saved, Keep: Kept}[type(command)]
        async with self._turn:
            await self.watched.wait_ready(self._config.start_deadline_s)
            try:
                async for news in self.watched.run(command, last, deadline_s):
                    yield news
            except DeadlineExceeded:
                self.watched.kill()
                raise

    async def save(self, deadline_s: float) -> Saved:
        """Writes a checkpoint and waits for it."""
        return [one async for one in self.run(Save(), deadline_s) if isinstance(one, Saved)][-1]

    async def keep(self, evaluation: float, deadline_s: float) -> Kept:
        """Sends the evaluation of the present weights, and waits for the checkpoint with the best
        evaluation.
        """
        told = self.run(Keep(evaluation), deadline_s)
        return [one async for one in told if isinstance(one, Kept)][-1]

    async def _started(self) -> None:
        _log.info(
            "ranks_ready",
            pids=self.watched.pids,
            policy_version=self.progress.policy_version,
            step=self.progress.step,
        )

    def _take(self, news: Message) -> None:
        match news:
            case Started():
                self.progress = news.progress
            case Stepped():
                self.progress = news.progress
            case Saved():
                self.progress = dataclasses.replace(self.progress, checkpoint_version=news.version)
            case _:
                pass
