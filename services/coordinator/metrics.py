"""The coordinator's metrics. `make docs` writes them into docs/metrics.md."""

from paceline.telemetry.metrics import Counter, Gauge, Histogram
from paceline.v1.coordinator_pb2 import StepRecord

STALLED = Gauge("paceline.coordinator.stalled", "s", ("waits_for",))
"""time since the last progress, above coordinator.stall_alarm_s, else 0; waits_for: the service at
the end of the chain of waits
"""
ALARMS = Counter("paceline.coordinator.alarms", "{alarm}", ("waits_for",))
"""stalls longer than coordinator.stall_alarm_s"""
AWAY = Gauge("paceline.coordinator.away", "1", ("service",))
"""1 while a service does not answer"""
REFUSED = Counter("paceline.coordinator.refused", "{event}", ("event",))
"""late events of calls and leases that had ended"""
PHASE_TIME = Counter("paceline.coordinator.phase_time", "s", ("phase",))
"""time in completed phases, e.g. rollout, policy, commit or rollout+policy"""
SLOTS = Gauge("paceline.coordinator.slots", "{slot}", ("holder",))
"""slots by lease holder"""
LEASES = Counter("paceline.coordinator.leases", "{lease}", ("holder",))
"""leases granted to a trainer; holder: policy or drafter"""
SAMPLES = Counter("paceline.coordinator.samples", "{sample}", ("outcome",))
"""samples that ended in rollouts; outcome: scored, unscored, aborted, or failed (a fault of task,
environment or reward)
"""
TRAJECTORIES = Gauge("paceline.coordinator.trajectories", "{trajectory}", ("fate",))
"""the run's trajectories in the ledger at the end of a step; fate: published, and its parts
trained, dropped, open (undecided) and lost (always 0 in a correct run)
"""
SLOT_TIME = Counter("paceline.coordinator.slot_time", "s", ("use",))
"""slot-seconds of finished steps; use: generating, policy, drafter, transferring or idle; the sum
is slots times wall time
"""
IDLE_TIME = Counter("paceline.coordinator.idle_time", "s", ("cause",))
"""idle slot-seconds of slot_time by cause: untrained, trainer_away, trainer_done, commit, enough,
giving_back, serial, hand_over or leasing
"""
STEPS = Counter("paceline.coordinator.steps", "{step}")
"""committed RL steps"""
RESPONSE_TOKENS = Counter("paceline.coordinator.response_tokens", "{token}")
"""tokens generated for the samples of steps"""
STEP_TIME = Histogram("paceline.coordinator.step_time", "s", ("part",))
"""time of a step; part: step (the whole), rollout, policy, or preempt_wait (until the drafter left
its slots)
"""
EVALUATION = Gauge("paceline.coordinator.evaluation", "1", ("kind",))
"""latest held-out value; kind: accuracy, pass@2 and so on (several samples per task), accuracy_se
(standard error), or accept_length_probe
"""
POINTS_DROPPED = Counter("paceline.coordinator.points_dropped", "{step}", ("tracker",))
"""steps that a slow tracker did not receive"""
FIGURE = Gauge("paceline.coordinator.figure", "1", ("figure",))
"""figures of the last step, under the names in trackers: reward, reward/format, accept_length,
response_length/0.9, groups_solved/by_all, truncated_share, policy_version ...
"""
_FIGURES = (
    *("step_s", "rollout_s", "policy_s", "preempt_wait_s", "response_tokens", "accept_length"),
    *("drafter_steps", "drafted_rounds", "near_ties", "truncated_share", "groups_left_out"),
)
_QUANTILES = ("0.5", "0.9", "1")
"""Quantiles of StepRecord.response_length_quantiles, in order."""


def figures_of(record: StepRecord) -> dict[str, float]:
    """Numbers of a record by name: the step's own, `reward/...`, `policy/...`, `slot_s/...`."""
    lengths = dict(zip(_QUANTILES, record.response_length_quantiles, strict=False))
    return {
        "reward": record.reward_mean,
        "policy_version": float(record.versions.policy),
        "drafter_version": float(record.versions.drafter),
        **{name: float(getattr(record, name)) for name in _FIGURES},
        **{
            f"{group}/{name}": float(value)
            for group, values in (
                ("response_length", lengths),
                ("reward", record.reward_parts),
                ("groups_solved", record.groups_solved),
                ("policy", record.policy),
                ("slot_s", record.slot_s),
            )
            for name, value in sorted(values.items())
        },
    }


def record_step(record: StepRecord) -> None:
    """Records the metrics of a finished step."""
    STEPS.record()
    RESPONSE_TOKENS.record(record.response_tokens)
    for part in ("step", "rollout", "policy", "preempt_wait"):
        STEP_TIME.record(getattr(record, f"{part}_s"), part=part)
    for cause, seconds in record.idle_s.items():
        IDLE_TIME.record(seconds, cause=cause)
    for use, seconds in record.slot_s.items():
        SLOT_TIME.record(seconds, use=use)
    for name, value in figures_of(record).items():
        if not name.startswith(("policy/", "slot_s/")):  # metrics of their own have these
            FIGURE.record(value, figure=name)
