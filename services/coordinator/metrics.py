"""The coordinator's metrics. `make docs` writes them into docs/metrics.md."""

from __future__ import annotations

from paceline.telemetry.metrics import Counter, Gauge, Histogram
from paceline.v1.coordinator_pb2 import StepRecord

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
    for rule, value in record.reward_parts.items():
        REWARD_PART.record(value, rule=rule)
    for use, seconds in record.slot_s.items():
        SLOT_TIME.record(seconds, use=use)
