"""The coordinator's metrics. `make docs` writes them into docs/metrics.md."""

from __future__ import annotations

from paceline.telemetry.metrics import Counter, Gauge

STALLED = Gauge(
    "paceline.coordinator.stalled",
    "s",
    ("waits_for",),
    "since the run got on, once that is longer than coordinator.stall_alarm_s; by whom all wait "
    "for in the end; 0 when it goes on",
)
SLOT_TIME = Counter(
    "paceline.coordinator.slot_time",
    "s",
    ("use",),
    "slot-seconds of finished steps; use is generating, policy, drafter, transferring or idle, and "
    "their sum is slots times wall",
)
