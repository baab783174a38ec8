"""Continuous batching: who waits, who runs, in which slot. Owns no tensor; tells the caller which
slots to move.

Running requests always fill slots 0 .. B - 1: when one ends, the last takes its place. So the cache
is read as a slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence that changes its slot."""

    source: int
    destination: int
    sequence: RunningSequence


class Scheduler:
    """The queue and the batch; running[i] sits in slot i."""

    def __init__(self, max_batch: int, prefill_tokens: int) -> None:
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []

    def admit(self) -> range:
        """Gives free slots to the longest-waiting requests; returns the slots."""
        first = len(self.running)
        while self.waiting and len(self.running) < self._max_batch:
            self.running.append(self.waiting.popleft())
        return range(first, len(self.running))

    def prefill_plan(self) -> list[tuple[int, int]]:
        """(slot, tokens) of the next prefill, oldest first; count times longest stays within the
        budget.
        """
        plan: list[tuple[int, int]] = []
        longest = 0
        for slot, sequence in enumerate(self.running):
            tokens = min(sequence.lacking, self._prefill_tokens)
            if tokens <= 0:
                continue
            longest = max(longest, tokens)
            if (len(plan) + 1) * longest > self._prefill_tokens:
                break
            plan.append((slot, tokens))
        return plan

    def ready(self) -> list[int]:
        """Slots that can decode."""
        return [slot for slot, sequence in enumerate(self.running) if sequence.lacking <= 0]

    def remove(self, ended: Collection[RunningSequence]) -> tuple[list[Move], range]:
        """Takes sequences out; returns the moves that close their holes, in order, and the slots
        now free.
        """
        before = len(self.running)
        gone = {id(sequence) for sequence in ended}
        moves: list[Move] = []
        for slot in reversed(
            [slot for slot, sequence in enumerate(self.running) if id(sequence) in gone]
        ):
            last = self.running.pop()
            if slot < len(self.running):
                moves.append(Move(len(self.running), slot, last))
                self.running[slot] = last
        return moves, range(len(self.running), before)

    def drop_waiting(self, ended: Sequence[RunningSequence]) -> None:
        """Takes sequences out of the queue."""
        gone = {id(sequence) for sequence in ended}
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in gone)
