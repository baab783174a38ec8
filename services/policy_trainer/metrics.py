"""The policy trainer's metrics. `make docs` writes them into docs/metrics.md."""

from paceline.services.policy_trainer.messages import Progress
from paceline.telemetry.metrics import Counter, Gauge, Histogram

CHECKPOINTS_DAMAGED = Counter("paceline.policy.checkpoints_damaged", "{checkpoint}")
"""damaged checkpoints at a start"""
VERSIONS_TAKEN = Counter("paceline.policy.versions_taken", "{version}")
"""served versions adopted after a restart"""
STALENESS = Histogram(
    "paceline.policy.staleness", "{version}", (), (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
)
"""policy versions between the oldest token of a trained trajectory and the trained weights"""
GROUPS_DROPPED = Counter("paceline.policy.groups_dropped", "{group}", ("reason",))
"""groups requested by a step and not trained; reason: stale, no_variance (dynamic sampling),
filtered (group_filter), too_few_siblings, unscored, incomplete_session or not_finite
"""
NOT_FINITE = Counter("paceline.policy.not_finite", "1", ("what",))
"""sessions or updates left out for NaN or infinity"""
HEADS_LEFT_OUT = Counter("paceline.policy.heads_left_out", "{version}")
"""heads that the drafter trainer rejected"""
DEAD_LETTERS = Counter("paceline.policy.dead_letters", "{entry}")
"""unreadable entries of the trajectories' stream"""
STEPS = Counter("paceline.policy.steps", "{step}")
"""trained RL steps"""
UPDATES = Counter("paceline.policy.updates", "{update}")
"""optimiser updates"""
TOKENS_PER_SECOND = Gauge("paceline.policy.tokens_per_second", "{token}/s")
"""tokens per second of the last training"""
PUSHED_BYTES = Counter("paceline.policy.pushed_bytes", "By", ("encoding",))
"""bytes of versions pushed to the gateway"""
CHECKPOINT_TIME = Histogram("paceline.policy.checkpoint_time", "s")
"""time until a checkpoint of rank 0 is on disk"""
VERSION = Gauge("paceline.policy.version", "{version}")
"""policy version of the last step"""
REWARD = Gauge("paceline.policy.reward", "1", ("statistic",))
"""mean or std of the last batch's sessions"""
FIGURE = Gauge("paceline.policy.figure", "1", ("figure", "of"))
"""figures of the last step (docs/algorithms.md); of: their tokens, such as lag=1, or all"""
PART_TIME = Histogram("paceline.policy.part_time", "s", ("part",))
"""time of a step; part: train with its parts proximal_logprobs, reference_logprobs, values,
forward_backward, optimizer and critic; batch_wait, publish, checkpoint (until ranks go on)
"""
TRAINED = Counter("paceline.policy.trained", "1", ("what",))
"""trajectories, tokens and groups_without_variance"""


def record_step(progress: Progress) -> None:
    """Records the metrics of a trained step."""
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
