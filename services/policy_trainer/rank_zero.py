"""Reads groups from Redis and sends news to the parent, on rank 0 only.

Except for the push it joins no collective. A failed call raises or reports before the other ranks
wait for this rank.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import DataLoss, PacelineError, Unavailable
from paceline.plugins import import_filter
from paceline.ranks import group, messages
from paceline.rpc.progress import REDIS
from paceline.services.policy_trainer import messages as m
from paceline.services.policy_trainer import metrics, publish
from paceline.services.policy_trainer.batches import batcher
from paceline.services.policy_trainer.batches.records import RecordFile, StepRecord
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.streams import Ledger, RedisStream, connect, run_key
from paceline.telemetry import extract, get_logger, link_current, names, span
from paceline.tensors import NamedTensor
from paceline.training.checkpoints import Resumable
from paceline.weights.manifest import layouts

_log = get_logger(__name__)


class RankZero:
    """Rank 0's connections, and their event loop."""

    def __init__(self, config: PolicyTrainerConfig, link: group.RankLink) -> None:
        self._config = config
        self._link = link
        self._runner = asyncio.Runner()
        self.publisher = publish.Publisher(config, self._runner)
        self._records = RecordFile(config.checkpoints_dir / "records.jsonl")
        self._client = connect(config.redis.durable_url)
        self._stream = RedisStream(self._client, run_key(config.run.id, "trajectories"))
        self._ledger = Ledger(self._client, config.run.id)
        own = config.group_filter
        self._batcher = batcher.Batcher(
            self._stream,
            self._ledger,
            max_staleness=config.max_staleness or 0,
            keeps=import_filter(own, "group filter") if own else None,
        )

    def close(self) -> None:
        """Closes connections and the loop."""
        self._runner.run(self._stream.close())
        self._runner.run(self._client.aclose())
        self._runner.close()

    def open(
        self, progress: m.Progress, found: Resumable, held_twice: int
    ) -> list[batcher.Collected]:
        """Takes over unacknowledged entries; returns the batches of the recorded steps after the
        checkpoint. Raises DataLoss when these steps do not reach the progress of a damaged newer
        checkpoint.
        """
        self._runner.run(self._batcher.open())
        self.release(held_twice)
        records = self._records.load()
        missed = [record for record in records if record.step > progress.step]
        _check_replay(progress.policy_version, missed, found)
        share = self._config.audit.share
        replays = [batcher.collected_of(self._batcher.replay(record), share) for record in missed]
        for record in records:
            self._runner.run(self._batcher.settle(record))
            self._runner.run(self._batcher.mark(record))
        return replays

    def collect(self, command: m.Train) -> batcher.Collected | None:
        """The batch of a step, after its record is on disk. None after a failure, which is reported
        to the parent.
        """
        self.send(messages.Doing(f"collects the groups of step {command.wanted.step}", REDIS))
        try:
            collected = self._runner.run(self._collect(command.wanted, command.carrier))
        except PacelineError as error:
            self.failed(command.command_id, error)
            return None
        self.send(m.Batched(command.command_id, collected.facts))
        return collected

    def send(self, message: m.Message) -> None:
        """Sends news to the parent."""
        self._link.send(m.MESSAGES.encode(message))

    def served(
        self, command: m.Train, publication: publish.Publication
    ) -> Mapping[str, NamedTensor] | None:
        """The gateway's tensors of this version; empty if the gateway serves equal bits or another
        version. None after a failure, which is reported to the parent.
        """
        manifest = publication.policy.manifest
        try:
            try:
                tensors = self._runner.run(publish.pull_served(manifest, self._config)) or []
            except DataLoss as error:  # damaged tensors are pushed again
                version = manifest.version
                _log.warning("served_weights_damaged", version=version, error=str(error))
                tensors = []
            if tensors:
                publish.check_same_model(layouts(manifest), tensors)
        except PacelineError as error:
            self.failed(command.command_id, error)
            return None
        if tensors:
            metrics.VERSIONS_TAKEN.record()
            _log.warning("served_weights_taken", version=manifest.version)
        return {one.name: one for one in tensors}

    def push(
        self, command: m.Train, progress: m.Progress, publication: publish.Publication
    ) -> None:
        """Reports the step, pushes the version with the other ranks, marks its trajectories
        trained, and reports the push. Collective up to the push.
        """
        self.send(m.Stepped(command.command_id, progress))
        version = progress.policy_version
        self.send(messages.Doing(f"pushes p{version}", "gateway"))
        about, parent = {names.RL_STEP: progress.step}, extract(command.carrier)
        try:
            with span(names.POLICY_PUBLISH, about, parent=parent) as current:
                report = self.publisher.push(publication, command.sender())
                current.set_attribute(names.BYTES, report.bytes)
                metrics.PART_TIME.record(report.push_s, part="publish")
                metrics.PUSHED_BYTES.record(report.bytes, encoding=report.encoding)
            if report.replaced:
                _log.warning("version_replaced", version=version)
            for record in self._records.load():
                if record.step == progress.step:
                    self._runner.run(self._batcher.mark(record))
            name = publication.policy.manifest.lm_head_hash
            pushed = (report.bytes, report.push_s, name, report.replaced)
            self.send(m.Pushed(command.command_id, version, *pushed))
        except PacelineError as error:
            self.failed(command.command_id, error)

    def release(self, through_step: int) -> None:
        """Acknowledges the entries of steps up to `through_step`, removes their records, and
        compacts the ledger before them.
        """
        for record in self._records.load():
            if record.step <= through_step:
                self._runner.run(self._batcher.release(record))
        self._records.forget(through_step)
        self._runner.run(self._ledger.compact(through_step - self._config.ledger_keep))

    def saved(self, command_id: int, path: Path, version: int, held_twice: int) -> None:
        """Reports a checkpoint on disk and acknowledges the steps up to `held_twice`. Command 0 is
        a checkpoint of the interval.

        If Redis is away nothing is lost: the records stay, and the next checkpoint acknowledges
        their entries.
        """
        try:
            self.release(held_twice)
        except Unavailable as error:
            self.failed(command_id, error)
            return
        self.send(messages.Saved(command_id, str(path), version))

    def failed(self, command_id: int, error: PacelineError) -> None:
        """Reports a failed command; the ranks handle the next command."""
        _log.error("command_failed", command=command_id, error=str(error))
        self.send(messages.Failed.of(command_id, error))

    def log_step(self, progress: m.Progress) -> None:
        """Logs one line per step."""
        _log.info(
            "policy_stepped",
            step=progress.step,
            policy_version=progress.policy_version,
            reward=round(progress.batch.reward_mean, 4),
            **{name: round(value, 6) for name, value in progress.figures.figures.items()},
            train_s=round(progress.figures.train_s, 3),
            trajectories=progress.batch.trajectories,
            zero_variance_groups=progress.batch.zero_variance_groups,
        )
        metrics.record_step(progress)
        if skipped := progress.figures.skipped_updates:
            metrics.NOT_FINITE.record(skipped, what="update")
            _log.error("updates_skipped", step=progress.step, updates=skipped)

    async def _collect(self, wanted: m.Wanted, carrier: Mapping[str, str]) -> batcher.Collected:
        about, parent = {names.RL_STEP: wanted.step}, extract(carrier)
        with span(names.BATCH_WAIT, about, parent=parent) as current:
            began = time.perf_counter()
            batch = await self._batcher.collect(wanted)
            link_current(batch.links)
            collected = batcher.collected_of(
                batch, self._config.audit.share, waited_s=time.perf_counter() - began
            )
            self._records.append(batch.record)
            await self._batcher.settle(batch.record)
            for lag, count in batch.staleness.items():
                for _ in range(count):
                    metrics.STALENESS.record(lag)
            for reason, dropped in batch.record.dropped_groups.items():
                metrics.GROUPS_DROPPED.record(dropped, reason=reason)
                _log.warning("groups_dropped", step=wanted.step, reason=reason, groups=dropped)
            current.set_attribute(names.TRAJECTORIES, collected.facts.trajectories)
            current.set_attribute(names.ZERO_VARIANCE_GROUPS, collected.facts.zero_variance_groups)
            return collected


def _check_replay(version: int, missed: Sequence[StepRecord], found: Resumable) -> None:
    for fault in found.damaged:
        metrics.CHECKPOINTS_DAMAGED.record()
        _log.error("checkpoint_damaged", fault=fault, resumed=str(found.checkpoint))
    reached = version
    for record in missed:
        if record.policy_version != reached:
            break
        reached += 1
    if reached < max(found.newest, version + len(missed)):
        raise DataLoss(
            f"{found.damaged[0] if found.damaged else 'a checkpoint is gone'}; the steps that it "
            f"held cannot be trained again: their batches are acknowledged",
            seen=f"policy version {reached}",
            allowed=f"{max(found.newest, version + len(missed))}",
        )
