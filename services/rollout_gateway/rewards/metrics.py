"""Counts and times scores."""

from __future__ import annotations

from paceline.telemetry import meter


class RewardMetrics:
    """Made after the telemetry's setup; docs/metrics.md says what each one means."""

    def __init__(self) -> None:
        self._scores = meter().create_counter("paceline.reward.scores", unit="{score}")
        self._unscored = meter().create_counter("paceline.reward.unscored", unit="{score}")
        self._failures = meter().create_counter("paceline.reward.failures", unit="{failure}")
        self._time = meter().create_histogram("paceline.reward.time", unit="s")

    def scored(self, rule: str, value: float | None) -> None:
        """A rule gave an answer."""
        (self._unscored if value is None else self._scores).add(1, {"rule": rule})

    def failed(self, rule: str, reason: str) -> None:
        """A rule gave none, or one that is none."""
        self._failures.add(1, {"rule": rule, "reason": reason})

    def took(self, rule: str, seconds: float) -> None:
        """From the question to its answer or failure, waiting included."""
        self._time.record(seconds, {"rule": rule})
