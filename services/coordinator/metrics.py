"""The coordinator's metrics. `make docs` writes them into docs/metrics.md."""

from paceline.telemetry.metrics import Counter, Gauge, Histogram
from paceline.v1.coordinator_pb2 import StepRecord

QUANTILES = ("0.5", "0.9", "1")
"""Quantiles of StepRecord.response_length_quantiles, in order."""

STALLED = Gauge(
    "paceline.coordinator.stalled",
    "s",
    ("waits_for",),
    "time since the last progress, above coordinator.stall_alarm_s, else 0; waits_for: the "
    "service at the end of the chain of waits",
)
ALARMS = Counter(
    "paceline.coordinator.alarms",
    "{alarm}",
    ("waits_for",),
    "stalls longer than coordinator.stall_alarm_s",
)
AWAY = Gauge("paceline.coordinator.away", "1", ("service",), "1 while a service does not answer")
REFUSED = Counter(
    "paceline.coordinator.refused",
    "{event}",
    ("event",),
    "late events of calls and leases that had ended",
)
PHASE_TIME = Counter(
    "paceline.coordinator.phase_time",
    "s",
    ("phase",),
    "time in completed phases, e.g. rollout, policy, commit or rollout+policy",
)
SLOTS = Gauge("paceline.coordinator.slots", "{slot}", ("holder",), "slots by lease holder")
LEASES = Counter(
    "paceline.coordinator.leases",
    "{lease}",
    ("holder",),
    "leases granted to a trainer; holder: policy or drafter",
)
SAMPLES = Counter(
    "paceline.coordinator.samples",
    "{sample}",
    ("outcome",),
    "samples that ended in rollouts; outcome: scored, unscored, aborted, or failed (a fault of "
    "task, environment or reward)",
)
TRAJECTORIES = Gauge(
    "paceline.coordinator.trajectories",
    "{trajectory}",
    ("fate",),
    "the run's trajectories in the ledger at the end of a step; fate: published, and its parts "
    "trained, dropped, open (undecided) and lost (always 0 in a correct run)",
)
SLOT_TIME = Counter(
    "paceline.coordinator.slot_time",
    "s",
    ("use",),
    "slot-seconds of finished steps; use: generating, policy, drafter, transferring or idle; the "
    "sum is slots times wall time",
)
IDLE_TIME = Counter(
    "paceline.coordinator.idle_time",
    "s",
    ("cause",),
    "idle slot-seconds of slot_time by cause: untrained, trainer_away, trainer_done, commit, "
    "enough, giving_back, serial, hand_over, too_few or leasing",
)
STEPS = Counter("paceline.coordinator.steps", "{step}", (), "committed RL steps")
RESPONSE_TOKENS = Counter(
    "paceline.coordinator.response_tokens",
    "{token}",
    (),
    "tokens generated for the samples of steps",
)
STEP_TIME = Histogram(
    "paceline.coordinator.step_time",
    "s",
    ("part",),
    "time of a step; part: step (the whole), rollout, policy, or preempt_wait (until the drafter "
    "left its slots)",
)
VERSION = Gauge(
    "paceline.coordinator.version",
    "{version}",
    ("of",),
    "version that sampled the last step; of: policy or drafter",
)
ACCEPT_LENGTH = Gauge(
    "paceline.coordinator.accept_length",
    "{token}",
    (),
    "accepted drafts per round of the last step's rollouts, plus the bonus token",
)
DRAFTED_ROUNDS = Counter(
    "paceline.coordinator.drafted_rounds",
    "{round}",
    (),
    "rounds with drafts in the rollouts of steps",
)
DRAFTER_STEPS = Counter(
    "paceline.coordinator.drafter_steps",
    "{step}",
    (),
    "optimiser steps of the drafter during steps",
)
REWARD = Gauge(
    "paceline.coordinator.reward",
    "1",
    (),
    "mean reward of the last step's sessions, as in steps.jsonl",
)
RESPONSE_LENGTH = Gauge(
    "paceline.coordinator.response_length",
    "{token}",
    ("quantile",),
    "response length of the last step's samples; quantile: 0.5, 0.9 or 1",
)
TRUNCATED_SHARE = Gauge(
    "paceline.coordinator.truncated_share",
    "1",
    (),
    "share of the last step's samples that the token limit ended, 0 to 1",
)
NEAR_TIES = Counter(
    "paceline.coordinator.near_ties",
    "{sample}",
    (),
    "samples with a draw between two best tokens less than 1e-5 apart",
)
GROUPS = Counter(
    "paceline.coordinator.groups",
    "{group}",
    ("solved",),
    "groups of steps; solved: by_none, by_some or by_all of their samples, or left_out (equal "
    "rewards, replaced by dynamic sampling)",
)
REWARD_PART = Gauge(
    "paceline.coordinator.reward_part",
    "1",
    ("rule",),
    "unweighted reward of a mixture's rule, mean over the last step's samples",
)
EVALUATION = Gauge(
    "paceline.coordinator.evaluation",
    "1",
    ("kind",),
    "latest held-out value; kind: accuracy, pass@2 and so on (several samples per task), "
    "accuracy_se (standard error), or accept_length_probe",
)
POINTS_DROPPED = Counter(
    "paceline.coordinator.points_dropped",
    "{step}",
    ("tracker",),
    "steps that a slow tracker did not receive",
)


def record_step(record: StepRecord) -> None:
    """Records the metrics of a finished step."""
    STEPS.record()
    RESPONSE_TOKENS.record(record.response_tokens)
    for part in ("step", "rollout", "policy"):
        STEP_TIME.record(getattr(record, f"{part}_s"), part=part)
    STEP_TIME.record(record.preempt_wait_s, part="preempt_wait")
    VERSION.record(record.versions.policy, of="policy")
    VERSION.record(record.versions.drafter, of="drafter")
    ACCEPT_LENGTH.record(record.accept_length)
    DRAFTED_ROUNDS.record(record.drafted_rounds)
    DRAFTER_STEPS.record(record.drafter_steps)
    REWARD.record(record.reward_mean)
    TRUNCATED_SHARE.record(record.truncated_share)
    NEAR_TIES.record(record.near_ties)
    for quantile, length in zip(QUANTILES, record.response_length_quantiles, strict=False):
        RESPONSE_LENGTH.record(length, quantile=quantile)
    for solved, groups in {**record.groups_solved, "left_out": record.groups_left_out}.items():
        GROUPS.record(groups, solved=solved)
    for cause, seconds in record.idle_s.items():
        IDLE_TIME.record(seconds, cause=cause)
    for rule, value in record.reward_parts.items():
        REWARD_PART.record(value, rule=rule)
    for use, seconds in record.slot_s.items():
        SLOT_TIME.record(seconds, use=use)
