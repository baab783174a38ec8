"""Decodes responses in virtual time: all that run on a worker advance in rounds, which take longer
the more of them run.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from benchmarks.simulation.fleet import Fleet


@dataclass(slots=True)
class SimulatedResponse:
    """A sample on its way."""

    step: int  # whose tasks it belongs to
    group: int  # of the step
    sample: int
    tokens: int  # when it has ended
    spans: list[tuple[int, int]] = field(default_factory=list)  # policy version, first token
    began_round: float = 0.0  # of its worker

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Policy versions and how many tokens are of each."""
        ends = [first for _, first in self.spans[1:]] + [self.tokens]
        return [
            (version, end - first)
            for (version, first), end in zip(self.spans, ends, strict=True)
            if end > first
        ]


class SimulatedWorker:
    """The batch of one engine worker. `turn` counts its changes: what was foretold before one is
    void.
    """

    def __init__(self, fleet: Fleet, index: int) -> None:
        self.index = index
        self.turn = 0
        self.paused = False
        self._fleet = fleet
        self._rounds = 0.0  # decoded until _at_s
        self._at_s = 0.0
        # by last round
        self._running: list[tuple[float, int, int, int, SimulatedResponse]] = []

    def __len__(self) -> int:
        return len(self._running)

    def add(self, now_s: float, version: int, response: SimulatedResponse) -> None:
        """Begins a response under a policy version."""
        self._advance(now_s)
        response.began_round = self._rounds
        response.spans = [(version, 0)]
        last = self._rounds + self._fleet.rounds(response.tokens)
        order = (last, response.step, response.group, response.sample)
        heapq.heappush(self._running, (*order, response))

    def next_end_s(self) -> float | None:
        """When the next response ends if nothing changes."""
        if not self._running or self.paused:
            return None
        left = self._running[0][0] - self._rounds
        return self._at_s + left * self._fleet.round_at(len(self._running))

    def end_first(self, now_s: float) -> SimulatedResponse:
        """Takes the response that ends now."""
        self._advance(now_s)
        last, *_, response = heapq.heappop(self._running)
        self._rounds = last  # not a rounding error beside it
        return response

    def swap(self, now_s: float, version: int) -> None:
        """From now on tokens are of another policy version."""
        self._advance(now_s)
        for *_, response in self._running:
            response.spans.append((version, self._done(response)))

    def held_tokens(self, now_s: float) -> int:
        """Tokens whose keys and values the running responses need."""
        self._advance(now_s)
        return sum(self._done(response) for *_, response in self._running)

    def pause(self, now_s: float) -> None:
        """Decodes nothing until `go_on`."""
        self._advance(now_s)
        self.paused = True

    def go_on(self, now_s: float) -> None:
        """Decodes on."""
        self._at_s, self.paused = now_s, False
        self.turn += 1

    def _done(self, response: SimulatedResponse) -> int:
        done = int((self._rounds - response.began_round) * self._fleet.round_tokens)
        return min(done, response.tokens)

    def _advance(self, now_s: float) -> None:
        if self._running and not self.paused:
            self._rounds += (now_s - self._at_s) / self._fleet.round_at(len(self._running))
        self._at_s = now_s
        self.turn += 1
