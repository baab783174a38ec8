"""Sends commands to the ranks, under one lease at a time, receives their news, and pushes promoted
drafters to the gateway. Imports no torch.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from paceline import errors, telemetry
from paceline.local.patience import deadline, patient
from paceline.ranks import group, messages, watched
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.tensors import ACCEPTANCE, CONFIG, decode_safetensors
from paceline.trajectory import VersionSet
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weights import PushReport, push, push_weights
from paceline.weights.manifest import unchecked_manifest
from paceline.weights.shares import check_share, held_whole
from paceline.whole_files import check_hashes

FACTS_KEPT = 8
PREEMPT_S = 4.0  # if no caller waits; longer than a pause that kills no process
KILL_S = 10.0
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
    news: asyncio.Queue[m.Message | errors.PacelineError | asyncio.Task[Any]] = field(
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

    def end(self, last: m.Stopped | errors.PacelineError) -> None:
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
                message, allowed = "an activation runs", f"more than {old.epoch}"
                raise errors.FailedPrecondition(message, seen=command.epoch, allowed=allowed)
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
        over = errors.FailedPrecondition(
            "no activation of this lease trains", seen=epoch, allowed="the lease of one that trains"
        )
        if lease is None or lease.epoch != epoch or not lease.sent or lease.stopping is not None:
            raise over
        new = sorted(set(slots) - lease.slots.keys())
        lease.slots |= dict.fromkeys(new, time.monotonic())
        number = len(lease.slots)
        if new:
            lease.joins[number] = asyncio.get_running_loop().create_future()
            self.watched.send(m.Join(epoch, list(lease.slots)))
        elif number not in lease.joins:
            return m.SlotsJoined(epoch, number, min(number, self._ranks))
        async with deadline(deadline_s, "the ranks do not join"):
            await asyncio.wait({lease.joins[number]})
        if lease.joins[number].cancelled():
            raise over
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
                pass  # an answer for a lease that has ended
            case m.SlotsJoined() if lease is not None:
                lease.joined(message)
            case m.Stopped() if lease is not None:
                self._end(lease, message)
            case _ if lease is not None:
                lease.news.put_nowait(message)

    def _lost(self, error: errors.PacelineError) -> None:
        if self.lease is not None and self.lease.sent:
            self._end(self.lease, error)

    def _end(self, lease: Lease, last: m.Stopped | errors.PacelineError) -> None:
        lease.end(last)
        if self.lease is lease:
            self.lease = None
            self.watched.works_on("")

    def _nothing_done(self, lease: Lease) -> m.Stopped:
        return m.Stopped(lease.epoch, "preempted", total_steps=self.standing.total_steps)


WORTH_ANOTHER_TRY = (
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.StaleEpoch,
    errors.ResourceExhausted,
)


async def push_drafter(
    channel: grpc.aio.Channel, decision: m.Judged, context: CommandContext
) -> PushReport:
    """Prepare and Push of the candidate at `decision.path`, with its config.json beside its
    tensors.

    Raises DataLoss, WeightsError when a number is not finite, and the errors of push_weights.
    """
    folder = Path(decision.path)
    await asyncio.to_thread(check_hashes, folder)
    try:
        data = await asyncio.to_thread((folder / "model.safetensors").read_bytes)
        config = await asyncio.to_thread((folder / "config.json").read_text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = "the promoted drafter is not where the rank wrote it"
        raise errors.DataLoss(message, seen=str(error)) from error

    shift = decision.shift
    measured = {ACCEPTANCE: shift.to_json()} if shift is not None else {}
    tensors = list(decode_safetensors(data).values())
    manifest = unchecked_manifest(
        WEIGHT_TARGET_DRAFTER,
        decision.drafter_version,
        [tensor.layout for tensor in tensors],
        lm_head_hash=decision.lm_head_hash,
        metadata={"speculator": decision.kind, CONFIG: config, **measured},
    )
    deadline_s = patient(push.push_deadline_s(manifest.total_bytes))
    whole = check_share(manifest, held_whole(tensors))
    return await push_weights(channel, whole, context, deadline_s=deadline_s)


class Promoter:
    """At most one promoted drafter at a time; a newer one replaces an older one.

    A push may outlive its activation, since training never waits for the gateway. The next
    activation reports results that the coordinator has not received, and repeats a failed push.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._waiting: m.Judged | None = None
        # in progress, or done and not yet collected
        self.push: asyncio.Task[m.Judged] | None = None

    def start(self, decision: m.Judged, context: CommandContext, news: asyncio.Queue[Any]) -> None:
        """Pushes a promoted drafter; the finished task is put into `news`."""
        self.cancel()
        self.push = asyncio.create_task(self._attempt(decision, context))
        self.push.add_done_callback(news.put_nowait)

    def start_again(self, context: CommandContext, news: asyncio.Queue[Any]) -> None:
        """Puts the push of an earlier activation into `news`, once it is done. If that push has not
        brought its drafter to the gateway, the drafter is pushed again.
        """
        if self.push is not None:
            self.push.add_done_callback(news.put_nowait)
        elif self._waiting is not None:
            self.start(self._waiting, context, news)

    def collect_outcome(self) -> m.Judged | None:
        """The decision after the gateway's answer: promoted or refused. None without an answer."""
        if self.push is None or not self.push.done():
            return None
        outcome, self.push = self.push.result(), None
        return outcome

    def cancel(self) -> None:
        """Drops the drafter in progress."""
        if self.push is not None:
            self.push.cancel()
        self.push = self._waiting = None

    async def _attempt(self, decision: m.Judged, context: CommandContext) -> m.Judged:
        version = decision.drafter_version
        try:
            report = await push_drafter(self._channel, decision, context)
        except errors.PacelineError as error:
            if isinstance(error, WORTH_ANOTHER_TRY):
                self._waiting = decision
            log.warning("drafter not prepared", drafter_version=version, error=str(error))
            return replace(decision, decision="refused")
        log.info(
            "drafter prepared", drafter_version=version, bytes=report.bytes, seconds=report.push_s
        )
        return decision
