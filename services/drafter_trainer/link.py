"""Receives the parent's commands and the rows of the features stream, for one rank."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from drafter_trainer import messages as m
from drafter_trainer.rows.sample import FeatureSample, sample_from
from paceline import telemetry
from paceline.errors import DataLoss, DeadlineExceeded, ResourceExhausted, Unavailable
from paceline.models.config import ModelConfig
from paceline.ranks.group import RankLink
from paceline.ranks.messages import Save
from paceline.streams import Entry, Stream, decode_features
from paceline.telemetry import extract, span

GROUP, CONSUMER = "drafter", "rank0"
ENTRIES_PER_READ = 256
READ_S = 1.0
"""A read that takes longer is given up: preemption must not wait for Redis."""

Turn = m.Activate | m.Join | Save
"""Commands that all ranks carry out in the order in which they were sent."""

log = telemetry.get_logger("drafter_trainer.link")


class TrainerLink:
    """Blocking, for the one thread of a rank; only rank 0 has a stream.

    Commands that may be obeyed at any time (new heads, serving versions) go to `on_command` as soon
    as they are seen; a preemption is kept for the loop to find; activations, joins and checkpoints
    wait for their turn, because all ranks take part in them.
    """

    def __init__(self, link: RankLink, stream: Stream | None, target: ModelConfig) -> None:
        self._link, self._stream, self._target = link, stream, target
        self._runner = asyncio.Runner()
        self._preempted_epoch = 0
        self._turns: deque[Turn] = deque()
        self.on_command: Callable[[m.Message], None] = lambda message: None
        self.stopping = False
        self.dropped: Counter[str] = Counter()  # entries that became no sample, by reason

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

    def open_stream(self) -> None:
        """Makes the group, so that no batch appended from now on is missed."""
        if self._stream is not None:
            self._runner.run(self._stream.create_group(GROUP))

    def read_samples(self, wait_s: float) -> list[FeatureSample]:
        """What the stream holds now, at most `ENTRIES_PER_READ`, waiting up to `wait_s` for the
        first.

        Entries leave the stream once decoded. A Redis that is away or full costs one deadline, not
        the activation.
        """
        if self._stream is None:
            return []
        try:
            return self._runner.run(self._read(self._stream, wait_s))
        except (ResourceExhausted, Unavailable, TimeoutError) as error:
            log.warning("features cannot be read now", error=str(error) or "no answer in time")
            return []

    async def _read(self, stream: Stream, wait_s: float) -> list[FeatureSample]:
        async with asyncio.timeout(wait_s + READ_S):
            entries = await stream.unacked(GROUP, CONSUMER)
            entries += await stream.read(GROUP, CONSUMER, ENTRIES_PER_READ, wait_s)
            if not entries:
                return []
            with span(
                "features.read",
                kind="consumer",
                links=[entry.fields.get("traceparent", "") for entry in entries],
            ):
                usable = {
                    entry.id: sample
                    for entry in entries
                    if (sample := await self._decode(stream, entry))
                }
                await stream.ack(GROUP, list(usable), delete=True)

        return list(usable.values())

    async def _decode(self, stream: Stream, entry: Entry) -> FeatureSample | None:
        try:
            sample = sample_from(decode_features(entry.fields, entry.payload), self._target)
            return replace(sample, traceparent=entry.fields.get("traceparent", ""))
        except DataLoss as error:
            self.dropped["unusable"] += 1
            log.warning("feature batch cannot be used", entry=entry.id, error=str(error))
            await stream.dead_letter(GROUP, entry, str(error))
            return None

    def close(self) -> None:
        """Sends what is queued and disconnects."""
        if self._stream is not None:
            self._runner.run(self._stream.close())
        self._runner.close()
        self._link.close()


@contextmanager
def activation_span(command: m.Activate) -> Iterator[None]:
    """The activation in the trace of its RL step."""
    parent = extract({"traceparent": command.traceparent}) if command.traceparent else None
    with span("drafter.activate", parent=parent, step=command.step, epoch=command.epoch):
        yield
