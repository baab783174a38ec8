"""Compares live acceptance length across a change of drafter."""

from __future__ import annotations

from paceline.services.coordinator.machine.events import Event, TasksFinished
from paceline.services.coordinator.machine.rollout import draw_of
from paceline.services.coordinator.machine.state import State


class AcceptanceWatch:
    """Compares the first step of a new drafter with the last step of its predecessor.

    A longer window would be too late: receivers keep only the serving and the previous set, so the
    next commit is the last that can restore the predecessor. The gate has already compared the
    candidate on held-out rows; this check detects a bad swap only.
    """

    def __init__(self, drop: float) -> None:
        """`drop`: permitted loss of acceptance length, tokens; 0 disables the watch."""
        self._drop = drop
        self.last: tuple[int, float] | None = None  # drafter version, its newest length

    def observe(self, before: State, event: Event) -> dict[str, float] | None:
        """Processes one transition. Returns a fall's figures once per change of
        drafter, else None.
        """
        if not isinstance(event, TasksFinished) or draw_of(before, event.epoch) is None:
            return None
        tokens = event.details.get("trained_round_tokens")
        rounds = event.details.get("trained_rounds")
        if not isinstance(tokens, int) or not isinstance(rounds, int):
            return None
        return self.compare(before.versions.drafter, tokens, rounds)

    def compare(self, drafter_version: int, tokens: int, rounds: int) -> dict[str, float] | None:
        """As `observe`, from one step's drafted rounds of the trained drafter and their tokens."""
        if not rounds:
            return None
        now = tokens / rounds
        last, self.last = self.last, (drafter_version, now)
        if last is None or last[0] == drafter_version:
            return None
        fell = self._drop > 0 and last[1] - now > self._drop
        return {"before": last[1], "now": now, "drop": self._drop} if fell else None
