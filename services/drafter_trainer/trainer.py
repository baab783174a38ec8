"""The loop of rank 0: learn while the lease lives, judge, hand over what is better. Owns the order of things."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from drafter_trainer import messages as m
from drafter_trainer import sharing
from drafter_trainer.batcher import pack
from drafter_trainer.buffer import FeatureBuffer, FeatureSample
from drafter_trainer.candidates import Candidates
from drafter_trainer.config import DrafterTrainerConfig
from drafter_trainer.evaluate import GateJob
from drafter_trainer.gate import Judgement
from drafter_trainer.heads import PolicyHead, PolicyHeads
from drafter_trainer.learner import DrafterLearner
from drafter_trainer.link import ENTRIES_PER_READ, TrainerLink
from paceline.speculators import DraftNet
from paceline.telemetry import get_logger, span

FIRST_MICRO_BATCH_TOKENS = 128
DATA_POLL_S = 0.05
INGEST_EVERY_S = 0.25

log = get_logger("drafter_trainer")


@dataclass(frozen=True, slots=True)
class DrafterState:
    """A drafter version whole and unsharded."""

    version: int
    net: DraftNet


@dataclass(slots=True)
class Activation:
    """Counters of one lease."""

    epoch: int
    max_steps: int
    data_until: float  # time.monotonic() until which an activation without rows waits
    ingest_due: float  # time.monotonic() of the next look at the features stream
    steps: int = 0
    micro_batches: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    busy_s: float = 0.0


class DrafterTrainer:
    """Trains under leases. `link` brings commands and samples in and news out."""

    def __init__(
        self,
        config: DrafterTrainerConfig,
        learner: DrafterLearner,
        heads: PolicyHeads,
        link: TrainerLink,
        candidates: Candidates,
    ) -> None:
        self._config, self._learner, self._heads, self._link = config, learner, heads, link
        self._candidates = candidates
        settings = config.buffer
        self.buffer = FeatureBuffer(
            max_samples=settings.samples,
            byte_budget=settings.byte_budget,
            heldout_every=settings.heldout_every,
            heldout_samples=settings.heldout_samples,
            seed=config.run.seed,
        )
        self.serving = DrafterState(0, learner.snapshot())
        self._handed_over = False  # this activation has promoted a candidate
        self._job: GateJob | None = None
        self._candidate: DrafterState | None = None  # under judgement
        self.next_version = max([0, *candidates.versions]) + 1
        self._last_judged_step = learner.total_steps
        self._seconds_per_token = 0.0
        self.after_step: Callable[[], None] = lambda: None  # a checkpoint may be due

    def run_activation(self, command: m.Activate) -> m.Stopped:
        """Trains until preempted, out of data or done; between two micro-batches nothing is lost by stopping."""
        started = time.monotonic()
        self.on_serving(command.drafter_version)
        self._handed_over = False
        while self.ingest() == ENTRIES_PER_READ and not self._link.preempted(command.epoch):
            pass
        activation = Activation(
            command.epoch, command.max_steps, started + self._config.data_wait_s, started + INGEST_EVERY_S
        )
        self._link.send(m.Attached(command.epoch, self._learner.members.size))
        while (reason := self._stop_reason(activation)) is None:
            if self._job is not None:
                self._advance_gate(activation)
            elif self._gate_due():
                self._start_gate()
            elif drawn := self._draw():
                self._train(activation, drawn)
            else:
                self.ingest(wait_s=DATA_POLL_S)
        sharing.announce_stop(self._learner.members)
        self._link.send(self.standing())
        return self._stopped(activation, reason)

    def _stop_reason(self, activation: Activation) -> str | None:
        """Looks at the commands that arrived meanwhile; None to go on."""
        if self._link.preempted(activation.epoch):
            return "preempted"
        if activation.max_steps and activation.steps >= activation.max_steps:
            return "max_steps"
        if not self.buffer.tokens_of(self._heads.hashes):
            return None if time.monotonic() < activation.data_until else "no_data"
        return "epochs" if activation.tokens >= self._config.max_epochs * self.buffer.tokens else None

    def ingest(self, wait_s: float = 0.0) -> int:
        """Moves up to one read of the features stream into the buffer; returns how many samples came.

        Rows of a head no longer kept are dropped.
        """
        samples = self._link.read_samples(wait_s)
        for sample in samples:
            self.buffer.add(sample)
        known = set(self._heads.hashes)
        newest = self._heads.newest.policy_version
        # Rows of a version whose head is still on its way wait; older ones without a head can never be used.
        self.buffer.forget(lambda s: s.lm_head_hash in known or s.policy_version > newest, "stale_head")
        return len(samples)

    def _train(self, activation: Activation, drawn: list[list[FeatureSample]]) -> None:
        started = time.perf_counter()
        rows = [pack(samples, window=self._config.buffer.window) for samples in drawn]
        head = self._heads.get(rows[0].lm_head_hash)
        assert head is not None
        with span("drafter.micro_step", policy_version=head.policy_version) as current:
            result = self._learner.micro_step(sharing.hand_out(rows, self._learner.members), head)
            current.set_attribute("positions", result.positions)
            current.set_attribute("loss", result.loss)
            current.set_attribute("stepped", result.stepped)
        seconds = time.perf_counter() - started
        self._learn_speed(seconds / max(len(rows[0]), 1))
        activation.micro_batches += len(rows)
        activation.steps += result.stepped
        activation.tokens += sum(int(row.valid.sum()) for row in rows)
        activation.loss_sum += result.loss * len(rows)
        activation.busy_s += seconds
        if result.stepped:
            self.after_step()
        if time.monotonic() >= activation.ingest_due:
            self.ingest()
            activation.ingest_due = time.monotonic() + INGEST_EVERY_S

    def _draw(self) -> list[list[FeatureSample]]:
        """One list of samples per rank, all of one head; empty when no usable sample is held."""
        world = self._learner.members.size
        samples = self.buffer.draw(
            self._micro_batch_tokens() * world,
            recency=self._config.buffer.recency,
            known=set(self._heads.hashes),
            at_least=world,
        )
        return [samples[rank::world] for rank in range(world)] if samples else []

    def _micro_batch_tokens(self) -> int:
        if not self._seconds_per_token:
            return min(FIRST_MICRO_BATCH_TOKENS, self._config.max_micro_batch_tokens)
        fitting = int(self._config.micro_batch_ms / 1_000 / self._seconds_per_token)
        return max(32, min(fitting, self._config.max_micro_batch_tokens))

    def _learn_speed(self, seconds_per_token: float) -> None:
        old = self._seconds_per_token
        self._seconds_per_token = 0.8 * old + 0.2 * seconds_per_token if old else seconds_per_token

    def _gate_due(self) -> bool:
        if self._handed_over:
            return False
        return self._learner.total_steps - self._last_judged_step >= self._config.gate.interval_steps

    def _start_gate(self) -> None:
        self._last_judged_step = self._learner.total_steps
        samples = self.buffer.heldout(self._heads.hashes)[-self._config.gate.samples :]
        if sum(int(sample.generated[2:].sum()) for sample in samples) < self._config.gate.min_positions:
            return
        head = self._heads.get(samples[-1].lm_head_hash)
        assert head is not None
        sharing.announce_snapshot(self._learner.members)
        self._candidate = DrafterState(self.next_version, self._learner.snapshot())
        self._job = GateJob(
            self._candidate.net,
            self.serving.net,
            samples,
            head,
            steps=self._config.gate.draft_steps,
            window=self._config.buffer.window,
        )

    def _advance_gate(self, activation: Activation) -> None:
        started = time.perf_counter()
        job, candidate = self._job, self._candidate
        assert job is not None
        assert candidate is not None
        with span("drafter.gate", drafter_version=candidate.version):
            job.advance()
            if job.done:
                self._decide(activation.epoch, job, candidate)
        activation.busy_s += time.perf_counter() - started

    def _decide(self, epoch: int, job: GateJob, candidate: DrafterState) -> None:
        self._job = self._candidate = None
        judgement = job.judgement(resamples=self._config.gate.bootstrap)
        path = ""
        if judgement.promoted:
            path = str(self._candidates.save(candidate.version, candidate.net))
            self._handed_over = True
            self.next_version = candidate.version + 1
        log.info("judged", drafter_version=candidate.version, promoted=judgement.promoted, **asdict(judgement))
        self._link.send(self._judged(epoch, job.head, candidate.version, judgement, path))

    def _judged(self, epoch: int, head: PolicyHead, version: int, judgement: Judgement, path: str) -> m.Judged:
        return m.Judged(
            epoch=epoch,
            drafter_version=version,
            promoted=judgement.promoted,
            candidate=judgement.candidate,
            serving=judgement.serving,
            noise=judgement.noise,
            policy_version=head.policy_version,
            positions=judgement.positions,
            optimizer_steps=self._learner.total_steps,
            lm_head_hash=head.hash,
            path=path,
        )

    def on_serving(self, version: int) -> None:
        """The engines serve this drafter now: a promotion was committed, or an older one came back."""
        self._candidates.serves(version)
        if version == self.serving.version:
            return
        net = self._candidates.load(version)
        if net is None:
            log.warning("the serving drafter is not kept here", seen=version, kept=self._candidates.versions)
            return
        self.serving = DrafterState(version, net)
        self.next_version = max(self.next_version, version + 1)
        self._job = self._candidate = None  # it was compared with another

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
            drafter_version=self.next_version - 1,
            total_steps=self._learner.total_steps,
            total_tokens=self._learner.total_tokens,
            buffer_samples=len(self.buffer),
            buffer_bytes=self.buffer.nbytes,
            lm_head_hashes=list(self._heads.hashes),
        )

    def state(self) -> dict[str, Any]:
        """What a later process needs; a collective of all ranks."""
        return {"learner": self._learner.state(), "serving_version": self.serving.version}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self._learner.load_state(state["learner"])
        self.on_serving(state["serving_version"])
        self._last_judged_step = self._learner.total_steps
