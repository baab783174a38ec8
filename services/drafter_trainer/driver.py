"""Sends commands to the ranks, under one lease at a time, and receives their news. Imports no
torch.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import telemetry
from paceline.errors import DeadlineExceeded, FailedPrecondition, PacelineError
from paceline.local.patience import patient
from paceline.ranks import group, messages, watched
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.trajectory import VersionSet

FACTS_KEPT = 8
PREEMPT_S = 4.0  # if no caller waits; longer than a pause that kills no process
KILL_S = 10.0
_NO_ACTIVATION = "no activation of this lease trains"
START_S = 90.0  # import torch, read the drafter and the policy's head

log = telemetry.get_logger("paceline.services.drafter_trainer.driver")


@dataclass(slots=True, eq=False)
class Lease:
    """One activation as the parent sees it."""

    epoch: int
    deadline_s: float  # training must have started by then
    slots: dict[int, float]  # slot -> time.monotonic() of its lease, in rank order
    began: float = field(default_factory=time.monotonic)
    # also finished pushes; the last item of the ranks is Stopped or an error
    news: asyncio.Queue[m.Message | PacelineError | asyncio.Task[Any]] = field(
        default_factory=asyncio.Queue
    )
    over: asyncio.Event = field(default_factory=asyncio.Event)  # the slots are free
    sent: bool = False  # the ranks have received it
    stopping: asyncio.Task[None] | None = None
    joins: dict[int, asyncio.Future[m.SlotsJoined]] = field(default_factory=dict)  # by slot count

    @property
    def slot_s(self) -> float:
        """Slot-seconds of the lease so far."""
        now = time.monotonic()
        return sum(now - since for since in self.slots.values())

    def joined(self, news: m.SlotsJoined) -> None:
        """Records that ranks on added slots train."""
        waiting = self.joins[news.slots]
        if not waiting.done():
            waiting.set_result(news)

    def end(self, last: m.Stopped | PacelineError) -> None:
        """Records that the slots are free, with the last news."""
        if not self.over.is_set():
            self.news.put_nowait(last)
            self.over.set()
            for waiting in self.joins.values():
                waiting.cancel()


class DrafterDriver:
    """Runs training under leases on the ranks. `watched.supervise` must be running."""

    def __init__(self, config: DrafterTrainerConfig) -> None:
        self._ranks = config.ranks
        self.watched = watched.WatchedRanks[m.Message](
            group.RankGroup(
                "paceline.services.drafter_trainer.rank",
                config.ranks,
                config.threads_per_rank,
                log_dir=Path(config.run.dir) / "logs",
                config=config,
                heartbeat_s=config.run.heartbeat_s,
            ),
            m.MESSAGES,
            service="drafter_trainer",
            start_deadline_s=START_S,
            on_start=self._started,
            on_message=self._receive,
            on_lost=self._lost,
        )
        # sent again to restarted ranks
        self._facts: dict[str, m.NewHead | m.Serving] = {}
        self.lease: Lease | None = None
        self.standing = m.Standing()

    @property
    def epoch(self) -> int:
        """Epoch of the running activation; 0 when idle."""
        return self.lease.epoch if self.lease else 0

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        """Sends a pushed head to the ranks at once, since its rows may arrive before its commit."""
        await self.send_fact(m.NewHead(version, str(path)))

    async def on_commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None:
        """Sends the serving set to the ranks, which compare the next candidate with it."""
        await self.send_fact(m.Serving(versions.policy, versions.drafter))

    async def on_abort(self, target: int, version: int) -> None:
        """Does nothing: no rows refer to a head that never serves."""

    async def send_fact(self, fact: m.NewHead | m.Serving) -> None:
        """Sends a fact to the ranks, and keeps it for ranks that start later."""
        key = f"head {fact.policy_version}" if isinstance(fact, m.NewHead) else "serving"
        self._facts.pop(key, None)
        self._facts[key] = fact
        while len(self._facts) > FACTS_KEPT:
            del self._facts[next(iter(self._facts))]
        if self.watched.ready:
            try:
                self.watched.send(fact)
            except group.RankLost as error:  # later ranks receive it at their start
                log.warning("a lost rank receives no fact", error=str(error))

    async def begin(self, command: m.Activate, deadline_s: float) -> Lease:
        """Starts an activation; an activation of an older epoch is stopped first.

        Raises FailedPrecondition when an activation of this or a newer epoch runs, Unavailable when
        no ranks are ready within `deadline_s` seconds.
        """
        while (old := self.lease) is not None:
            if command.epoch <= old.epoch:
                raise FailedPrecondition(
                    "an activation runs", seen=command.epoch, allowed=f"more than {old.epoch}"
                )
            await self.stop_lease(old)

        since = dict.fromkeys(command.slots, time.monotonic())
        lease = self.lease = Lease(command.epoch, deadline_s, since)
        try:
            await self.watched.wait_ready(deadline_s)
            if not lease.over.is_set():
                self.watched.send(command)
                lease.sent = True
                self.watched.works_on(f"activation of step {command.step}")
        finally:
            if not lease.sent:
                self._end(lease, self._nothing_done(lease))

        return lease

    async def join(self, epoch: int, slots: Sequence[int], deadline_s: float) -> m.SlotsJoined:
        """Extends the activation of that lease to these slots; returns once it trains on them.

        A repeated call returns the first call's answer. Raises FailedPrecondition when no such
        activation trains or it ends first, and DeadlineExceeded.
        """
        lease = self.lease
        if lease is None or lease.epoch != epoch or not lease.sent or lease.stopping is not None:
            raise FailedPrecondition(_NO_ACTIVATION, seen=epoch, allowed=f"{self.epoch}")
        new = sorted(set(slots) - lease.slots.keys())
        lease.slots |= dict.fromkeys(new, time.monotonic())
        number = len(lease.slots)
        if new:
            lease.joins[number] = asyncio.get_running_loop().create_future()
            self.watched.send(m.Join(epoch, list(lease.slots)))
        elif number not in lease.joins:
            return m.SlotsJoined(epoch, number, min(number, self._ranks))
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait({lease.joins[number]})
        except TimeoutError as error:
            raise DeadlineExceeded("the ranks do not join", seen=f"{deadline_s} s") from error
        if lease.joins[number].cancelled():
            raise FailedPrecondition(_NO_ACTIVATION, seen=epoch, allowed=f"{self.epoch}")
        return lease.joins[number].result()

    async def stop_lease(self, lease: Lease, deadline_s: float | None = None) -> None:
        """Stops a lease and returns when its slots are free. The stop continues if the caller is
        cancelled.
        """
        self.abandon(lease, deadline_s)
        if lease.stopping is not None:
            await asyncio.shield(lease.stopping)

    def abandon(self, lease: Lease, deadline_s: float | None = None) -> None:
        """Stops a lease without waiting; ranks that exceed the deadline are killed. None: the
        deadline PREEMPT_S.
        """
        if not lease.over.is_set() and lease.stopping is None:
            limit_s = patient(PREEMPT_S) if deadline_s is None else deadline_s
            lease.stopping = asyncio.create_task(self._stop(lease, limit_s))

    async def save(self, deadline_s: float) -> messages.Saved:
        """Writes a checkpoint between two activations. Raises RankLost, DeadlineExceeded."""
        await self.watched.wait_ready(deadline_s)
        news = self.watched.run(messages.Save(), messages.Saved, deadline_s)
        return [saved async for saved in news if isinstance(saved, messages.Saved)][-1]

    async def _stop(self, lease: Lease, deadline_s: float) -> None:
        """Sends Preempt; kills the ranks if they do not stop between two micro-batches in time."""
        if not lease.sent:
            self._end(lease, self._nothing_done(lease))
            return
        started = time.monotonic()
        try:
            self.watched.send(m.Preempt(lease.epoch))
            async with asyncio.timeout(deadline_s):
                await lease.over.wait()
        except TimeoutError:
            log.warning(
                "ranks did not stop in time and are killed", seconds=time.monotonic() - started
            )
            self.watched.group.kill()
            async with asyncio.timeout(patient(KILL_S)):
                await lease.over.wait()
        except group.RankLost as error:
            self._end(lease, error)

    def _started(self) -> None:
        """Sends the lasting facts to restarted ranks."""
        for fact in self.lasting_facts():
            self.watched.send(fact)

    def lasting_facts(self) -> list[m.NewHead | m.Serving]:
        """The facts that restarted ranks need; heads that have left the spool are dropped."""
        self._facts = {
            key: fact
            for key, fact in self._facts.items()
            if isinstance(fact, m.Serving) or Path(fact.path).is_dir()
        }
        return [*self._facts.values()]

    def _receive(self, message: m.Message) -> None:
        lease = self.lease
        match message:
            case m.Standing():
                self.standing = message
            case messages.Saved():
                pass  # WatchedRanks returns it to the caller
            case m.SlotsJoined(epoch) | m.Stopped(epoch) if lease is None or lease.epoch != epoch:
                pass  # of a lease that is over
            case m.SlotsJoined() if lease is not None:
                lease.joined(message)
            case m.Stopped() if lease is not None:
                self._end(lease, message)
            case _ if lease is not None:
                lease.news.put_nowait(message)

    def _lost(self, error: PacelineError) -> None:
        if self.lease is not None and self.lease.sent:
            self._end(self.lease, error)

    def _end(self, lease: Lease, last: m.Stopped | PacelineError) -> None:
        lease.end(last)
        if self.lease is lease:
            self.lease = None
            self.watched.works_on("")

    def _nothing_done(self, lease: Lease) -> m.Stopped:
        return m.Stopped(lease.epoch, "preempted", total_steps=self.standing.total_steps)
