"""Metrics of senders and receivers of weights. `make docs` writes them into docs/metrics.md."""

from paceline.telemetry.metrics import Counter

TARGET = ("target",)

RECEIVED_BYTES = Counter("paceline.weights.received_bytes", "By", ("target", "encoding"))
"""received bytes of pushed versions: `full`, or as a `sparse_delta` to the version before"""
DELTAS_LEFT = Counter("paceline.weights.deltas_left", "{version}", ("target", "reason"))
"""versions pushed in full despite a base; reason: too many weights `changed` for a small delta, the
receiver lacked the `base`, or the rebuilt version was `damaged`
"""

VERSIONS_REPLACED = Counter("paceline.weights.versions_replaced", "{version}", TARGET)
"""versions announced again with other content before they served"""
VERSIONS_DAMAGED = Counter("paceline.weights.versions_damaged", "{version}", TARGET)
"""damaged versions in the spool, and a damaged versions.json as `sets`; a damaged version is not
loaded, and is pushed again at its next announcement or use
"""
VERSIONS_REFUSED = Counter("paceline.weights.versions_refused", "{version}", TARGET)
"""pushed versions with a wrong checksum or numbers that are not finite"""
