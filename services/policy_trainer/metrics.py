"""The policy trainer's metrics. `make docs` writes them into docs/metrics.md."""

from __future__ import annotations

from paceline.services.policy_trainer.messages import Progress
from paceline.telemetry.metrics import Counter, Gauge, Histogram

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
    "is older than `max_staleness` allows), no_variance (dynamic sampling drew others), "
    "filtered (by `group_filter`), "
    "too_few_siblings, unscored, incomplete_session or not_finite",
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
DEAD_LETTERS = Counter(
    "paceline.policy.dead_letters",
    "{entry}",
    (),
    "entries of the trajectories' stream that could not be read",
)
STEPS = Counter("paceline.policy.steps", "{step}", (), "RL steps that were trained")
UPDATES = Counter("paceline.policy.updates", "{update}", (), "updates that the optimiser took")
TOKENS_PER_SECOND = Gauge(
    "paceline.policy.tokens_per_second",
    "{token}/s",
    (),
    "tokens of the last step's batch, those of prompts too, by the seconds of its training",
)
PUSHED_BYTES = Counter(
    "paceline.policy.pushed_bytes",
    "By",
    ("encoding",),
    "of versions that went to the gateway, `full` or as a `sparse_delta` to the one before",
)
CHECKPOINT_TIME = Histogram(
    "paceline.policy.checkpoint_time",
    "s",
    (),
    "until rank 0's checkpoint lay on disk, written while the ranks train on; part_time's "
    "checkpoint is how long they were held",
)
VERSION = Gauge("paceline.policy.version", "{version}", (), "policy version of the last step")
REWARD = Gauge(
    "paceline.policy.reward",
    "1",
    ("statistic",),
    "of the sessions of the last step's batch; statistic: mean or std",
)
FIGURE = Gauge(
    "paceline.policy.figure",
    "1",
    ("figure", "of"),
    "what the last step measured (docs/algorithms.md): loss, grad_norm, entropy, behavior_gap ...; "
    "of: the tokens that it is about, such as lag=1, arm=off or numbers=int8, or all",
)
PART_TIME = Histogram(
    "paceline.policy.part_time",
    "s",
    ("part",),
    "of a step; part: train, all of its computing, whose parts are proximal_logprobs, "
    "reference_logprobs, values, forward_backward, optimizer and critic; beside it batch_wait, "
    "publish, and checkpoint, which is the time until the ranks train on",
)
TRAINED = Counter(
    "paceline.policy.trained",
    "1",
    ("what",),
    "what: trajectories, tokens (of prompts too), or groups_without_variance, which carry no "
    "gradient",
)


def record_step(progress: Progress) -> None:
    """What a step has trained and measured."""
    batch, facts = progress.batch, progress.figures
    STEPS.record()
    if facts.train_s > 0:
        PART_TIME.record(facts.train_s, part="train")
        TOKENS_PER_SECOND.record(batch.tokens / facts.train_s)
    VERSION.record(progress.policy_version)
    REWARD.record(batch.reward_mean, statistic="mean")
    REWARD.record(batch.reward_std, statistic="std")
    TRAINED.record(batch.trajectories, what="trajectories")
    TRAINED.record(batch.tokens, what="tokens")
    TRAINED.record(batch.zero_variance_groups, what="groups_without_variance")
    for name, value in facts.figures.items():
        figure, _, of = name.partition("/")
        if figure == "seconds":
            PART_TIME.record(value, part=of)
        else:
            FIGURE.record(value, figure=figure, of=of or "all")
