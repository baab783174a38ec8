"""Decodes responses in virtual time. All responses of a worker advance in rounds, and a round takes
longer with more responses.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from benchmarks.simulation.fleet import Fleet


@dataclass(slots=True)
class SimulatedResponse:
    """A sample under way."""

    step: int  # step of its task
    group: int  # of the step
    sample: int
    tokens: int  # at its end
    spans: list[tuple[int, int]] = field(default_factory=list)  # policy version, first token
    began_round: float = 0.0  # of its worker

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Policy versions, and the number of tokens of each version."""
        ends = [first for _, first in self.spans[1:]] + [self.tokens]
        return [
            (version, end - first)
            for (version, first), end in zip(self.spans, ends, strict=True)
            if end > first
        ]


class SimulatedWorker:
    """The batch of one engine worker. `turn` counts its changes; a prediction from before a change
    is void.
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
        """Time at which the next response ends if nothing changes; None without one."""
        if not self._running or self.paused:
            return None
        left = self._running[0][0] - self._rounds
        return self._at_s + left * self._fleet.round_at(len(self._running))

    def end_first(self, now_s: float) -> SimulatedResponse:
        """Removes the response that ends now."""
        self._advance(now_s)
        last, *_, response = heapq.heappop(self._running)
        self._rounds = last  # removes the rounding error
        return response

    def swap(self, now_s: float, version: int) -> None:
        """Marks tokens from now on with another policy version."""
        self._advance(now_s)
        for *_, response in self._running:
            response.spans.append((version, self._done(response)))

    def held_tokens(self, now_s: float) -> int:
        """Number of tokens that the running responses keep keys and values of."""
        self._advance(now_s)
        return sum(self._done(response) for *_, response in self._running)

    def pause(self, now_s: float) -> None:
        """Stops decoding until `go_on`."""
        self._advance(now_s)
        self.paused = True

    def go_on(self, now_s: float) -> None:
        """Continues decoding."""
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
