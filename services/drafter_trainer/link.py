"""What reaches a rank from outside: commands of its parent, rows of the features stream. Owns both connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from drafter_trainer import messages as m
from drafter_trainer.buffer import FeatureSample, sample_from
from paceline import telemetry
from paceline.errors import DataLoss
from paceline.local.ranks import RankLink
from paceline.streams import Entry, Stream, decode_features
from paceline.telemetry import extract, span

GROUP, CONSUMER = "drafter", "rank0"
ENTRIES_PER_READ = 256

log = telemetry.get_logger("drafter_trainer.link")


class TrainerLink:
    """Blocking, for the one thread of a rank; only rank 0 has a stream.

    Commands that may be obeyed at any time (new heads, serving versions) go to `on_command` as soon as they are seen;
    a preemption is kept for the loop to find.
    """

    def __init__(self, link: RankLink, stream: Stream | None) -> None:
        self._link, self._stream = link, stream
        self._runner = asyncio.Runner()
        self._preempted_epoch = 0
        self._activations: list[m.Activate] = []
        self.on_command: Callable[[m.Message], None] = lambda message: None
        self.stopping = False
        self.undecodable = 0

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self._link.world_size

    def send(self, message: m.Message) -> None:
        """To the parent."""
        self._link.send(m.encode(message))

    def wait_activation(self, timeout_s: float) -> m.Activate | None:
        """The next activation; other commands are obeyed meanwhile."""
        if not self._activations:
            self._obey(self._link.receive(timeout_s))
        return self._activations.pop(0) if self._activations else None

    def preempted(self, epoch: int) -> bool:
        """Whether the lease of that epoch is over; obeys what has arrived."""
        while (data := self._link.poll()) is not None:
            self._obey(data)
        return self._preempted_epoch >= epoch

    def _obey(self, data: bytes | None) -> None:
        if data is None:
            return
        message = m.decode(data)
        if isinstance(message, m.Preempt):
            self._preempted_epoch = max(self._preempted_epoch, message.epoch)
        elif isinstance(message, m.Activate):
            self._activations.append(message)
        else:
            self.on_command(message)

    def open_stream(self) -> None:
        """Makes the group, and takes back what an earlier process read and did not use."""
        if self._stream is not None:
            self._runner.run(self._stream.create_group(GROUP))

    def read_samples(self, wait_s: float) -> Iterator[FeatureSample]:
        """What the stream holds now, waiting up to `wait_s` for the first; entries leave the stream once decoded."""
        if self._stream is None:
            return
        entries = self._runner.run(self._stream.unacked(GROUP, CONSUMER))
        entries += self._runner.run(self._stream.read(GROUP, CONSUMER, ENTRIES_PER_READ, wait_s))
        with span("features.read", kind="consumer", links=[entry.fields.get("traceparent", "") for entry in entries]):
            pass  # Marks when the batches arrived: a span must not stay open where this generator waits.
        usable: list[str] = []
        for entry in entries:
            sample = self._decode(self._stream, entry)
            if sample is not None:
                usable.append(entry.id)
                yield sample
        if usable:
            self._runner.run(self._stream.ack(GROUP, usable, delete=True))

    def _decode(self, stream: Stream, entry: Entry) -> FeatureSample | None:
        try:
            return sample_from(decode_features(entry.fields, entry.payload))
        except DataLoss as error:
            self.undecodable += 1
            log.warning("feature batch does not decode", entry=entry.id, error=str(error))
            self._runner.run(stream.dead_letter(GROUP, entry, str(error)))
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
