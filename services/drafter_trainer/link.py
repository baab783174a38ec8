"""Receives the parent's commands for one rank, and sends its news."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.errors import DeadlineExceeded
from paceline.ranks.group import RankLink
from paceline.ranks.messages import Save
from paceline.services.drafter_trainer import messages as m
from paceline.telemetry import extract, names, span

Turn = m.Activate | m.Join | Save
"""Commands that all ranks carry out in the order in which they were sent."""


class TrainerLink:
    """Blocking, for the one thread of a rank that trains.

    Commands that may be obeyed at any time (new heads, serving versions) go to `on_command` as soon
    as they are seen; a preemption is kept for the loop to find; activations, joins and checkpoints
    wait for their turn, because all ranks take part in them.
    """

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._preempted_epoch = 0
        self._turns: deque[Turn] = deque()
        self.on_command: Callable[[m.Message], None] = lambda message: None
        self.stopping = False

    def send(self, message: m.Message) -> None:
        """To the parent."""
        self._link.send(m.MESSAGES.encode(message))

    def wait_turn(self, timeout_s: float) -> Turn | None:
        """The next command that takes a turn of its own; others are obeyed meanwhile."""
        if not self._turns:
            self._obey(self._link.receive(timeout_s))
        return self._turns.popleft() if self._turns else None

    def next_turn(self, deadline_s: float) -> Turn:
        """The next command that takes a turn; DeadlineExceeded when none comes in time."""
        self.wait_until(lambda: bool(self._turns), deadline_s)
        return self._turns.popleft()

    def joins(self, epoch: int) -> bool:
        """Whether the next turn adds slots to the lease of that epoch."""
        first = self._turns[0] if self._turns else None
        return isinstance(first, m.Join) and first.epoch == epoch

    def wait_until(self, known: Callable[[], bool], deadline_s: float) -> None:
        """Obeys commands until `known()`; DeadlineExceeded when it does not come true in time."""
        end = time.monotonic() + deadline_s
        while not known():
            if time.monotonic() >= end:
                raise DeadlineExceeded(
                    "a command other ranks have seen did not come", seen=f"{deadline_s} s"
                )
            self._obey(self._link.receive(end - time.monotonic()))

    def preempted(self, epoch: int) -> bool:
        """Whether the lease of that epoch is over; obeys what has arrived."""
        while (data := self._link.poll()) is not None:
            self._obey(data)
        return self.stopping or self._preempted_epoch >= epoch

    def _obey(self, data: bytes | None) -> None:
        if data is None:
            return
        message = m.MESSAGES.decode(data)
        if isinstance(message, m.Preempt):
            self._preempted_epoch = max(self._preempted_epoch, message.epoch)
        elif isinstance(message, m.Activate | m.Join | Save):
            self._turns.append(message)
        else:
            self.on_command(message)

    def close(self) -> None:
        """Sends what is queued and disconnects."""
        self._link.close()


@contextmanager
def activation_span(command: m.Activate) -> Iterator[None]:
    """The activation in the trace of its RL step."""
    parent = extract({"traceparent": command.traceparent}) if command.traceparent else None
    about = {names.RL_STEP: command.step, names.EPOCH: command.epoch}
    with span(names.DRAFTER_ACTIVATE, about, parent=parent):
        yield
