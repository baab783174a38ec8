"""Runs the coordinator's own transitions in a simulated run, and records their cost.

The cost of an event is the CPU time of the thread. It includes the machine, records, groups, the
bytes of journal entries, snapshots and facts, and the named groups of a batch. It excludes waits,
Redis and sockets.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from statistics import fmean, median
from typing import Any, TypeVar

from benchmarks.growth_coordinator import SNAPSHOT_ENTRIES
from paceline.errors import InternalError
from paceline.services.coordinator.journal.entry import JournalEntry
from paceline.services.coordinator.journal.journal import Journal, Snapshot, pack_snapshot
from paceline.services.coordinator.machine.commands import Command, TrainPolicy
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import State
from paceline.services.coordinator.transitions import Transitions
from paceline.streams.journal import pack_entry, packed
from paceline.v1.coordinator_pb2 import Fact, StepRecord

T = TypeVar("T")


class ByteJournal(Journal):
    """Makes all bytes that a journal writes, and keeps the lines for its next snapshot."""

    def __init__(self) -> None:
        self.count = 0
        self.entry_bytes = self.snapshot_bytes = 0
        self._saved = 0
        self._lines: list[bytes] = []

    async def append(self, *entries: JournalEntry) -> None:
        """Counts the bytes of the entries; writes nothing."""
        lines = [pack_entry(entry.to_json()) for entry in entries]
        self.entry_bytes += sum(map(len, lines))
        self.count += len(lines)
        self._lines += lines

    async def save(self, snapshot: Snapshot, finished: Sequence[StepRecord]) -> None:
        """Counts the bytes of a snapshot; the records are the same few bytes in every run."""
        written = (pack_snapshot(snapshot), packed(self._lines))
        self.snapshot_bytes += sum(map(len, written))
        self._saved = snapshot.entries
        self._lines.clear()


class MeteredCoordinator:
    """Decides as the machine does, by the product's transitions, and sums their cost."""

    def __init__(self, samples: int) -> None:
        """`samples`: number of a step's samples, for the facts."""
        self.journal = ByteJournal()
        self.fact_bytes = 0
        self.steps_s: list[float] = []  # CPU seconds by finished step
        self._now_s = 0.0  # of the step that is not finished
        self._kinds_s: dict[type[Event], list[float]] = {}
        self._transitions = Transitions(
            "scale", samples, 0.0, SNAPSHOT_ENTRIES, self.journal, self._publish
        )

    def __call__(self, before: State, event: Event) -> tuple[State, tuple[Command, ...]]:
        """A `Decide` of one run; its states must follow each other."""
        gc.disable()  # otherwise the measured code pays for the objects of the simulation
        began_s = time.thread_time()
        (applied,) = _finished(self._transitions.apply(event))
        for command in applied.issued:
            if isinstance(command, TrainPolicy):
                self._transitions.groups.of(command.batch)
        took_s = time.thread_time() - began_s
        gc.enable()
        self._kinds_s.setdefault(type(event), []).append(took_s)
        self._now_s += took_s
        if applied.after.step > before.step:
            self.steps_s.append(self._now_s)
            self._now_s = 0.0
        return applied.after, applied.issued

    @property
    def step_s(self) -> float:
        """Mean CPU seconds of a step. Asynchronous steps can end work that another step has
        begun.
        """
        return fmean(self.steps_s)

    @property
    def events(self) -> Counter[str]:
        """Number of events of each kind."""
        return Counter({kind.__name__: len(each) for kind, each in self._kinds_s.items()})

    def takes_s(self) -> Callable[[Event], float]:
        """Function from an event to its cost: the median of its kind so far, in seconds."""
        middle_s = {kind: median(each) for kind, each in self._kinds_s.items()}
        return lambda event: middle_s.get(type(event), 0.0)

    async def _publish(self, *facts: Fact) -> None:
        self.fact_bytes += sum(len(fact.SerializeToString()) for fact in facts)


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that waits for nothing. Raises InternalError if it waits."""
    try:
        work.send(None)
    except StopIteration as ended:
        answer: T = ended.value
        return answer
    work.close()
    raise InternalError("a transition waits, though nothing here has to be waited for")
