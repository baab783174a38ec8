"""Receives the parent's commands for one rank, and sends the rank's news."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.errors import DeadlineExceeded
from paceline.ranks import group, messages
from paceline.services.drafter_trainer import messages as m
from paceline.telemetry import extract, names, span

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
                raise DeadlineExceeded(
                    "a command other ranks have seen did not come", seen=f"{deadline_s} s"
                )
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
