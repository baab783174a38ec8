"""The metrics of every server. `make docs` writes them into docs/metrics.md."""

from __future__ import annotations

from paceline.telemetry.metrics import Counter

REFUSED = Counter(
    "paceline.rpc.refused",
    "{call}",
    ("reason",),
    "gRPC calls without a valid token, or with an epoch that no lease has",
)
