"""The loop of the policy trainer, as every rank runs it: command, batch, step, gather, push,
checkpoint.

Owns the order of those and where the trainer stands. What only rank 0 does (Redis, pushes, news) is
in Desk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from paceline.errors import WeightsError
from paceline.telemetry import extract, span
from policy_trainer.config import PolicyTrainerConfig
from policy_trainer.desk import Collected, Desk
from policy_trainer.learn.checkpoint import (
    Checkpoints,
    Snapshot,
    policy_weights,
    restore_optimizer,
    take_snapshot,
)
from policy_trainer.learn.learner import Learner
from policy_trainer.learn.parallel import broadcast_batch, broadcast_numbers
from policy_trainer.messages import BatchFacts, Progress, Report, Save, Train

_SPAN = "policy.optimizer_step"
_NO_TRACE: Mapping[str, str] = {}


class PolicyTrainer:
    """One rank.

    All ranks take the same commands in the same order; `desk` is None on all but rank 0.
    """

    def __init__(
        self,
        config: PolicyTrainerConfig,
        learner: Learner,
        checkpoints: Checkpoints,
        desk: Desk | None,
    ) -> None:
        self.config = config
        self.learner = learner
        self.checkpoints = checkpoints
        self.desk = desk
        self.progress = Progress()

    def resume(self, directory: Path | None) -> None:
        """Takes up the optimiser of the checkpoint the model came from, and replays the steps it
        misses.
        """
        if directory is not None:
            restore_optimizer(self.learner, directory)
            progress = self.checkpoints.progress(directory)
            self.progress = dataclasses.replace(
                progress, checkpoint_version=progress.policy_version
            )
        replays = self.desk.open(self.progress.step) if self.desk else []
        steps = broadcast_numbers([c.record.step for c in replays], self.learner.mesh)
        for number, step in enumerate(steps):
            self._advance(step, replays[number] if self.desk else None)

    def handle(self, command: Train | Save | Report) -> None:
        """Runs a command; what fails on rank 0 between collectives is told to the parent and ends
        the command.
        """
        match command:
            case Train():
                self._train(command)
            case Save():
                self._write(take_snapshot(self.learner), command.command_id)
            case Report():
                if self.desk:
                    self.desk.started(command, self.progress)

    def _train(self, command: Train) -> None:
        """One RL step; a step that is trained already is only pushed again."""
        if not self._accepts(command):
            return
        if command.sender.step == self.progress.step:
            if self.desk:
                self.desk.batched(command, self.progress.batch)
        elif not self._advance(
            command.sender.step,
            self.desk.collect(command) if self.desk else None,
            command.sender.carrier,
        ):
            return
        unsaved = self.progress.policy_version - self.progress.checkpoint_version
        due = unsaved >= self.config.checkpoint_interval_steps
        snapshot = (
            take_snapshot(self.learner) if due else Snapshot(policy_weights(self.learner), {}, 0)
        )
        if self.desk:
            self.desk.push(command, self.progress, snapshot.weights)
        if due:
            self._write(snapshot)

    def _accepts(self, command: Train) -> bool:
        """Whether the step is the next one or the last one again; if not, the parent is told."""
        again = command.sender.step == self.progress.step
        if (
            command.policy_version == self.progress.policy_version - again
            and command.sender.step >= self.progress.step
        ):
            return True
        if self.desk:
            error = WeightsError(
                "the trainer cannot take this step",
                reason="STEP_ORDER",
                seen=f"step {command.sender.step} from p{command.policy_version}",
                allowed=f"a step after {self.progress.step}, from p{self.progress.policy_version}",
            )
            self.desk.failed(command.command_id, error)
        return False

    def _advance(
        self, step: int, collected: Collected | None, carrier: Mapping[str, str] = _NO_TRACE
    ) -> bool:
        """One optimiser step on rank 0's batch; False when rank 0 has none."""
        batch = broadcast_batch(collected.tensors if collected else None, self.learner.mesh)
        if batch is None:
            return False
        with (
            span(_SPAN, parent=extract(carrier), links=collected.links, step=step)
            if collected
            else nullcontext()
        ):
            figures = self.learner.step(batch)
        self.progress = dataclasses.replace(
            self.progress,
            policy_version=self.progress.policy_version + 1,
            step=step,
            trajectories_trained=self.progress.trajectories_trained
            + (collected.facts.trajectories if collected else 0),
            batch=collected.facts if collected else BatchFacts(),  # only rank 0 is asked for them
            figures=figures,
        )
        if self.desk:
            self.desk.log_step(self.progress)
        return True

    def _write(self, snapshot: Snapshot, command_id: int = 0) -> None:
        """Checkpoints, and acknowledges the groups it holds."""
        self.progress = dataclasses.replace(
            self.progress, checkpoint_version=self.progress.policy_version
        )
        if self.desk:
            self.desk.saved(
                command_id, self.checkpoints.write(snapshot, self.progress), self.progress
            )
