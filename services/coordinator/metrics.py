"""The coordinator's metrics. `make docs` writes them into docs/metrics.md."""

from __future__ import annotations

from paceline.telemetry.metrics import Counter, Gauge, Histogram
from paceline.v1.coordinator_pb2 import StepRecord

QUANTILES = ("0.5", "0.9", "1")
"""Of StepRecord.response_length_quantiles, in their order."""

STALLED = Gauge(
    "paceline.coordinator.stalled",
    "s",
    ("waits_for",),
    "since the run got on, once that is longer than coordinator.stall_alarm_s; by whom all wait "
    "for in the end; 0 when it goes on",
)
ALARMS = Counter(
    "paceline.coordinator.alarms",
    "{alarm}",
    ("waits_for",),
    "times that the run stood still for longer than coordinator.stall_alarm_s",
)
AWAY = Gauge("paceline.coordinator.away", "1", ("service",), "1 while a service does not answer")
REFUSED = Counter(
    "paceline.coordinator.refused",
    "{event}",
    ("event",),
    "news of calls and leases that had ended",
)
PHASE_TIME = Counter(
    "paceline.coordinator.phase_time",
    "s",
    ("phase",),
    "of phases that were left, e.g. rollout, policy, commit or rollout+policy",
)
SLOTS = Gauge("paceline.coordinator.slots", "{slot}", ("holder",), "by who may compute on them")
LEASES = Counter(
    "paceline.coordinator.leases",
    "{lease}",
    ("holder",),
    "times that slots were given to a trainer; holder: policy or drafter",
)
SAMPLES = Counter(
    "paceline.coordinator.samples",
    "{sample}",
    ("outcome",),
    "that ended in rollouts; outcome: scored, or without a reward: unscored, aborted, or failed, "
    "where a task, an environment or a reward was at fault",
)
TRAJECTORIES = Gauge(
    "paceline.coordinator.trajectories",
    "{trajectory}",
    ("fate",),
    "of the run, as the ledger has them when a step ends; fate: published, and of these trained, "
    "dropped, open (not decided yet) or lost, which a run has none of",
)
SLOT_TIME = Counter(
    "paceline.coordinator.slot_time",
    "s",
    ("use",),
    "slot-seconds of finished steps; use is generating, policy, drafter, transferring or idle, and "
    "their sum is slots times wall",
)
IDLE_TIME = Counter(
    "paceline.coordinator.idle_time",
    "s",
    ("cause",),
    "slot-seconds of slot_time's idle by why nobody used them; cause: untrained, trainer_away, "
    "trainer_done, commit, enough, giving_back, serial, hand_over, too_few or leasing",
)
STEPS = Counter("paceline.coordinator.steps", "{step}", (), "RL steps that were committed")
RESPONSE_TOKENS = Counter(
    "paceline.coordinator.response_tokens",
    "{token}",
    (),
    "generated for the samples of steps",
)
STEP_TIME = Histogram(
    "paceline.coordinator.step_time",
    "s",
    ("part",),
    "of a step; part: step, the whole; rollout; policy; or preempt_wait, until the drafter left",
)
VERSION = Gauge(
    "paceline.coordinator.version",
    "{version}",
    ("of",),
    "that the last step was drawn with; of: policy or drafter",
)
ACCEPT_LENGTH = Gauge(
    "paceline.coordinator.accept_length",
    "{token}",
    (),
    "accepted drafts a round of the last step's rollouts, and the one token that follows them",
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
    "optimiser steps that the drafter took in steps",
)
REWARD = Gauge(
    "paceline.coordinator.reward", "1", (), "mean of the last step's sessions, as in steps.jsonl"
)
RESPONSE_LENGTH = Gauge(
    "paceline.coordinator.response_length",
    "{token}",
    ("quantile",),
    "of the last step's samples; quantile: 0.5, 0.9 or 1",
)
TRUNCATED_SHARE = Gauge(
    "paceline.coordinator.truncated_share",
    "1",
    (),
    "0 to 1: of the last step's samples those that their limit of tokens has ended",
)
NEAR_TIES = Counter(
    "paceline.coordinator.near_ties",
    "{sample}",
    (),
    "samples with a draw whose two best tokens lay within 1e-5",
)
GROUPS = Counter(
    "paceline.coordinator.groups",
    "{group}",
    ("solved",),
    "of steps; solved: by_none, by_some or by_all of their samples, or left_out, which dynamic "
    "sampling did for equal rewards",
)
REWARD_PART = Gauge(
    "paceline.coordinator.reward_part",
    "1",
    ("rule",),
    "mean over the last step's samples of what a rule of a mixture gave, before its weight",
)
EVALUATION = Gauge(
    "paceline.coordinator.evaluation",
    "1",
    ("kind",),
    "last value on held-out tasks; kind: accuracy, with several samples a task also pass@2 and so "
    "on and accuracy_se, its standard error; or accept_length_probe",
)
POINTS_DROPPED = Counter(
    "paceline.coordinator.points_dropped",
    "{step}",
    ("tracker",),
    "steps that a slow tracker was not told of",
)


def record_step(record: StepRecord) -> None:
    """A step that is over."""
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
