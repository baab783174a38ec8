"""Continuous batching: assigns waiting requests to slots and returns the moves that the caller has
to make.

Running requests always fill slots 0 .. B - 1, so the cache is read as a slice. If a request ends,
the last request takes its slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence


@dataclass(frozen=True, slots=True)
class Move:
    """The move of a sequence to another slot."""

    source: int
    destination: int
    sequence: RunningSequence


class Scheduler:
    """The queue and the batch; running[i] has slot i."""

    def __init__(self, max_batch: int, prefill_tokens: int) -> None:
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []

    def admit(self) -> range:
        """Gives free slots to the requests with the longest wait; returns the slots."""
        first = len(self.running)
        while self.waiting and len(self.running) < self._max_batch:
            self.running.append(self.waiting.popleft())
        return range(first, len(self.running))

    def prefill_plan(self) -> list[tuple[int, int]]:
        """(slot, tokens) of the next prefill, oldest first. Count times the longest part stays
        within the token budget.
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
        """Removes sequences; returns the moves that fill the gaps, in order, and the free slots."""
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
        """Removes sequences from the queue."""
        gone = {id(sequence) for sequence in ended}
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in gone)
