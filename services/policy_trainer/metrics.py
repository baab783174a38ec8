"""The policy trainer's metrics. `make docs` writes them into docs/metrics.md."""

from __future__ import annotations

from paceline.telemetry.metrics import Counter

VERSIONS_REPLACED = Counter(
    "paceline.policy.versions_replaced",
    "{version}",
    (),
    "versions pushed again with other bits, in the place of those that did not serve yet",
)
VERSIONS_TAKEN = Counter(
    "paceline.policy.versions_taken",
    "{version}",
    (),
    "versions whose served bits a restarted trainer took, because its replay came to others",
)
