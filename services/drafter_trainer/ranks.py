"""The parent's view of its ranks: commands down, news up, one activation at a time. Owns no gRPC and no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from drafter_trainer import messages as m
from drafter_trainer.config import DrafterTrainerConfig
from paceline import telemetry
from paceline.errors import FailedPrecondition, PacelineError
from paceline.local.ranks import RankGroup, RankLost

RECEIVE_S = 3600.0
GRACE_S = 5.0

log = telemetry.get_logger("drafter_trainer.ranks")


class DrafterRanks:
    """Starts the ranks, restarts them when one dies, and routes what they say.

    News of the running activation goes to its queue; the last Stopped is kept for status.
    """

    def __init__(self, config: DrafterTrainerConfig, argv: list[str]) -> None:
        self._config = config
        self._group = RankGroup(
            "drafter_trainer.rank",
            config.ranks,
            config.threads_per_rank,
            argv=argv,
            log_dir=Path(config.run.dir) / "logs",
        )
        self._news: asyncio.Queue[m.Message] | None = None
        self._saved: asyncio.Future[m.Saved] | None = None
        self._remembered: dict[str, m.Message] = {}  # what restarted ranks have to be told again
        self._reader: asyncio.Task[None] | None = None
        self.epoch = 0  # of the running activation, 0 when idle
        self.last: m.Stopped | None = None
        self.alive = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return self._group.pids

    async def start(self) -> None:
        """Returns when all ranks are ready; they are watched from then on."""
        await self._group.start(self._config.rank_start_deadline_s)
        self.alive.set()
        self._reader = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Lets the ranks write their checkpoint and ends them."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._group.stop(GRACE_S)

    async def tell(self, message: m.NewHead | m.Serving) -> None:
        """A fact that also a rank restarted later has to know."""
        key = f"{type(message).__name__}-{message.policy_version if isinstance(message, m.NewHead) else ''}"
        self._remembered[key] = message
        while len(self._remembered) > 8:
            del self._remembered[next(iter(self._remembered))]
        if self.alive.is_set():
            await self._group.send(m.encode(message))

    async def activate(self, command: m.Activate) -> AsyncIterator[m.Message]:
        """News of one activation; ends after Stopped. Raises FailedPrecondition while another runs, RankLost."""
        if self.epoch:
            raise FailedPrecondition("an activation is running", seen=command.epoch, allowed=f"after {self.epoch} ends")
        async with asyncio.timeout(self._config.rank_start_deadline_s):
            await self.alive.wait()
        self._news, self.epoch = asyncio.Queue(maxsize=256), command.epoch
        try:
            await self._group.send(m.encode(command))
            while True:
                message = await self._news.get()
                if isinstance(message, m.Lost):
                    raise RankLost(message.reason)
                yield message
                if isinstance(message, m.Stopped):
                    return
        finally:
            self._news, self.epoch = None, 0

    async def preempt(self, epoch: int) -> None:
        """Asks for a stop between two micro-batches."""
        await self._group.send(m.encode(m.Preempt(epoch)))

    async def save(self, deadline_s: float) -> m.Saved:
        """Writes a checkpoint between two activations."""
        self._saved = asyncio.get_running_loop().create_future()
        await self._group.send(m.encode(m.Save()))
        async with asyncio.timeout(deadline_s):
            return await self._saved

    async def kill(self) -> None:
        """Ends ranks that did not stop in time; the watch starts them again from their checkpoint."""
        self._group.kill()

    async def _watch(self) -> None:
        while True:
            try:
                _, data = await self._group.receive(RECEIVE_S)
                self._route(m.decode(data))
            except RankLost as error:
                log.warning("drafter rank lost; starting again", error=str(error))
                await self._restart(str(error))
            except PacelineError as error:
                log.debug("no news from the ranks", error=str(error))

    def _route(self, message: m.Message) -> None:
        if isinstance(message, m.Stopped):
            self.last = message
        if isinstance(message, m.Saved):
            if self._saved is not None and not self._saved.done():
                self._saved.set_result(message)
        elif self._news is not None:
            self._news.put_nowait(message)

    async def _restart(self, reason: str) -> None:
        self.alive.clear()
        if self._news is not None:
            self._news.put_nowait(m.Lost(reason))
        await self._group.stop(0.0)
        await self._group.start(self._config.rank_start_deadline_s)
        for message in self._remembered.values():
            await self._group.send(m.encode(message))
        self.alive.set()
