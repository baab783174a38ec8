"""Runs one rank of the drafter trainer as its own process: set-up, leases, checkpoints."""

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline import telemetry
from paceline.errors import PacelineError
from paceline.local.patience import patient
from paceline.models.config import read_config
from paceline.ranks import group, messages
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer import metrics, trainer
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.gate.round import Candidates
from paceline.services.drafter_trainer.learn import learner, membership
from paceline.services.drafter_trainer.rows import sample, store
from paceline.speculators.packed import PackedRow
from paceline.streams import RedisStream, connect, run_key
from paceline.training import checkpoints
from paceline.training.process import COLLECTIVE_S, from_rank_zero, join_ranks

IDLE_S = 1.0
SPECULATOR = "speculator"
HEAD_DEADLINE_S = 20.0
JOIN_DEADLINE_S = 20.0

log = telemetry.get_logger("paceline.services.drafter_trainer.rank")


class Rank(trainer.DrafterTrainer):
    """One process of the group: rank 0 runs the loop, and the other members follow it
    row by row.
    """

    def __init__(self, config: DrafterTrainerConfig, ranks: group.RankLink) -> None:
        self.rank, self._target = ranks.rank, read_config(Path(config.model))
        rows = store.RowStore(
            config.buffer, config.run.seed, config.micro_batch_bytes, self._target.eos_token_ids
        )
        rows.add_head(sample.load_policy_head(Path(config.model), 0))
        net = learner.initial_net(config, self._target)
        directory = Path(config.run.dir) / "checkpoints"
        candidates = Candidates(directory / "drafter-candidates", self._target, [net.kind])
        if self.rank == 0 and not candidates.versions:
            candidates.save(0, net)
        self.membership = membership.Membership(config.device)
        own = learner.DrafterLearner(
            net,
            config.optimizer,
            micro_batches=config.micro_batches_per_step,
            members=self.membership.members,
        )
        super().__init__(config, own, rows, trainer.TrainerLink(ranks), candidates)
        self._writer = checkpoints.CheckpointWriter(directory / "drafter", self._export)
        self._saved_steps, self._saved_at = 0, time.monotonic()
        self._resume(directory / "drafter")
        self.link.on_command = self.obey
        redis, name = config.redis.features, run_key(config.run.id, "features")
        self._feed = store.RowFeed(
            lambda: RedisStream(connect(redis), name), self._target, self.rows.add
        )
        if self.rank == 0:
            self._feed.start()

    @property
    def lost(self) -> Counter[str]:
        """Entries without rows, by reason."""
        return self._feed.dropped

    def _resume(self, directory: Path) -> None:
        """Loads the newest intact checkpoint; an older checkpoint has only learned less."""
        group_of_all = self.membership.members.group
        found = checkpoints.find_whole(directory, checkpoints.PREFIX, group_of_all)
        for fault in found.damaged:
            log.error("checkpoint is damaged", fault=fault)
            if self.rank == 0:
                metrics.CHECKPOINTS_DAMAGED.record()
                self.link.send(messages.Impaired(f"{fault}; the checkpoint before it is loaded"))
        if found.checkpoint is not None:
            like = self.state()
            self.load_state(checkpoints.read_checkpoint(found.checkpoint, like))
            self._saved_steps = self.learner.total_steps

    def run(self) -> None:
        """Until SIGTERM: waits for a lease, trains under it, and writes a checkpoint when it is
        due.
        """
        self.report()
        while not self.link.stopping:
            self._feed.check()
            match self.link.wait_turn(IDLE_S):
                case m.Activate() as command:
                    with trainer.activation_span(command):
                        self.activate(command)
                case m.Join() as command:  # a rank that does not train, or a late Join
                    if self._join(command, running=False) and self.learner.members.takes_part:
                        self._follow()
                        self._leave()
                case messages.Save(command_id):
                    number = self.save(always=True)
                    self._writer.wait(lambda: self.link.send(messages.Doing("writes a checkpoint")))
                    if self.rank == 0:
                        path = self._writer.path(number) / SPECULATOR
                        self.link.send(
                            messages.Saved(command_id, str(path), self.learner.total_steps)
                        )
        self.save()
        self._writer.wait()
        self._feed.close()
        self.link.close()

    def activate(self, command: m.Activate) -> None:
        """Trains under a lease.

        All ranks take part in forming the group; ranks outside it then wait again.
        """
        self._gather(command.slots)
        stopped = None
        if self.rank == 0:
            stopped = self.run_activation(command)
        elif self.learner.members.takes_part:
            self._follow()

        self._leave()
        if stopped is not None:
            self.link.send(stopped)

    def add_slots(self, epoch: int) -> Sequence[int] | None:
        """On rank 0, between two micro-batches: the new slots of the lease if slots were added,
        else None.

        A partial gradient moves along, so the change need not wait for the end of an optimiser
        step. A pending checkpoint is finished first, during training.
        """
        if not self.link.joins(epoch) or self._writer.busy:
            return None
        command = self.link.next_turn(0)
        assert isinstance(command, m.Join)
        membership.announce("join", self.learner.members)
        self._join(command, running=True)
        size = self.learner.members.size
        self.link.send(m.SlotsJoined(epoch, len(command.slots), size))
        return command.slots

    def _join(self, command: m.Join, *, running: bool) -> bool:
        """Trains on these slots if rank 0's activation is `running`; returns whether it is.

        Collective over all ranks, once for every Join command, even a late Join.
        """
        if not from_rank_zero(running):
            return False
        self._gather(command.slots)
        return True

    def _gather(self, slots: Sequence[int]) -> None:
        """Moves the drafter to the ranks on the given slots."""
        if not self.membership.is_current(slots):
            self._writer.wait()  # the writing thread uses the group
        self.learner.attach(self.membership.join(slots))

    def _leave(self) -> None:
        """Leaves the slots; they are free when all members have left."""
        self.learner.offload()
        self.learner.members.meet()

    def _follow(self) -> None:
        """Takes part in every collective that rank 0 announces."""
        while True:
            match membership.receive(self.learner.members):
                case "stop":
                    return
                case "wait":
                    continue
                case "snapshot":
                    self.learner.snapshot()
                case "again":
                    self.learner.begin_again()
                case "save":
                    self.save()
                case "join":
                    command = self.link.next_turn(patient(JOIN_DEADLINE_S))
                    assert isinstance(command, m.Join), "ranks have their commands in one order"
                    self._join(command, running=False)
                case PackedRow() as row:
                    self.learner.micro_step(row, self._head(row.lm_head_hash))

    def _head(self, wanted: str) -> sample.PolicyHead:
        """The head that rank 0 trains with. The parent sends it to all ranks, but this rank may not
        have read it yet.
        """
        known = self.rows.heads
        self.link.wait_until(lambda: known.get(wanted) is not None, patient(HEAD_DEADLINE_S))
        head = known.get(wanted)
        assert head is not None
        return head

    def obey(self, message: m.Message) -> None:
        """Handles commands that need no lease."""
        match message:
            case m.NewHead(policy_version, path):
                self.add_head(policy_version, Path(path))
                self.report()
            case m.Serving(_, drafter_version):
                if self.rank == 0:
                    self.gate.on_serving(drafter_version)
            case _:
                raise TypeError(f"a rank does not take {type(message).__name__}")

    def add_head(self, policy_version: int, path: Path) -> None:
        """Adds a policy head. An unreadable head, or a head that has left the spool, is left out;
        its rows then count as stale.
        """
        try:
            head = sample.read_spooled_head(path, policy_version, self._target)
        except (OSError, PacelineError) as error:
            log.error("policy head cannot be used", policy_version=policy_version, error=str(error))
            return
        if head is None:
            log.info("policy head has left the spool", policy_version=policy_version)
        else:
            self.rows.add_head(head)

    def report(self) -> None:
        """Sends rank 0's progress to the parent."""
        if self.rank == 0:
            self.link.send(self.standing())

    def after_step(self) -> None:
        """On rank 0, between two steps: starts a checkpoint every `checkpoint_interval_s` seconds,
        unless the last checkpoint is still being written.
        """
        due = time.monotonic() - self._saved_at >= self._config.checkpoint_interval_s
        if due and not self._writer.busy:
            membership.announce("save", self.learner.members)
            self.save()

    def save(self, *, always: bool = False) -> int:
        """Starts a checkpoint if there are new optimiser steps. Collective over the members.

        Training pauses while the tensors are copied and continues during the write. Returns the
        checkpoint's number; 0 without new steps.
        """
        members, steps = self.learner.members, self.learner.total_steps
        if not members.takes_part:
            return 0
        self._writer.wait()
        (number,) = members.agree(
            self._writer.next_number if always or steps > self._saved_steps else 0
        )
        if number:
            self._writer.write(self.state(), number, members.writing)
            self._saved_steps, self._saved_at = steps, time.monotonic()
            self.report()

        return number

    def _export(self, state: dict[str, Any], checkpoint: Path) -> None:
        self.learner.export(state, checkpoint, checkpoint / SPECULATOR)


def main() -> None:
    """Reads the service's config from the environment, where the parent put it, and runs."""
    link = group.RankLink.from_environment()
    config = link.config(DrafterTrainerConfig)
    telemetry.setup("drafter_trainer", config.telemetry)
    os.nice(config.niceness)
    join_ranks(config.device, COLLECTIVE_S, threads=config.threads_per_rank, seed=config.run.seed)
    rank = Rank(config, link)
    signal.signal(signal.SIGTERM, lambda *_: setattr(rank.link, "stopping", True))
    link.ready()
    try:
        rank.run()
    finally:
        telemetry.shutdown()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
