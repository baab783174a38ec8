"""The training loop of rank 0 under a lease, and the link of a rank to its parent: learns, judges
candidates, and reports promotions.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import DeadlineExceeded
from paceline.ranks import group, messages
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer import metrics
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.gate import gate, round
from paceline.services.drafter_trainer.learn.learner import DrafterLearner, MicroResult
from paceline.services.drafter_trainer.learn.membership import announce, hand_out
from paceline.services.drafter_trainer.rows.store import PackedBatch, RowStore
from paceline.speculators.packed import PackedRow
from paceline.telemetry import extract, link_current, names, span

Turn = m.Activate | m.Join | messages.Save
"""Commands that all ranks carry out in the order of sending."""


class TrainerLink:
    """A blocking link, for the training thread of a rank.

    New heads and serving versions go to `on_command` at once. A preemption is recorded until the
    loop checks it. Activations, joins and checkpoints wait for their turn, because all ranks take
    part.
    """

    def __init__(self, link: group.RankLink) -> None:
        self._link = link
        self._preempted_epoch = 0
        self._turns: deque[Turn] = deque()
        self.on_command: Callable[[m.Message], None] = lambda message: None
        self.stopping = False

    def send(self, message: m.Message) -> None:
        """Sends a message to the parent."""
        self._link.send(m.MESSAGES.encode(message))

    def wait_turn(self, timeout_s: float) -> Turn | None:
        """The next command with a turn of its own, or None after the time-out; all other commands
        are handled meanwhile.
        """
        if not self._turns:
            self._obey(self._link.receive(timeout_s))
        return self._turns.popleft() if self._turns else None

    def next_turn(self, deadline_s: float) -> Turn:
        """The next command with a turn of its own. Raises DeadlineExceeded if none
        arrives in time.
        """
        self.wait_until(lambda: bool(self._turns), deadline_s)
        return self._turns.popleft()

    def joins(self, epoch: int) -> bool:
        """Whether the next turn adds slots to the lease of that epoch."""
        first = self._turns[0] if self._turns else None
        return isinstance(first, m.Join) and first.epoch == epoch

    def wait_until(self, known: Callable[[], bool], deadline_s: float) -> None:
        """Handles commands until `known()` is true. Raises DeadlineExceeded if it stays false for
        `deadline_s` seconds.
        """
        end = time.monotonic() + deadline_s
        while not known():
            if time.monotonic() >= end:
                message = "a command other ranks have seen did not come"
                raise DeadlineExceeded(message, seen=f"{deadline_s} s")
            self._obey(self._link.receive(end - time.monotonic()))

    def preempted(self, epoch: int) -> bool:
        """Whether the lease of that epoch is over; handles the commands that have arrived."""
        while (data := self._link.poll()) is not None:
            self._obey(data)
        return self.stopping or self._preempted_epoch >= epoch

    def _obey(self, data: bytes | None) -> None:
        if data is None:
            return
        message = m.MESSAGES.decode(data)
        if isinstance(message, m.Preempt):
            self._preempted_epoch = max(self._preempted_epoch, message.epoch)
        elif isinstance(message, m.Activate | m.Join | messages.Save):
            self._turns.append(message)
        else:
            self.on_command(message)

    def close(self) -> None:
        """Sends queued messages and disconnects."""
        self._link.close()


@contextmanager
def activation_span(command: m.Activate) -> Iterator[None]:
    """The span of an activation, in the trace of its RL step."""
    parent = extract({"traceparent": command.traceparent}) if command.traceparent else None
    about = {names.RL_STEP: command.step, names.EPOCH: command.epoch}
    with span(names.DRAFTER_ACTIVATE, about, parent=parent):
        yield


MIN_MICRO_BATCH_TOKENS = 32
DATA_WAIT_S = 0.05
"""Seconds of a wait for rows between two checks for commands."""


@dataclass(slots=True)
class Activation:
    """Counters of one lease."""

    epoch: int
    slots: Sequence[int]  # slots that the drafter trains on
    began: float = field(default_factory=time.monotonic)
    first_step_s: float = 0.0  # until the first micro-batch began
    steps: int = 0
    micro_batches: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    busy_s: float = 0.0
    last_s: float = 0.0  # thread time of the last piece of work
    # traceparents of the feature batches used
    batches: set[str] = field(default_factory=set)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time of the block as busy."""
        started, computed = time.perf_counter(), time.thread_time()
        yield
        self.last_s = time.thread_time() - computed
        self.busy_s += time.perf_counter() - started

    def learned(self, rows: Sequence[PackedRow], result: MicroResult) -> None:
        """Counts one micro-batch with a row for each rank."""
        self.micro_batches += len(rows)
        self.steps += result.stepped
        self.tokens += sum(int(row.valid.sum()) for row in rows)
        self.loss_sum += result.loss * len(rows)


class DrafterTrainer:
    """Trains under leases. `link` carries commands and news; `rows` has the training rows."""

    def __init__(
        self,
        config: DrafterTrainerConfig,
        learner: DrafterLearner,
        rows: RowStore,
        link: TrainerLink,
        candidates: round.Candidates,
    ) -> None:
        self._config, self.learner, self.rows, self.link = config, learner, rows, link
        self._progress = messages.ProgressReport(self._report)
        self.seconds_per_token = 0.0  # of a micro-batch, smoothed; 0 before the first
        rows.shape = lambda: (self.learner.members.size, self._micro_batch_tokens())
        self.gate = gate.PublishGate(config, learner, rows, candidates)

    @property
    def lost(self) -> Counter[str]:
        """Entries of the stream without rows, by reason."""
        return Counter()

    def after_step(self) -> None:
        """Called after each optimiser step."""

    def add_slots(self, epoch: int) -> Sequence[int] | None:
        """Called between two micro-batches; returns the new slots if slots were added to the lease
        of that epoch.
        """
        return None

    def run_activation(self, command: m.Activate) -> m.Stopped:
        """Trains until preempted, out of rows or done. A stop between two micro-batches loses no
        work.
        """
        activation = Activation(command.epoch, command.slots)
        self.rows.begin()
        untold = self.gate.begin(command)
        self.link.send(m.Attached(self.learner.members.size))
        self._send(untold)
        while (reason := self._stop_reason(activation, command.max_steps)) is None:
            activation.slots = self.add_slots(activation.epoch) or activation.slots
            doing = "judges" if self.gate.judging else "trains"
            self._progress.goes_on(f"{doing}, {activation.micro_batches} micro-batches done")
            # Ready rows are trained on first, since a round of the gate may outlast the lease.
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

        announce("stop", self.learner.members)
        link_current(activation.batches)
        self.link.send(self.standing())
        self.rows.end()
        return self._stopped(activation, reason)

    def _stop_reason(self, activation: Activation, max_steps: int) -> str | None:
        """Handles arrived commands; returns the reason to stop, or None."""
        if self.link.preempted(activation.epoch):
            return "preempted"
        if max_steps and activation.steps >= max_steps:
            return "max_steps"
        if self.gate.frozen and not self.gate.judging and not self.gate.due():
            return "frozen"
        with self.rows.locked() as buffer:
            usable, tokens = buffer.tokens_of(self.rows.heads), buffer.tokens
        if not usable:
            waits = time.monotonic() < activation.began + self._config.data_wait_s
            return None if waits else "no_data"
        return "epochs" if activation.tokens >= self._config.max_epochs * tokens else None

    def _train(self, activation: Activation, batch: PackedBatch) -> None:
        """Trains one micro-batch."""
        activation.first_step_s = activation.first_step_s or time.monotonic() - activation.began
        rows = batch.rows
        with activation.timed():
            slots = activation.slots[: len(rows)]
            version, kind = batch.head.policy_version, self.learner.kind
            traces = batch.traceparents
            about: dict[str, Any] = {names.EPOCH: activation.epoch, names.SLOTS: list(slots)}
            about |= {names.POLICY_VERSION: version, names.DRAFTER: kind}
            with span(names.DRAFTER_MICRO_STEP, about, links=sorted(traces)) as current:
                row = hand_out(rows, self.learner.members)
                result = self.learner.micro_step(row, batch.head)
                current.set_attribute(names.POSITIONS, result.positions)
                current.set_attribute(names.LOSS, result.loss)
                current.set_attribute(names.STEPPED, result.stepped)

        speed, known = activation.last_s / max(len(rows[0]), 1), self.seconds_per_token
        self.seconds_per_token = 0.8 * known + 0.2 * speed if known else speed
        activation.batches |= batch.traceparents
        result.record(kind, samples=batch.samples)
        activation.learned(rows, result)
        if result.stepped:
            self.after_step()

    def _report(self, doing: messages.Doing) -> None:
        """Sends the activation's progress to the parent, and makes the other members wait on. A
        round of the gate therefore cannot exceed their deadline.
        """
        self.link.send(doing)
        announce("wait", self.learner.members)

    def _micro_batch_tokens(self) -> int:
        """Number of tokens that can be trained in micro_batch_ms of thread time.
        Thread time ignores other work on the same core.
        """
        most = self._config.max_micro_batch_tokens
        if not self.seconds_per_token:
            return min(MIN_MICRO_BATCH_TOKENS, most)
        fitting = int(self._config.micro_batch_ms / 1_000 / self.seconds_per_token)
        return max(MIN_MICRO_BATCH_TOKENS, min(fitting, most))

    def _advance_gate(self, activation: Activation) -> None:
        about = {names.DRAFTER_VERSION: self.gate.next_version}
        with activation.timed(), span(names.DRAFTER_GATE, about) as current:
            decisions = self.gate.advance()
            for decision in decisions:
                current.set_attribute(names.DECISION, decision.decision)
                current.set_attribute(names.DRAFTER, decision.kind)
        self._send(decisions)

    def _send(self, decisions: Iterable[m.Judged]) -> None:
        for decision in decisions:
            metrics.record_decision(decision)
            self.link.send(decision)

    def _stopped(self, activation: Activation, reason: str) -> m.Stopped:
        shared = ("epoch", "steps", "micro_batches", "tokens", "busy_s", "first_step_s")
        with self.rows.locked() as buffer:
            dropped = buffer.dropped + self.lost
        return m.Stopped(
            reason=reason,
            loss=activation.loss_sum / max(activation.micro_batches, 1),
            total_steps=self.learner.total_steps,
            dropped=dict(dropped),
            **{name: getattr(activation, name) for name in shared},
        )

    def standing(self) -> m.Standing:
        """The trainer's progress."""
        with self.rows.locked() as buffer:
            return m.Standing(self.learner.total_steps, len(buffer))

    def state(self) -> dict[str, Any]:
        """The state for a later process. Collective over all ranks."""
        return {"learner": self.learner.state(), "gate": self.gate.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores `state`."""
        self.learner.load_state(state["learner"])
        self.gate.load_state(state["gate"])
