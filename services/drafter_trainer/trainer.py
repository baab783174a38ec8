"""Trains on rank 0 while the lease lives: learns, judges, hands over what is better."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from drafter_trainer import messages as m
from drafter_trainer.config import DrafterTrainerConfig
from drafter_trainer.gate.candidates import Candidates
from drafter_trainer.gate.gate import PublishGate
from drafter_trainer.learn import sharing
from drafter_trainer.learn.heads import PolicyHeads
from drafter_trainer.learn.learner import MicroResult
from drafter_trainer.learn.students import Students
from drafter_trainer.link import ENTRIES_PER_READ, TrainerLink
from drafter_trainer.metrics import (
    gate_span,
    micro_step_span,
    record_decision,
    record_micro_step,
)
from drafter_trainer.rows.batcher import pack
from drafter_trainer.rows.buffer import FeatureBuffer
from drafter_trainer.rows.sample import FeatureSample
from paceline.ranks.messages import Doing
from paceline.speculators.packed import PackedRow
from paceline.telemetry import link_current

FIRST_MICRO_BATCH_TOKENS = 128
DATA_POLL_S = 0.05
INGEST_EVERY_S = 0.25


@dataclass(slots=True)
class Activation:
    """Counters of one lease."""

    epoch: int
    max_steps: int
    slots: Sequence[int]  # that it trains on
    data_until: float  # time.monotonic() until which an activation without rows waits
    ingest_due: float  # time.monotonic() of the next look at the features stream
    steps: int = 0
    micro_batches: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    busy_s: float = 0.0
    last_s: float = 0.0  # of the last piece of work
    # traceparents of the feature batches it learned from
    batches: set[str] = field(default_factory=set)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts what is done inside as busy."""
        started = time.perf_counter()
        yield
        self.last_s = time.perf_counter() - started
        self.busy_s += self.last_s

    def learned(self, rows: Sequence[PackedRow], result: MicroResult) -> None:
        """Counts one micro-batch, a row of each rank."""
        self.micro_batches += len(rows)
        self.steps += result.stepped
        self.tokens += sum(int(row.valid.sum()) for row in rows)
        self.loss_sum += result.loss * len(rows)


class DrafterTrainer:
    """Trains under leases. `link` brings commands and samples in and news out."""

    def __init__(
        self,
        config: DrafterTrainerConfig,
        students: Students,
        heads: PolicyHeads,
        link: TrainerLink,
        candidates: Candidates,
    ) -> None:
        self._config, self.students, self._heads, self._link = config, students, heads, link
        self._learner = students.primary.learner
        self.buffer = FeatureBuffer(config.buffer, config.run.seed)
        self.gate = PublishGate(config, students, heads, self.buffer, candidates)
        self.after_step: Callable[[], None] = lambda: None  # a checkpoint may be due
        # between two micro-batches: the slots from now on, if some have joined the lease
        self.take_in: Callable[[int], Sequence[int] | None] = lambda epoch: None

    def run_activation(self, command: m.Activate) -> m.Stopped:
        """Trains until preempted, out of data or done; between two micro-batches nothing is lost by
        stopping.
        """
        started = time.monotonic()
        untold = self.gate.begin(command)
        while self.ingest() == ENTRIES_PER_READ and not self._link.preempted(command.epoch):
            pass
        activation = Activation(
            command.epoch,
            command.max_steps,
            command.slots,
            started + self._config.data_wait_s,
            started + INGEST_EVERY_S,
        )
        self._link.send(m.Attached(command.epoch, self._learner.members.size))
        self._tell(untold)
        while (reason := self._stop_reason(activation)) is None:
            activation.slots = self.take_in(activation.epoch) or activation.slots
            if self.gate.judging:
                self._advance_gate(activation)
            elif self.gate.due():
                self.gate.start()
            elif drawn := self._draw():
                self._train(activation, drawn)
            else:
                self.ingest(wait_s=DATA_POLL_S)

        sharing.announce("stop", self._learner.members)
        link_current(activation.batches)
        self._link.send(self.standing())
        return self._stopped(activation, reason)

    def _stop_reason(self, activation: Activation) -> str | None:
        """Looks at the commands that arrived meanwhile; None to go on."""
        if self._link.preempted(activation.epoch):
            return "preempted"
        if activation.max_steps and activation.steps >= activation.max_steps:
            return "max_steps"
        if self.gate.frozen and not self.gate.judging and not self.gate.due():
            return "frozen"
        if not self.buffer.tokens_of(self._heads.hashes):
            return None if time.monotonic() < activation.data_until else "no_data"
        return (
            "epochs" if activation.tokens >= self._config.max_epochs * self.buffer.tokens else None
        )

    def ingest(self, wait_s: float = 0.0) -> int:
        """Moves up to one read of the features stream into the buffer; returns how many samples
        came.

        Rows of a head no longer kept are dropped.
        """
        samples = self._link.read_samples(wait_s)
        for sample in samples:
            self.buffer.add(sample)
        known = set(self._heads.hashes)
        newest = self._heads.newest.policy_version
        # Rows of a version whose head is still on its way wait; older ones without a head can never
        # be used.
        self.buffer.forget(
            lambda s: s.lm_head_hash in known or s.policy_version > newest, "stale_head"
        )
        return len(samples)

    def _train(self, activation: Activation, drawn: list[list[FeatureSample]]) -> None:
        """One micro-batch of the drafter whose turn it is."""
        with activation.timed():
            rows = [pack(samples, window=self._config.buffer.window) for samples in drawn]
            head = self._heads.get(rows[0].lm_head_hash)
            assert head is not None
            student = self.students.take_turn(rows[0].layers)
            slots = activation.slots[: len(rows)]
            version, kind = head.policy_version, student.kind
            with micro_step_span(activation.epoch, slots, version, kind) as record:
                row = sharing.hand_out(rows, student.learner.members, student.index)
                result = student.learner.micro_step(row, head)
                record(result)

        student.learn_speed(activation.last_s / max(len(rows[0]), 1))
        activation.batches |= {one.traceparent for samples in drawn for one in samples} - {""}
        record_micro_step(student.kind, result, samples=sum(map(len, drawn)))
        if student is self.students.primary:  # limits, passes and the loss reported are its own
            activation.learned(rows, result)
        if result.stepped:
            self.after_step()
        if time.monotonic() >= activation.ingest_due:
            self.ingest()
            self._link.send(Doing(f"trains micro-batch {activation.micro_batches}"))
            activation.ingest_due = time.monotonic() + INGEST_EVERY_S

    def _draw(self) -> list[list[FeatureSample]]:
        """One list of samples per rank, all of one head; empty when no usable sample is held."""
        world = self._learner.members.size
        samples = self.buffer.draw(
            self._micro_batch_tokens() * world,
            known=set(self._heads.hashes),
            at_least=world,
        )
        return [samples[rank::world] for rank in range(world)] if samples else []

    def _micro_batch_tokens(self) -> int:
        """As many as the slowest drafter learns from in the time of a micro-batch."""
        slowest = max(student.seconds_per_token for student in self.students)
        if not slowest:
            return min(FIRST_MICRO_BATCH_TOKENS, self._config.max_micro_batch_tokens)
        fitting = int(self._config.micro_batch_ms / 1_000 / slowest)
        return max(32, min(fitting, self._config.max_micro_batch_tokens))

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
            total_steps=self._learner.total_steps,
            dropped=dict(self.buffer.dropped + self._link.dropped),
        )

    def standing(self) -> m.Standing:
        """Where the trainer stands."""
        return m.Standing(
            drafter_version=self.gate.next_version - 1,
            total_steps=self._learner.total_steps,
            total_tokens=self._learner.total_tokens,
            buffer_samples=len(self.buffer),
            buffer_bytes=self.buffer.nbytes,
            lm_head_hashes=list(self._heads.hashes),
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
