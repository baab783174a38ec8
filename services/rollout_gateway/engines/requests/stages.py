"""Times the stages of one request inside an engine: its wait, its prompt, its rounds by arm.

Each stage has one entry, however many rounds it had, so the engine's report is bounded. Times are
from the machine's clock, which the gateway shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.services.rollout_gateway.engines.nouns import StageTime

QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"
DECODE_STAGES = 12
"""Pairs of arm and policy version with an entry of their own. Rounds of further pairs are added to
the last entry.
"""


class Stages:
    """The stages of a request from its enqueueing on."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._enqueued = self._last = clock()
        self._admitted = self._cached = 0  # 0: not yet
        self._rounds: dict[tuple[str, int], list[int]] = {}  # start, end, busy, rounds, tokens

    def admitted(self) -> None:
        """The request has got a slot; only the first call counts."""
        self._admitted = self._admitted or self._clock()

    def cached(self) -> None:
        """The prompt is cached and rounds begin; only the first call counts.

        An engine that draws the first token with the prompt never calls this method.
        """
        if not self._cached:
            self._cached = self._last = self._clock()

    def round(self, arm: str, policy_version: int, tokens: int, *, begins: bool = True) -> None:
        """The request took tokens of a round that ends now. begins: they are the round's first
        tokens.
        """
        now = self._clock()
        if not self._cached:  # the prompt's own forward gave the tokens
            self._cached = self._last = now
        key = (arm, policy_version)
        if key not in self._rounds and len(self._rounds) >= DECODE_STAGES:
            key = next(reversed(self._rounds))
        stage = self._rounds.setdefault(key, [self._last, now, 0, 0, 0])
        stage[1] = now
        stage[2] += now - self._last
        stage[3] += begins
        stage[4] += tokens
        self._last = now

    def times(self, prompt_tokens: int) -> tuple[StageTime, ...]:
        """All stages so far, ordered by their start.

        prompt_tokens: prompt tokens that were computed for the request, not copied.
        """
        found = []
        if self._admitted:
            found.append(_between(QUEUE, self._enqueued, self._admitted))
        if self._cached:
            start = self._admitted or self._enqueued
            found.append(_between(PREFILL, start, self._cached, prompt_tokens))
        for (arm, version), (start, end, busy, rounds, tokens) in self._rounds.items():
            found.append(StageTime(DECODE, arm, version, start, end, busy / 1e9, rounds, tokens))
        return tuple(found)


def _between(stage: str, start_ns: int, end_ns: int, tokens: int = 0) -> StageTime:
    return StageTime(
        stage, start_ns=start_ns, end_ns=end_ns, busy_s=(end_ns - start_ns) / 1e9, tokens=tokens
    )
