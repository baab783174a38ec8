"""Metrics of senders and receivers of weights. `make docs` writes them into docs/metrics.md."""

from __future__ import annotations

from paceline.telemetry.metrics import Counter

TARGET = ("target",)

RECEIVED_BYTES = Counter(
    "paceline.weights.received_bytes",
    "By",
    ("target", "encoding", "way"),
    "of pushed versions that arrived: `full` ones, or as a `sparse_delta` to the version before; "
    "by the `network`, or by a `file` of a sender on the same host",
)
DELTAS_LEFT = Counter(
    "paceline.weights.deltas_left",
    "{version}",
    ("target", "reason"),
    "versions that were pushed whole though the sender had a base: too much had `changed` for a "
    "delta to be faster, the receiver did not hold the `base`, or what it made of the delta was "
    "`damaged`",
)

VERSIONS_REPLACED = Counter(
    "paceline.weights.versions_replaced",
    "{version}",
    TARGET,
    "versions announced again with other content, in the place of those that did not serve yet",
)
VERSIONS_DAMAGED = Counter(
    "paceline.weights.versions_damaged",
    "{version}",
    TARGET,
    "times that a version's files in the spool, or as `sets` versions.json, were not what had been "
    "written; it is not loaded, and pushed again when it is announced again or is to serve",
)
VERSIONS_REFUSED = Counter(
    "paceline.weights.versions_refused",
    "{version}",
    TARGET,
    "pushed versions with bytes that are not their manifest's or numbers that are not finite",
)
