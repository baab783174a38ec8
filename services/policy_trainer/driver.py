"""Sends commands to the ranks and takes their news. Imports no torch."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from paceline.errors import DeadlineExceeded, PacelineError
from paceline.ranks.group import HostShare
from paceline.ranks.hosts import RankHosts
from paceline.ranks.messages import Save, Saved
from paceline.ranks.spread import RanksOfHost, SpreadRanks
from paceline.ranks.watched import WatchedRanks
from paceline.services.policy_trainer.chosen_ranks import read_ranks, write_ranks
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.hosts import group_on, ranks_of, same_on_hosts, shares
from paceline.services.policy_trainer.messages import (
    MESSAGES,
    Command,
    Keep,
    Kept,
    Message,
    News,
    Progress,
    Pushed,
    Resharded,
    Started,
    Stepped,
    Train,
)
from paceline.telemetry import get_logger

_log = get_logger(__name__)


class PolicyDriver:
    """Runs one command at a time. `watched.supervise` must be running."""

    def __init__(self, config: PolicyTrainerConfig) -> None:
        """Raises ConfigError for hosts of ranks that cannot be, DataLoss for a damaged file of the
        ranks that were chosen.
        """
        self._config = config
        self.hosts = RankHosts(len(config.hosts[1:]), "policy_trainer", same_on_hosts(config))
        """Those beside this one, which may join."""
        self.progress = Progress()
        self._set = ranks_of(config)
        self._device = ""  # where they compute, once they have said so
        own = group_on(config, 0)
        self._parts: list[RanksOfHost] = [own, *self.hosts.ranks]
        most = sum(config.hosts) or None
        self._resize(shares(config, read_ranks(config.checkpoints_dir, self._set, most)))
        folder = Path(config.run.dir) / "policy" / "ranks"
        self.watched = WatchedRanks[Message](
            SpreadRanks(self._parts, folder) if self.hosts.ranks else own,
            MESSAGES,
            service="policy_trainer",
            start_deadline_s=config.start_deadline_s,
            on_start=self._started,
            on_message=self._take,
        )
        self._turn = asyncio.Lock()

    @property
    def world_size(self) -> int:
        """Ranks, each on a slot of its own."""
        return sum(part.size for part in self._parts)

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self._turn.locked()

    async def idle(self, deadline_s: float) -> None:
        """Waits until no command is running, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), self._turn:
                pass

    async def run(self, command: Command, deadline_s: float, ranks: int = 0) -> AsyncIterator[News]:
        """Sends a command and yields its news up to the last. `ranks`: that are to carry it out and
        what follows, which is told first; 0: those that there are.

        Raises what WatchedRanks.run raises; ranks that stay silent are killed, because nobody knows
        where they are.
        """
        async with self._turn:
            await self.watched.wait_ready(self._config.start_deadline_s)
            if ranks:
                yield await self._reshard(ranks, deadline_s)
            async for news in self._told(command, deadline_s):
                yield news

    async def _told(self, command: Command, deadline_s: float) -> AsyncGenerator[News]:
        last = {Train: Pushed, Save: Saved, Keep: Kept}[type(command)]
        try:
            async for news in self.watched.run(command, last, deadline_s):
                yield news
        except DeadlineExceeded:
            self.watched.kill()
            raise

    async def _reshard(self, ranks: int, deadline_s: float) -> Resharded:
        """Has so many ranks take up what those before have written; these again where that
        fails.
        """
        began, failure = time.monotonic(), ""
        try:
            if ranks != self.world_size:
                await self._start_anew(ranks, deadline_s)
            write_ranks(self._config.checkpoints_dir, ranks, self._set)
        except PacelineError as error:
            failure = str(error).partition("\n")[0]
            _log.error("ranks_not_changed", wanted=ranks, error=str(error))
            await self.watched.wait_ready(self._config.start_deadline_s)
        return Resharded(self.world_size, time.monotonic() - began, failure)

    async def _start_anew(self, ranks: int, deadline_s: float) -> None:
        # On the kind of device that they have now: GPUs that are too few are not left for the CPU.
        wanted = shares(self._config, ranks, self._device)
        before = shares(self._config, self.world_size, self._device)
        # What a checkpoint has is resharded bit for bit; a replay by other ranks has other bits.
        if self.progress.policy_version > self.progress.checkpoint_version:
            async for _ in self._told(Save(), deadline_s):
                pass
        await self.watched.change(partial(self._resize, wanted), partial(self._resize, before))

    def _resize(self, by_host: Sequence[HostShare]) -> None:
        """The next start is of these."""
        for part, share in zip(self._parts, by_host, strict=True):
            part.resize(share)

    async def save(self, deadline_s: float) -> Saved:
        """Writes a checkpoint and waits for it."""
        return [one async for one in self.run(Save(), deadline_s) if isinstance(one, Saved)][-1]

    async def keep(self, evaluation: float, deadline_s: float) -> Kept:
        """Tells what the weights are worth, and waits for the checkpoint of the best ones."""
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
                self.progress, self._device = news.progress, news.device
            case Stepped():
                self.progress = news.progress
            case Saved():
                self.progress = dataclasses.replace(self.progress, checkpoint_version=news.version)
            case _:
                pass
