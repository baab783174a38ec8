"""Watches live acceptance length across a change of drafter.

Owns the comparison, not the rollback (machine.py).
"""

from __future__ import annotations

from collections import deque


class AcceptanceWatch:
    """Compares the first steps of a new drafter with the last steps of the one before.

    A rise of the policy's own difficulty falls on both sides of a change alike only when the
    windows are short; gates have judged the candidate on held-out rows already, so this is the
    guard against a bad swap, not a second gate.
    """

    def __init__(self, drop: float, window_steps: int) -> None:
        """`drop`: tokens of acceptance length that may be lost; 0 switches the watch off.

        `window_steps`: RL steps.
        """
        self._drop = drop
        self._before: float | None = None
        self._drafter: int | None = None
        self._window: deque[tuple[int, int]] = deque(maxlen=window_steps)
        self._judged = True

    def observe(self, drafter_version: int, tokens: int, rounds: int) -> dict[str, float] | None:
        """One step's rounds of the trained drafter and their tokens; a fall's figures, once per
        change, else None.
        """
        if not rounds or not self._drop:
            return None
        if drafter_version != self._drafter:
            self._before = self._mean()
            self._drafter = drafter_version
            self._window.clear()
            self._judged = self._before is None
        self._window.append((tokens, rounds))
        if self._judged or len(self._window) < (self._window.maxlen or 0):
            return None
        self._judged = True
        before, now = self._before, self._mean()
        if before is None or now is None or before - now <= self._drop:
            return None
        return {"before": before, "now": now, "drop": self._drop}

    def _mean(self) -> float | None:
        rounds = sum(r for _, r in self._window)
        return sum(t for t, _ in self._window) / rounds if rounds else None
