"""The charts of a run by RL step, one entry of a table each.

A figure that a step did not measure is a gap in its line.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from paceline.report import charts
from paceline.report.charts import Series
from paceline.report.journal import ACCURACY, PROBE, RunHistory
from paceline.report.solved import BY_ALL, BY_NONE, BY_SOME
from paceline.streams.journal import SlotUse
from paceline.v1.coordinator_pb2 import StepRecord

_NAN = float("nan")
_SMOOTH = 10
_LINES = 7
"""Maximum number of lines in one chart: one colour each."""
_GREY = frozenset(("off", "idle", "rest"))
AUDIT_GAP = "audit_gap/"


class OtherRun(NamedTuple):
    """A run that is shown beside another one."""

    run_id: str
    history: RunHistory
    settings: Sequence[tuple[str, str, str]]  # that differ: key, value here, value there


Of = Callable[[StepRecord], float]
"""A figure of a step; NaN if the step did not measure it."""
Lines = Callable[[RunHistory], list[Series]]


class Chart(NamedTuple):
    """Lines or columns by RL step."""

    title: str
    note: str
    lines: Lines
    stacked: bool = False
    smooth: bool = False  # running means, with the raw values faint behind them
    swaps: bool = False  # dashes at the steps that a new drafter serves first

    def draw(self, history: RunHistory, other: OtherRun | None = None) -> str:
        """The drawing as SVG; empty if nothing was measured. Lines of the other run are dashed, in
        the colour of their line here.
        """
        series = [
            replace(one, color="c7" if one.name in _GREY else f"c{i}")
            for i, one in enumerate(self.lines(history)[:_LINES])
        ]
        if self.stacked:
            return charts.stacked_columns(series, y_label=self.title)
        lines = [one for one in series if self.smooth and not one.dots]
        raw = [replace(one, name=f"{one.name} of a step", faint=True) for one in lines]
        colors = {one.name: f"{one.color} other" for one in series}
        if other:
            series += [
                replace(one, name=f"{one.name} of {other.run_id}", color=colors[one.name])
                for one in self.lines(other.history)
                if one.name in colors
            ]
        if self.smooth:
            series = raw + [one if one.dots else _smoothed(one) for one in series]
        marks = _swaps(history.records) if self.swaps else ()
        return charts.line_chart(series, y_label=self.title, marks=marks)


def _smoothed(series: Series) -> Series:
    return replace(series, points=charts.running_mean(series.points, _SMOOTH))


def _swaps(records: Sequence[StepRecord]) -> list[float]:
    """Steps served by another drafter than the step before."""
    return [
        float(later.step + 1)
        for earlier, later in pairwise(records)
        if earlier.versions.drafter != later.versions.drafter
    ]


def _values(*figures: str | tuple[str, Of]) -> Lines:
    """A line for each path in the record, such as "policy/loss", or for a label and a function."""
    named = [
        (one.rpartition("/")[2].removesuffix("_s").replace("_", " "), partial(_value, path=one))
        if isinstance(one, str)
        else one
        for one in figures
    ]
    return lambda history: [
        Series(name, [(one.step + 1.0, of(one)) for one in history.records]) for name, of in named
    ]


def _value(record: StepRecord, path: str) -> float:
    field, _, key = path.partition("/")
    value = getattr(record, field)
    return float(value.get(key, _NAN) if key else value)


def _keys(
    field: str, prefix: str = "", divisor: Callable[[StepRecord, str], float] = lambda one, key: 1.0
) -> Lines:
    """A line for each key of a map of the record that begins with `prefix`."""

    def value(record: StepRecord, key: str) -> float:
        return _ratio(_value(record, f"{field}/{key}"), divisor(record, key))

    def lines(history: RunHistory) -> list[Series]:
        keys = {key for one in history.records for key in getattr(one, field)}
        return [
            Series(
                key.removeprefix(prefix),
                [(one.step + 1.0, value(one, key)) for one in history.records],
            )
            for key in sorted(keys, key=lambda key: (key in _GREY, len(key), key))
            if key.startswith(prefix)
        ]

    return lines


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else _NAN


def _quantile(which: int) -> Of:
    """One of the three quantiles of the response lengths: median, 90th percentile, longest."""
    return lambda one: float(dict(enumerate(one.response_length_quantiles)).get(which, _NAN))


def _learning(history: RunHistory) -> list[Series]:
    held = ((f"held-out {kind}", kind) for kind in (ACCURACY, history.widest_pass) if kind)
    return [*_values(("reward", lambda one: one.reward_mean))(history), *_dots(history, *held)]


def _acceptance(history: RunHistory) -> list[Series]:
    live = _values(("live", lambda one: one.accept_length or _NAN))(history)
    return [*live, *_dots(history, ("probe", PROBE))]


def _dots(history: RunHistory, *kinds: tuple[str, str]) -> list[Series]:
    """Evaluations by finished steps: (label, kind)."""
    return [
        Series(label, [(float(x), y) for x, y in history.evaluated(kind)], dots=True)
        for label, kind in kinds
    ]


def _rest(one: StepRecord) -> float:
    return max(0.0, one.step_s - one.rollout_s - one.policy_s - one.preempt_wait_s)


_TOKENS = "mean gap |log-prob of the trainer - of the sampler| of the tokens, by"
CHARTS = (
    Chart(
        "Reward and held-out accuracy",
        f"line: mean of {_SMOOTH} steps; dots: fixed held-out prompts",
        _learning,
        smooth=True,
    ),
    Chart(
        "Parts of the reward",
        f"each rule of the mixture before its weight, mean of {_SMOOTH} steps",
        _keys("reward_parts"),
        smooth=True,
    ),
    Chart(
        "Acceptance length",
        "live, and a fixed probe outside timed windows; dashed: a new drafter serves",
        _acceptance,
        swaps=True,
    ),
    Chart(
        "Acceptance by arm",
        "live, of each arm's own rounds; dashed: a new drafter serves",
        _keys("arm_round_tokens", divisor=lambda one, arm: one.arm_drafted_rounds.get(arm, 0)),
        swaps=True,
    ),
    Chart(
        "Rollout speed",
        f"generated tokens per second of rollout, mean of {_SMOOTH} steps",
        _values(("tokens/s", lambda one: _ratio(one.response_tokens, one.rollout_s) or _NAN)),
        smooth=True,
    ),
    Chart(
        "Arms chosen",
        "share of speculation rounds by arm",
        _keys("arm_rounds", divisor=lambda one, arm: sum(one.arm_rounds.values())),
        stacked=True,
    ),
    Chart(
        "Response length",
        "tokens of a response",
        _values(
            ("median", _quantile(0)), ("90th percentile", _quantile(1)), ("longest", _quantile(2))
        ),
    ),
    Chart(
        "Where a step's time went",
        "wall seconds of each step",
        _values("rollout_s", "policy_s", "preempt_wait_s", ("rest", _rest)),
        stacked=True,
    ),
    Chart(
        "What the slots did",
        "slot-seconds of each step by use",
        _values(*(f"slot_s/{use}" for use in SlotUse)),
        stacked=True,
    ),
    Chart(
        "Drafter training",
        "whole optimiser steps inside each RL step",
        _values("drafter_steps"),
        stacked=True,
    ),
    Chart("Loss", "mean over the trained tokens", _values("policy/loss")),
    Chart("Entropy", "nats a token", _values("policy/entropy")),
    Chart("Divergence", "from the start policy, nats a token", _values("policy/divergence")),
    Chart("Gradient norm", "before it is clipped", _values("policy/grad_norm")),
    Chart(
        "Groups solved",
        "groups by the samples that solve the task: all or none teach nothing",
        _values(f"groups_solved/{BY_NONE}", f"groups_solved/{BY_SOME}", f"groups_solved/{BY_ALL}"),
        stacked=True,
    ),
    Chart(
        "Truncated responses",
        "share of responses that reached their token limit",
        _values("truncated_share"),
    ),
    Chart(
        "Staleness",
        "trained trajectories by their age in policy versions",
        _keys("staleness"),
        stacked=True,
    ),
    Chart(
        "Sampler against trainer",
        "|log-prob of the trainer - log-prob of the sampler|, nats: mean and largest",
        _values("policy/behavior_gap", "policy/behavior_gap_max"),
    ),
    Chart("Gap by age", f"{_TOKENS} lag", _keys("policy", "behavior_gap/lag=")),
    Chart("Gap by arm", f"{_TOKENS} arm", _keys("policy", "behavior_gap/arm=")),
    Chart("Gap by numbers", f"{_TOKENS} number format", _keys("policy", "behavior_gap/numbers=")),
    Chart("Divergence of the sampler", "k3 estimate, nats", _values("policy/behavior_k3")),
    Chart(
        "Weight of the tokens",
        "effective sample size, clipped and masked tokens, as shares",
        _values("policy/effective_sample_size", "policy/clip_fraction", "policy/masked_fraction"),
    ),
    Chart(
        "Where the policy step's time went",
        "seconds of the wait for the batch, and of each part of the step",
        _values(
            "policy/seconds/batch_wait",
            "policy/seconds/proximal_logprobs",
            "policy/seconds/forward_backward",
            "policy/seconds/optimizer",
            "policy/push_s",
        ),
        stacked=True,
    ),
    Chart(
        "Exactness audit",
        "mean |log-prob of the trainer - of the engine| of audited tokens, by path, nats",
        _keys("policy", AUDIT_GAP),
    ),
)
