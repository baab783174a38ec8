"""The figures of a step, one series each: a single table for charts of one run and of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from paceline.report.charts import Series, empty, line_chart
from paceline.report.solved import BY_ALL, BY_NONE
from paceline.v1.coordinator_pb2 import StepRecord

NAN = float("nan")


class Measure(NamedTuple):
    """A figure of a step."""

    title: str  # of a chart of this figure alone
    note: str
    label: str  # beside other figures in one chart
    unit: str
    of: Callable[[StepRecord], float]  # NaN if the step did not measure it
    y_min: float | None = None
    y_max: float | None = None

    def points(self, records: Sequence[StepRecord]) -> list[tuple[float, float]]:
        """(number of the step, its value)."""
        return [(float(one.step + 1), self.of(one)) for one in records]


def policy_figure(
    name: str, title: str, note: str, unit: str, *, label: str = "", y_min: float | None = None
) -> Measure:
    """A figure of the policy step, by the trainer's name for it."""
    shown = label or name.replace("_", " ")
    return Measure(title, note, shown, unit, lambda one: one.policy.get(name, NAN), y_min)


def lines(records: Sequence[StepRecord], measures: Sequence[Measure]) -> str:
    """A line for each figure, over the axes of the first."""
    series = [Series(one.label, one.points(records), f"c{i}") for i, one in enumerate(measures)]
    if not series:
        return empty("nothing was measured")
    first = measures[0]
    return line_chart(series, y_label=first.unit, y_min=first.y_min, y_max=first.y_max)


def alone(records: Sequence[StepRecord], measure: Measure) -> tuple[str, str, str]:
    """(title, note, drawing) of a figure's own chart."""
    return measure.title, measure.note, lines(records, [measure])


def split(records: Sequence[StepRecord], prefix: str, parts: Sequence[str]) -> str:
    """A line for each part of a figure of the policy step, in nats; its name is prefix + part."""
    return lines(
        records, [policy_figure(prefix + part, "", "", "nats", label=part) for part in parts]
    )


def _divided(part: float, whole: float) -> float:
    return part / whole if whole else NAN


def _quantile(which: int) -> Callable[[StepRecord], float]:
    def of(record: StepRecord) -> float:
        found = record.response_length_quantiles
        return float(found[which]) if len(found) == len(_LENGTHS) else NAN

    return of


def _solved(who: str) -> Callable[[StepRecord], float]:
    """Share of the groups solved by none, some or all of their samples."""
    return lambda one: _divided(one.groups_solved.get(who, 0), sum(one.groups_solved.values()))


def _age(record: StepRecord) -> float:
    """Mean age of the trained trajectories, in policy versions."""
    ages = record.staleness
    return _divided(sum(int(age) * count for age, count in ages.items()), sum(ages.values()))


REWARD = Measure("Reward", "mean of a step", "reward", "reward", lambda one: one.reward_mean)
SPEED = Measure(
    "Rollout speed",
    "generated tokens per second of rollout",
    "tokens/s of a step",
    "tokens per second",
    lambda one: _divided(one.response_tokens, one.rollout_s) or NAN,
    0.0,
)
ACCEPTANCE = Measure(
    "Acceptance length",
    "live",
    "live",
    "tokens per verified draft",
    lambda one: one.accept_length or NAN,
)
STEP_SECONDS = Measure(
    "Seconds of a step", "evaluations excluded", "step", "seconds", lambda one: one.step_s
)
_LENGTHS = ("median", "90th percentile", "longest")
LENGTHS = tuple(
    Measure("Response length", f"{name}, tokens", name, "tokens", _quantile(i), 0.0)
    for i, name in enumerate(_LENGTHS)
)
TRUNCATED = Measure(
    "Truncated responses",
    "share of responses that their limit has ended",
    "cut",
    "share",
    lambda one: one.truncated_share,
    0.0,
    1.0,
)
LOSS = policy_figure("loss", "Loss", "mean over the trained tokens", "loss")
ENTROPY = policy_figure("entropy", "Entropy", "nats a token", "nats", y_min=0.0)
DIVERGENCE = policy_figure(
    "divergence", "Divergence", "nats a token", "nats", label="from the start policy"
)
GRADIENT = policy_figure(
    "grad_norm", "Gradient norm", "before it is clipped", "norm", label="gradient norm", y_min=0.0
)
SOLVED_BY_NONE = Measure(
    "Groups solved by none",
    "share of the groups of which no sample solves the task",
    "by no sample",
    "share",
    _solved(BY_NONE),
    0.0,
)
SOLVED_BY_ALL = Measure(
    "Groups solved by all",
    "share of the groups of which every sample solves the task",
    "by all",
    "share",
    _solved(BY_ALL),
    0.0,
)
AGE = Measure(
    "Staleness",
    "mean age of the trained trajectories in policy versions",
    "age",
    "policy versions",
    _age,
    0.0,
)
_GAP = "|log-prob of the trainer - log-prob of the sampler|, nats"
MISMATCH: Mapping[str, Measure] = {
    name: policy_figure(name, title, note, unit, y_min=y_min)
    for name, title, note, unit, y_min in (
        ("behavior_gap", "Sampler against trainer", f"mean {_GAP}", "nats", None),
        ("behavior_gap_max", "Largest gap", f"largest {_GAP}", "nats", None),
        ("behavior_k3", "Divergence of the sampler", "k3 estimate, nats", "nats", None),
        ("effective_sample_size", "Effective sample size", "share of the tokens", "share", 0.0),
        ("clip_fraction", "Clipped tokens", "share of the tokens", "share", 0.0),
        ("masked_fraction", "Masked tokens", "share of the tokens", "share", 0.0),
    )
}
"""By name: distance between sampler and trainer, and its effect on token weights."""
SIDE_BY_SIDE = (
    REWARD,
    SPEED,
    ACCEPTANCE,
    STEP_SECONDS,
    LENGTHS[-1],
    TRUNCATED,
    LOSS,
    ENTROPY,
    DIVERGENCE,
    GRADIENT,
    MISMATCH["behavior_gap"],
    MISMATCH["behavior_k3"],
    MISMATCH["clip_fraction"],
    SOLVED_BY_NONE,
    SOLVED_BY_ALL,
    AGE,
)
"""Figures compared over several runs, one chart each."""
