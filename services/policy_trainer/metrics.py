"""The policy trainer's metrics. `make docs` writes them into docs/metrics.md."""

from __future__ import annotations

from paceline.telemetry.metrics import Counter, Histogram

CHECKPOINTS_DAMAGED = Counter(
    "paceline.policy.checkpoints_damaged",
    "{checkpoint}",
    (),
    "checkpoints that were not what had been written when a start wanted them; the one before was "
    "taken, and the steps since then trained again",
)
VERSIONS_TAKEN = Counter(
    "paceline.policy.versions_taken",
    "{version}",
    (),
    "versions whose served bits a restarted trainer took, because its replay came to others",
)
STALENESS = Histogram(
    "paceline.policy.staleness",
    "{version}",
    (),
    "policy versions between the oldest token of a trained trajectory and the weights trained",
    (0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
)
GROUPS_DROPPED = Counter(
    "paceline.policy.groups_dropped",
    "{group}",
    ("reason",),
    "groups that a step asked for and did not train; reason: stale (a token of one of its sessions "
    "is older than `max_staleness` allows), too_few_siblings, unscored, incomplete_session or "
    "not_finite",
)
NOT_FINITE = Counter(
    "paceline.policy.not_finite",
    "1",
    ("what",),
    "left out because a number was NaN or infinite. session: of a group, not trained; update: of "
    "the optimiser, not taken, because the loss or the gradient's norm was",
)
HEADS_LEFT_OUT = Counter(
    "paceline.policy.heads_left_out",
    "{version}",
    (),
    "versions whose head was not pushed, because the drafter trainer did not take it",
)
