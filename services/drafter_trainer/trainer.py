"""Trains on rank 0 while the lease lives: learns, judges, hands over what is better."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.ranks.messages import Doing
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.gate.candidates import Candidates
from paceline.services.drafter_trainer.gate.gate import PublishGate
from paceline.services.drafter_trainer.learn import sharing
from paceline.services.drafter_trainer.learn.learner import MicroResult
from paceline.services.drafter_trainer.learn.students import Students
from paceline.services.drafter_trainer.link import TrainerLink
from paceline.services.drafter_trainer.metrics import (
    gate_span,
    micro_step_span,
    record_decision,
    record_micro_step,
)
from paceline.services.drafter_trainer.rows.store import PackedBatch, RowStore
from paceline.speculators.packed import PackedRow
from paceline.telemetry import link_current

MIN_MICRO_BATCH_TOKENS = 32
DATA_WAIT_S = 0.05
"""Seconds that rows are waited for between two looks at the commands."""
TOLD_EVERY_S = 0.25
"""Seconds between two reports that an activation goes on."""


@dataclass(slots=True)
class Activation:
    """Counters of one lease."""

    epoch: int
    max_steps: int
    slots: Sequence[int]  # that it trains on
    began: float  # time.monotonic()
    data_until: float  # until which an activation without rows waits
    tell_at: float  # when its progress is reported next
    first_step_s: float = 0.0  # until the first micro-batch began
    steps: int = 0
    micro_batches: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    busy_s: float = 0.0
    last_s: float = 0.0  # of this thread's own time, in the last piece of work
    # traceparents of the feature batches it learned from
    batches: set[str] = field(default_factory=set)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts what is done inside as busy."""
        started, computed = time.perf_counter(), time.thread_time()
        yield
        self.last_s = time.thread_time() - computed
        self.busy_s += time.perf_counter() - started

    def learned(self, rows: Sequence[PackedRow], result: MicroResult) -> None:
        """Counts one micro-batch, a row of each rank."""
        self.micro_batches += len(rows)
        self.steps += result.stepped
        self.tokens += sum(int(row.valid.sum()) for row in rows)
        self.loss_sum += result.loss * len(rows)


class DrafterTrainer:
    """Trains under leases. `link` brings commands in and news out, `rows` what is learned from."""

    def __init__(
        self,
        config: DrafterTrainerConfig,
        students: Students,
        rows: RowStore,
        link: TrainerLink,
        candidates: Candidates,
    ) -> None:
        self._config, self.students, self.rows, self._link = config, students, rows, link
        self._learner = students.primary.learner
        rows.shape = lambda: (self._learner.members.size, self._micro_batch_tokens())
        self.gate = PublishGate(config, students, rows, candidates)
        self.after_step: Callable[[], None] = lambda: None  # a checkpoint may be due
        # between two micro-batches: the slots from now on, if some have joined the lease
        self.take_in: Callable[[int], Sequence[int] | None] = lambda epoch: None
        self.lost: Callable[[], Counter[str]] = Counter  # entries that became no rows, by reason

    def run_activation(self, command: m.Activate) -> m.Stopped:
        """Trains until preempted, out of data or done; between two micro-batches nothing is lost by
        stopping.
        """
        began = time.monotonic()
        activation = Activation(
            command.epoch,
            command.max_steps,
            command.slots,
            began,
            began + self._config.data_wait_s,
            began + TOLD_EVERY_S,
        )
        self.rows.begin()
        untold = self.gate.begin(command)
        self._link.send(m.Attached(command.epoch, self._learner.members.size))
        self._tell(untold)
        while (reason := self._stop_reason(activation)) is None:
            activation.slots = self.take_in(activation.epoch) or activation.slots
            self._report(activation)
            # What is ready is learned at once: a round of the gate may take longer than the lease.
            begins = not activation.first_step_s and not self.gate.frozen
            if begins and (batch := self.rows.next()):
                self._train(activation, batch)
            elif self.gate.judging:
                self._advance_gate(activation)
            elif self.gate.due():
                self.gate.start()
            elif batch := self.rows.next():
                self._train(activation, batch)
            else:
                self.rows.wait(DATA_WAIT_S)

        sharing.announce("stop", self._learner.members)
        link_current(activation.batches)
        self._link.send(self.standing())
        self.rows.end()
        return self._stopped(activation, reason)

    def _stop_reason(self, activation: Activation) -> str | None:
        """Looks at the commands that arrived meanwhile; None to go on."""
        if self._link.preempted(activation.epoch):
            return "preempted"
        if activation.max_steps and activation.steps >= activation.max_steps:
            return "max_steps"
        if self.gate.frozen and not self.gate.judging and not self.gate.due():
            return "frozen"
        if not self.rows.usable:
            return None if time.monotonic() < activation.data_until else "no_data"
        return "epochs" if activation.tokens >= self._config.max_epochs * self.rows.tokens else None

    def _train(self, activation: Activation, batch: PackedBatch) -> None:
        """One micro-batch of the drafter whose turn it is."""
        activation.first_step_s = activation.first_step_s or time.monotonic() - activation.began
        rows = batch.rows
        with activation.timed():
            student = self.students.take_turn(rows[0].layers)
            slots = activation.slots[: len(rows)]
            version, kind = batch.head.policy_version, student.kind
            traces = batch.traceparents
            with micro_step_span(activation.epoch, slots, version, kind, traces) as record:
                row = sharing.hand_out(rows, student.learner.members, student.index)
                result = student.learner.micro_step(row, batch.head)
                record(result)

        student.learn_speed(activation.last_s / max(len(rows[0]), 1))
        activation.batches |= batch.traceparents
        record_micro_step(student.kind, result, samples=batch.samples)
        if student is self.students.primary:  # limits, passes and the loss reported are its own
            activation.learned(rows, result)
        if result.stepped:
            self.after_step()

    def _report(self, activation: Activation) -> None:
        """Reports to the parent that the activation goes on, and keeps the other members waiting:
        no deadline of theirs limits a round of the gate.
        """
        if time.monotonic() < activation.tell_at:
            return
        doing = "judges" if self.gate.judging else f"trains micro-batch {activation.micro_batches}"
        self._link.send(Doing(doing))
        sharing.announce("wait", self._learner.members)
        activation.tell_at = time.monotonic() + TOLD_EVERY_S

    def _micro_batch_tokens(self) -> int:
        """As many as the slowest drafter learns from in the time of a micro-batch, in time of its
        own: beside others on the same core it takes longer and learns as much.
        """
        most = self._config.max_micro_batch_tokens
        slowest = max(student.seconds_per_token for student in self.students)
        if not slowest:
            return min(MIN_MICRO_BATCH_TOKENS, most)
        fitting = int(self._config.micro_batch_ms / 1_000 / slowest)
        return max(MIN_MICRO_BATCH_TOKENS, min(fitting, most))

    def _advance_gate(self, activation: Activation) -> None:
        with activation.timed(), gate_span(self.gate.next_version) as record:
            decisions = self.gate.advance(activation.epoch)
            record(decisions)
        self._tell(decisions)

    def _tell(self, decisions: Iterable[m.Judged]) -> None:
        for decision in decisions:
            record_decision(decision)
            self._link.send(decision)

    def _stopped(self, activation: Activation, reason: str) -> m.Stopped:
        return m.Stopped(
            epoch=activation.epoch,
            reason=reason,
            steps=activation.steps,
            micro_batches=activation.micro_batches,
            tokens=activation.tokens,
            loss=activation.loss_sum / max(activation.micro_batches, 1),
            busy_s=activation.busy_s,
            first_step_s=activation.first_step_s,
            total_steps=self._learner.total_steps,
            dropped=dict(self.rows.dropped + self.lost()),
        )

    def standing(self) -> m.Standing:
        """Where the trainer stands."""
        return m.Standing(
            drafter_version=self.gate.next_version - 1,
            total_steps=self._learner.total_steps,
            total_tokens=self._learner.total_tokens,
            buffer_samples=len(self.rows),
            buffer_bytes=self.rows.nbytes,
            lm_head_hashes=list(self.rows.heads.hashes),
            serving_version=self.gate.serving.version,
            frozen=self.gate.frozen,
            leaderboard=self.gate.leaderboard,
        )

    def state(self) -> dict[str, Any]:
        """What a later process needs; a collective of all ranks."""
        return {
            "learner": self._learner.state(),
            "shadows": self.students.state(),
            "gate": self.gate.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self._learner.load_state(state["learner"])
        self.students.load_state(state["shadows"])
        self.gate.load_state(state["gate"])
