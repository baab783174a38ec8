"""The loop of the policy trainer on every rank: command, batch, step, push, checkpoint."""

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline import errors
from paceline.processor import give_back_heap
from paceline.ranks.messages import Impaired, ProgressReport, Save, Saved
from paceline.services.policy_trainer import messages, metrics, publish, rank_zero
from paceline.services.policy_trainer.audit import audit_figures, judged
from paceline.services.policy_trainer.batches import batcher, records
from paceline.services.policy_trainer.batches.batch import TrainBatch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.learner import Learner
from paceline.tagged_json import from_object, to_object
from paceline.telemetry import extract, names, span
from paceline.training import checkpoints, process, shards
from paceline.weights.chunks import available_bytes

_PREFIX = "step-"  # a checkpoint's number is its policy version
SKIPPED_IN_ROW = 3
"""Number of consecutive steps with skipped updates that ends the run, because it no
longer learns.
"""
HELD_IN_PUSH = 4
"""Versions that other processes may take from the memory in a push: in the gateway, in its spool
and in the workers' files, and the head. Fresh memory costs more than memory that the heap has kept.
"""
_NO_TRACE: Mapping[str, str] = {}


class PolicyTrainer:
    """The trainer of one rank.

    All ranks receive the same commands in the same order; `zero` is None except on rank 0.
    """

    def __init__(
        self,
        config: PolicyTrainerConfig,
        learner: Learner,
        zero: rank_zero.RankZero | None,
        progress: ProgressReport | None = None,
    ) -> None:
        """`progress`: receives this rank's progress reports; None: no reports."""
        self.config = config
        self.zero = zero
        self.progress = messages.Progress()
        self.publisher = zero.publisher if zero else publish.Publisher(config, asyncio.Runner())
        self.report = progress or ProgressReport(lambda doing: None)
        self.adopt(learner)
        self.writing = dist.new_group(backend="gloo")
        # The Hugging Face directory has merged weights in place of adapters.
        self._whole = "" if learner.weights.adapted else "learner/model"
        self._on_cpu = learner.mesh.device_type == "cpu"
        self._writer = checkpoints.CheckpointWriter(
            config.checkpoints_dir, self.export, prefix=_PREFIX, whole=self._whole
        )
        best = records.read_best(config.checkpoints_dir)
        self._writer.kept = best.policy_version if best else None
        self._copied: Mapping[str, Any] | None = None  # copies of the last checkpoint, for reuse
        self._begun = 0  # version of the last started checkpoint, equal on all ranks
        self._unreported: tuple[int, messages.Progress] | None = None  # command and progress
        self._resumed = False  # resumed, and not yet compared with the served weights

    def adopt(self, learner: Learner) -> None:
        """Takes a learner, and reports its progress."""
        self.learner = learner
        learner.on_layer = self.report.goes_on
        learner.on_micro_batch = lambda number, of: self.report.begins(
            f"trains micro-batch {number} of {of}"
        )

    def resume(self) -> None:
        """Loads the newest intact checkpoint and replays the later steps. Raises DataLoss for a
        checkpoint of another model or trainer.
        """
        self.report.begins("loads the newest checkpoint")
        found = checkpoints.find_whole(self.config.checkpoints_dir, _PREFIX, dist.group.WORLD)
        for fault in found.damaged:
            if self.zero:
                self.zero.send(Impaired(f"{fault}; the checkpoint before it is loaded"))
        if found.checkpoint is not None:
            try:
                state = checkpoints.read_checkpoint(
                    found.checkpoint, {"learner": self.learner.state()}, whole=self._whole
                )
                self.learner.load_state(state["learner"])
                self.progress = from_object(messages.Progress, state["progress"])
            except (KeyError, errors.DataLoss) as error:
                message = f"{found.checkpoint} is of another model or trainer"
                raise errors.DataLoss(message, seen=str(error)) from error
            self._begun = self.progress.policy_version
            self._completed(self.progress)
        replays = self.zero.open(self.progress, found, self._held_twice()) if self.zero else []
        steps = process.from_rank_zero([collected.record.step for collected in replays])
        for number, step in enumerate(steps):
            self._advance(step, replays[number] if self.zero else None)
        self._resumed = self.progress.policy_version > 0
        self._leave_device()

    def started(self) -> None:
        """Reports that the rank accepts commands."""
        if self.zero:
            self.zero.send(messages.Stepped(0, self.progress))

    def handle(self, command: messages.Command) -> None:
        """Runs a command. An error that all ranks raise, or a failure of rank 0 between
        collectives, is reported to the parent and ends the command.
        """
        try:
            match command:
                case messages.Train():
                    self._train(command)
                case Save():
                    self.begin_checkpoint(command.command_id)
                    self.settle()
                case messages.Keep():
                    self._keep_best(command)
        except errors.PacelineError as error:
            if self.zero:
                self.zero.failed(command.command_id, error)

    def settle_when_written(self) -> bool:
        """Reports the pending checkpoint if it is written; returns True while it is not."""
        if not self._writer.busy:
            self.settle()
        return self._unreported is not None

    def _train(self, command: messages.Train) -> None:
        """One RL step; a step that is already trained is only pushed again."""
        self._check_order(command)
        self.learner.memory.enter()
        try:
            publication = self._stepped(command)
        except errors.PacelineError:
            self._leave_device()
            raise
        self._leave_device()
        if publication is None:
            return
        version = publication.policy.manifest.total_bytes
        if self._on_cpu and available_bytes() < HELD_IN_PUSH * version:
            give_back_heap()
        if self.zero:
            self.zero.push(command, self.progress, publication)
        else:
            with suppress(errors.PacelineError):  # reported by rank 0
                self.publisher.push(publication, command.sender())
        if self.progress.policy_version - self._begun >= self.config.checkpoint_interval_steps:
            self.begin_checkpoint()

    def _leave_device(self) -> None:
        """Moves weights and moments off the device, before the parent reports the slots as free."""
        if self.config.offload:
            self.learner.memory.leave()
            dist.barrier()

    def _stepped(self, command: messages.Train) -> publish.Publication | None:
        """The version to push after the step; None if rank 0 has reported a failure. Raises
        InternalError after SKIPPED_IN_ROW consecutive steps that skipped an update.
        """
        if not self._adopt_served(command):
            return None
        if command.wanted.step == self.progress.step:
            if self.zero:
                self.zero.send(messages.Batched(command.command_id, self.progress.batch))
            return self._published()
        collected = self.zero.collect(command) if self.zero else None
        if not self._advance(command.wanted.step, collected, command.carrier):
            return None
        if self.progress.skipped_in_row >= SKIPPED_IN_ROW:
            message = "the loss or the gradient was not finite in several steps in a row"
            seen = f"{self.progress.skipped_in_row} steps up to step {self.progress.step}"
            allowed = f"at most {SKIPPED_IN_ROW - 1}"
            raise errors.InternalError(message, reason="NOT_FINITE", seen=seen, allowed=allowed)
        return self._published()

    def _check_order(self, command: messages.Train) -> None:
        """Raises WeightsError unless the step is the next step, or the last step again."""
        step, version = self.progress.step, self.progress.policy_version
        again = command.wanted.step == step
        if command.wanted.policy_version != version - again or command.wanted.step < step:
            message = "the trainer cannot take this step"
            seen = f"step {command.wanted.step} from p{command.wanted.policy_version}"
            allowed = f"a step after {step}, from p{version}"
            raise errors.WeightsError(message, reason="STEP_ORDER", seen=seen, allowed=allowed)

    def _adopt_served(self, command: messages.Train) -> bool:
        """Adopts the served weights once after a start, since a replay on other ranks may differ in
        a bit.

        Returns False if the served weights are unavailable; the failure is reported to the parent.
        """
        if not self._resumed:
            return True
        publication = self._published()
        served = self.zero.served(command, publication) if self.zero else None
        known, differs = process.from_rank_zero((served is not None, bool(served)))
        # Adapters cannot adopt served weights; the difference counts as one more gap between
        # behaviour and policy.
        if differs and not self.learner.weights.adapted:
            publish.adopt_served(self.learner.weights.published(), served, self.config)
        self._resumed = not known
        return known

    def _published(self) -> publish.Publication:
        """The version to push. Raises ResourceExhausted or WeightsError on all ranks."""
        weights, make_room = self.learner.weights, self.publisher.forget
        pushed, shapes = weights.pushed(), weights.pushed_shapes()
        version = self.progress.policy_version
        return publish.publication_of(
            version, pushed, shapes, self.config, make_room, weights.added
        )

    def _advance(
        self, step: int, collected: batcher.Collected | None, carrier: Mapping[str, str] = _NO_TRACE
    ) -> bool:
        """One optimiser step on rank 0's batch; False if rank 0 has no batch."""
        batch = process.tensors_from_rank_zero(TrainBatch, collected.tensors if collected else None)
        if batch is None:
            return False
        self.report.begins(f"computes the start values of step {step}")
        about, parent = {names.RL_STEP: step}, extract(carrier)
        links = collected.links if collected else ()
        waited = {"seconds/batch_wait": collected.waited_s} if collected else {}
        facts = collected.facts if collected else messages.BatchFacts()  # rank 0 alone reports them
        recorded = span(names.OPTIMIZER_STEP, about, parent=parent, links=links)
        updates = self.learner.updates
        with recorded if collected else nullcontext():
            figures = self.learner.step(batch, self.progress.policy_version)
        audit, beyond = judged(
            self.progress.audit, figures.cells, self.config.audit, self.config.compute_dtype
        )
        measured = {**figures.figures, **waited, **audit_figures(figures.cells)}
        figures = dataclasses.replace(figures, figures=measured, cells={})
        self.progress = dataclasses.replace(
            self.progress,
            policy_version=self.progress.policy_version + 1,
            step=step,
            trajectories_trained=self.progress.trajectories_trained + facts.trajectories,
            batch=facts,
            figures=figures,
            skipped_in_row=self.progress.skipped_in_row + 1 if figures.skipped_updates else 0,
            audit=audit,
            beyond=beyond,
        )
        if self.zero:
            metrics.UPDATES.record(self.learner.updates - updates)
            self.zero.log_step(self.progress)
        return True

    # --- checkpoints ------------------------------------------------------------------------------

    def begin_checkpoint(self, command_id: int = 0) -> None:
        """Starts a checkpoint that is written while the ranks continue; command 0 is
        the interval.
        """
        started = time.perf_counter()
        with span(names.POLICY_CHECKPOINT, {names.POLICY_VERSION: self.progress.policy_version}):
            self.settle()
            self._copied = self.learner.state(self._copied)
            state = {"learner": self._copied, "progress": to_object(self.progress)}
            self._writer.write(state, self.progress.policy_version, self.writing)
        metrics.PART_TIME.record(time.perf_counter() - started, part="checkpoint")
        self._begun = self.progress.policy_version
        self._unreported = (command_id, self.progress)

    def _keep_best(self, command: messages.Keep) -> None:
        """Writes a checkpoint of the weights and keeps it if no evaluation was as good
        or better.
        """
        directory, version = self.config.checkpoints_dir, self.progress.policy_version
        best = records.read_best(directory)
        if process.from_rank_zero(best is None or command.evaluation > best.evaluation):
            if self._begun != version:
                self.begin_checkpoint()
            self.settle()
            if self.progress.checkpoint_version != version:
                raise errors.Unavailable("the best checkpoint was not written", seen=version)
            best = records.Best(version, command.evaluation)
            if dist.get_rank() == 0:
                records.write_best(directory, best)
        assert best is not None
        self._writer.kept = best.policy_version
        if self.zero:
            path = self._writer.path(best.policy_version)
            self.zero.send(Saved(command.command_id, str(path), best.policy_version))

    def settle(self) -> None:
        """Waits for the pending checkpoint, then acknowledges its groups."""
        if self._unreported is None:
            return
        command_id, saved = self._unreported
        self._unreported = None
        try:
            self._writer.wait(self.report.goes_on)
        except errors.Unavailable as error:
            if self.zero:
                self.zero.failed(command_id, error)
            return
        self._completed(saved)
        if self._on_cpu:  # the next step needs their memory
            self._copied = None
            give_back_heap()
        if self.zero:
            metrics.CHECKPOINT_TIME.record(self._writer.written_s)
            path = self._writer.path(saved.policy_version)
            self.zero.saved(command_id, path, saved.policy_version, self._held_twice())

    def _completed(self, saved: messages.Progress) -> None:
        self.progress = dataclasses.replace(self.progress, checkpoint_version=saved.policy_version)

    def _held_twice(self) -> int:
        """The last step held by two checkpoints, so that it can be trained again if the newest is
        damaged. -1: none.
        """
        numbers = checkpoints.checkpoint_numbers(self.config.checkpoints_dir, _PREFIX)[-2:]
        if len(numbers) < 2:
            return -1
        try:
            step: int = checkpoints.read_state(self._writer.path(numbers[0]))["progress"]["step"]
        except errors.DataLoss:  # a damaged checkpoint holds no step; the next start reports it
            return -1
        return step

    def export(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Writes the weights as a Hugging Face directory, which any engine serves."""
        trained = checkpoints.read_each_whole(checkpoint, "learner/model", state)
        weights = self.learner.weights
        exported = weights.exported(trained, checkpoint)
        shards.write_causal_lm(exported, weights.shapes(), Path(self.config.model), checkpoint)
