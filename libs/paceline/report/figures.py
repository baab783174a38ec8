"""The figures of a step, and the charts of a run by RL step.

A figure that a step did not measure is a gap in its line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from paceline.report.charts import Series, empty, line_chart, running_mean, stacked_columns
from paceline.report.journal import ACCURACY, PROBE, RunHistory
from paceline.report.solved import BY_ALL, BY_NONE, BY_SOME
from paceline.streams.journal import SlotUse
from paceline.v1.coordinator_pb2 import StepRecord

NAN = float("nan")
SMOOTH = 10
_ARMS, _LINES = 7, 8
"""Maximum number of arms, and of other lines, in one chart: one colour each."""
AUDIT_GAP = "audit_gap/"
Chart = tuple[str, str, str]
"""Title, note and drawing."""
Of = Callable[[StepRecord], float]
Records = Sequence[StepRecord]


class Measure(NamedTuple):
    """A figure of a step."""

    title: str  # of a chart of this figure alone
    note: str
    unit: str
    of: Of  # NaN if the step did not measure it
    label: str = ""  # beside other figures in one chart; empty: the title
    y_min: float | None = None
    y_max: float | None = None

    def points(self, records: Records) -> list[tuple[float, float]]:
        """(number of the step, its value)."""
        return [(float(one.step + 1), self.of(one)) for one in records]


def _entry(field: str, key: str, absent: float = 0.0) -> Of:
    """The value of a key in a map of the record."""
    return lambda one: float(getattr(one, field).get(key, absent))


def _policy(
    name: str, title: str, note: str, unit: str, label: str = "", y_min: float | None = None
) -> Measure:
    """A figure of the policy step, by the trainer's name for it."""
    return Measure(title, note, unit, _entry("policy", name, NAN), label, y_min)


def _divided(part: float, whole: float) -> float:
    return part / whole if whole else NAN


def _quantile(which: int) -> Of:
    def of(record: StepRecord) -> float:
        found = record.response_length_quantiles
        return float(found[which]) if len(found) == len(_LENGTHS) else NAN

    return of


def _solved(key: str) -> Of:
    """Share of the groups solved by none, some or all of their samples."""
    return lambda one: _divided(one.groups_solved.get(key, 0), sum(one.groups_solved.values()))


def _age(record: StepRecord) -> float:
    """Mean age of the trained trajectories, in policy versions."""
    ages = record.staleness
    return _divided(sum(int(age) * count for age, count in ages.items()), sum(ages.values()))


_LENGTHS = ("median", "90th percentile", "longest")
_GAP = "|log-prob of the trainer - log-prob of the sampler|, nats"
_OF_ONE, _BY = "mean gap of the tokens of one", "behavior_gap/"
_UNSOLVED = "share of the groups of which no sample solves the task"
_SOLVED = "share of the groups of which every sample solves the task"
_AGES = "mean age of the trained trajectories in policy versions"
_CUT = "share of responses that their limit has ended"
_TOKENS_S = "generated tokens per second of rollout"

REWARD = Measure("Reward", "mean of a step", "reward", lambda one: one.reward_mean)
SPEED = Measure(
    "Rollout speed",
    _TOKENS_S,
    "tokens per second",
    lambda one: _divided(one.response_tokens, one.rollout_s) or NAN,
    "tokens/s of a step",
    0.0,
)
ACCEPTANCE = Measure(
    "Acceptance length", "live", "tokens per verified draft", lambda one: one.accept_length or NAN
)
STEP_SECONDS = Measure(
    "Seconds of a step", "evaluations excluded", "seconds", lambda one: one.step_s
)
LENGTHS = tuple(
    Measure("Response length", f"{name}, tokens", "tokens", _quantile(i), name, 0.0)
    for i, name in enumerate(_LENGTHS)
)
TRUNCATED = Measure(
    "Truncated responses", _CUT, "share", lambda one: one.truncated_share, "cut", 0.0, 1.0
)
LOSS = _policy("loss", "Loss", "mean over the trained tokens", "loss")
ENTROPY = _policy("entropy", "Entropy", "nats a token", "nats", y_min=0.0)
DIVERGENCE = _policy("divergence", "Divergence", "nats a token", "nats", "from the start policy")
GRADIENT = _policy("grad_norm", "Gradient norm", "before it is clipped", "norm", y_min=0.0)
SOLVED_BY_NONE = Measure("Groups solved by none", _UNSOLVED, "share", _solved(BY_NONE), "", 0.0)
SOLVED_BY_ALL = Measure("Groups solved by all", _SOLVED, "share", _solved(BY_ALL), "", 0.0)
AGE = Measure("Staleness", _AGES, "policy versions", _age, "age", 0.0)
MISMATCH: Mapping[str, Measure] = {
    name: _policy(name, title, note, unit, label, y_min)
    for name, title, note, unit, label, y_min in (
        ("behavior_gap", "Sampler against trainer", f"mean {_GAP}", "nats", "mean gap", None),
        ("behavior_gap_max", "Largest gap", f"largest {_GAP}", "nats", "", None),
        ("behavior_k3", "Divergence of the sampler", "k3 estimate, nats", "nats", "", None),
        ("effective_sample_size", "Effective sample size", "share of the tokens", "share", "", 0.0),
        ("clip_fraction", "Clipped tokens", "share of the tokens", "share", "", 0.0),
        ("masked_fraction", "Masked tokens", "share of the tokens", "share", "", 0.0),
    )
}
"""By name: distance between sampler and trainer, and its effect on token weights."""
SIDE_BY_SIDE = (
    *(REWARD, SPEED, ACCEPTANCE, STEP_SECONDS, LENGTHS[-1], TRUNCATED),
    *(LOSS, ENTROPY, DIVERGENCE, GRADIENT),
    *(MISMATCH[name] for name in ("behavior_gap", "behavior_k3", "clip_fraction")),
    *(SOLVED_BY_NONE, SOLVED_BY_ALL, AGE),
)
"""Figures compared over several runs, one chart each."""


def _rest(record: StepRecord) -> float:
    known = record.rollout_s + record.policy_s + record.preempt_wait_s
    return max(0.0, record.step_s - known)


_STEP_TIME: Sequence[tuple[str, str, Of]] = (
    ("rollout", "c0", lambda one: one.rollout_s),
    ("policy step", "c1", lambda one: one.policy_s),
    ("waiting for the drafter", "c5", lambda one: one.preempt_wait_s),
    ("rest", "c7", _rest),
)
_SLOT_USES = [
    (use.value, color, _entry("slot_s", use))
    for use, color in zip(SlotUse, ("c0", "c1", "c2", "c5", "c7"), strict=True)
]
_DRAFTER_STEPS: Sequence[tuple[str, str, Of]] = (
    ("optimiser steps", "c2", lambda one: float(one.drafter_steps)),
)
_GROUPS = [
    (name, color, _entry("groups_solved", key))
    for key, name, color in (
        (BY_NONE, "by no sample", "c5"),
        (BY_SOME, "by some", "c0"),
        (BY_ALL, "by all", "c2"),
    )
]
_POLICY_PARTS = {
    "batch wait": "seconds/batch_wait",
    "proximal log-probs": "seconds/proximal_logprobs",
    "forward, backward": "seconds/forward_backward",
    "optimizer": "seconds/optimizer",
    "publish": "push_s",
}
_POLICY_TIME = [
    (name, f"c{i}", _entry("policy", key)) for i, (name, key) in enumerate(_POLICY_PARTS.items())
]


def run_charts(history: RunHistory) -> list[Chart]:
    """The charts by RL step."""
    return [*_rollout_charts(history), *_policy_charts(history.records)]


def _rollout_charts(history: RunHistory) -> list[Chart]:
    records = history.records
    swaps = "dashed: a new drafter serves"
    parts = split(records, "reward_parts", unit="reward", smooth=SMOOTH)
    rules = f"each rule of the mixture before its weight, mean of {SMOOTH} steps"
    mixed = [("Parts of the reward", rules, parts)] if any(r.reward_parts for r in records) else []
    return [
        (
            "Reward and held-out accuracy",
            f"line: mean of {SMOOTH} steps; dots: fixed held-out prompts",
            _learning(history),
        ),
        *mixed,
        (
            ACCEPTANCE.title,
            f"live, and a fixed probe outside timed windows; {swaps}",
            _acceptance(history),
        ),
        ("Acceptance by arm", f"live, of each arm's own rounds; {swaps}", _by_arm(records)),
        (SPEED.title, SPEED.note, _speed(records)),
        ("Arms chosen", "share of speculation rounds by arm", _arms(records)),
        (LENGTHS[0].title, "tokens of a response", _lines(records, *LENGTHS)),
        (
            "Where a step's time went",
            "wall seconds of each step",
            _columns(records, _STEP_TIME, "seconds"),
        ),
        (
            "What the slots did",
            "slot-seconds of each step by use",
            _columns(records, _SLOT_USES, "slot-seconds"),
        ),
        (
            "Drafter training",
            "whole optimiser steps inside each RL step",
            _columns(records, _DRAFTER_STEPS, "optimiser steps")
            if any(one.drafter_steps for one in records)
            else empty("the drafter was not trained in this run"),
        ),
    ]


def _policy_charts(records: Records) -> list[Chart]:
    solved = [one for one in records if one.groups_solved]
    timed = [one for one in records if any(key in one.policy for key in _POLICY_PARTS.values())]
    mean, largest, k3, *weights = MISMATCH.values()
    return [
        *(_alone(records, one) for one in (LOSS, ENTROPY, DIVERGENCE, GRADIENT)),
        (
            "Groups solved",
            "groups by the solved samples: all or none of them teach nothing",
            _columns(solved, _GROUPS, "groups"),
        ),
        _alone(records, TRUNCATED),
        (AGE.title, "trained trajectories by their age in policy versions", _staleness(records)),
        (mean.title, f"{_GAP}: mean and largest", _lines(records, mean, largest)),
        ("Gap by age", f"{_OF_ONE} lag", split(records, "policy", f"{_BY}lag=")),
        ("Gap by arm", f"{_OF_ONE} arm", split(records, "policy", f"{_BY}arm=")),
        ("Gap by numbers", f"{_OF_ONE} number format", split(records, "policy", f"{_BY}numbers=")),
        _alone(records, k3),
        (
            "Weight of the tokens",
            "effective sample size, clipped and masked tokens, as shares",
            _lines(records, *weights),
        ),
        (
            "Where the policy step's time went",
            "seconds of the wait for the batch, and of each part of the step",
            _columns(timed, _POLICY_TIME, "seconds"),
        ),
        (
            "Exactness audit",
            "mean |log-prob of the trainer - of the engine| of audited tokens, by path, nats",
            split(records, "policy", AUDIT_GAP),
        ),
    ]


def split(
    records: Records, field: str, prefix: str = "", *, unit: str = "nats", smooth: int = 0
) -> str:
    """A line for each key of a map of the record that begins with `prefix`."""
    names = {name for one in records for name in getattr(one, field) if name.startswith(prefix)}
    series = []
    for i, name in enumerate(sorted(names, key=lambda name: (len(name), name))[:_LINES]):
        points = Measure("", "", unit, _entry(field, name, NAN)).points(records)
        shown = running_mean(points, smooth) if smooth else points
        series.append(Series(name.removeprefix(prefix), shown, f"c{i}"))
    return line_chart(series, y_label=unit)


def _lines(records: Records, *measures: Measure) -> str:
    """A line for each figure, over the axes of the first."""
    first = measures[0]
    series = [
        Series(one.label or one.title.lower(), one.points(records), f"c{i}")
        for i, one in enumerate(measures)
    ]
    return line_chart(series, y_label=first.unit, y_min=first.y_min, y_max=first.y_max)


def _alone(records: Records, measure: Measure) -> Chart:
    return measure.title, measure.note, _lines(records, measure)


def _columns(records: Records, parts: Iterable[tuple[str, str, Of]], unit: str) -> str:
    """A column for each step, stacked from parts: (name, colour, figure)."""
    names, colors, figures = zip(*parts, strict=True)
    columns = [(float(one.step + 1), [of(one) for of in figures]) for one in records]
    return stacked_columns(names, columns, colors=colors, y_label=unit)


def evaluated(history: RunHistory, kind: str) -> list[tuple[float, float]]:
    """(finished steps, value) of an evaluation."""
    return [(float(step), value) for step, value in history.evaluated(kind)]


def _learning(history: RunHistory) -> str:
    rewards, passed = REWARD.points(history.records), evaluated(history, history.widest_pass)
    series = [
        Series("reward of a step", rewards, "c0", faint=True),
        Series("reward", running_mean(rewards, SMOOTH), "c0"),
        Series("held-out accuracy", evaluated(history, ACCURACY), "c1", dots=True),
        Series(f"held-out {history.widest_pass}", passed, "c2", dots=True),
    ]
    return line_chart(series, y_label="reward and accuracy", y_min=0.0, y_max=1.0)


def _acceptance(history: RunHistory) -> str:
    live, probe = ACCEPTANCE.points(history.records), evaluated(history, PROBE)
    series = [Series("live", live, "c0"), Series("probe", probe, "c2", dots=True)]
    return line_chart(series, y_label=ACCEPTANCE.unit, marks=_swaps(history.records))


def _by_arm(records: Records) -> str:
    """The arms that drafted most, in the order of their names."""
    rounds: Counter[str] = Counter()
    for one in records:
        rounds.update(one.arm_drafted_rounds)
    series = []
    for i, arm in enumerate(sorted(arm for arm, _ in rounds.most_common(_ARMS))):
        drafted, tokens = _entry("arm_drafted_rounds", arm), _entry("arm_round_tokens", arm)
        points = [(float(one.step + 1), _divided(tokens(one), drafted(one))) for one in records]
        series.append(Series(arm, points, f"c{i}"))
    return line_chart(series, y_label=ACCEPTANCE.unit, marks=_swaps(records))


def _swaps(records: Records) -> list[float]:
    """Steps served by another drafter than the step before."""
    return [
        float(later.step + 1)
        for earlier, later in pairwise(records)
        if earlier.versions.drafter != later.versions.drafter
    ]


def _speed(records: Records) -> str:
    points = SPEED.points(records)
    series = [
        Series(SPEED.label, points, "c0", faint=True),
        Series("tokens/s", running_mean(points, SMOOTH), "c0"),
    ]
    return line_chart(series, y_label=SPEED.unit, y_min=SPEED.y_min)


def _arms(records: Records) -> str:
    names = sorted(
        {arm for one in records for arm in one.arm_rounds}, key=lambda n: (n != "off", n)
    )
    drafting = [name for name in names if name != "off"]  # in the colours of acceptance by arm

    def share(arm: str) -> Of:
        return lambda one: one.arm_rounds.get(arm, 0) / sum(one.arm_rounds.values())

    parts = [
        (name, "c7" if name == "off" else f"c{drafting.index(name)}", share(name))
        for name in names[:_ARMS]
    ]
    used = [one for one in records if sum(one.arm_rounds.values())]
    return _columns(used, parts, "share of rounds") if used else empty("nothing was measured")


def _staleness(records: Records) -> str:
    lags = sorted({lag for one in records for lag in one.staleness}, key=int)[:_ARMS]
    if lags in ([], ["0"]):
        return empty("every trajectory was trained at the version that drew it")
    parts = [(f"lag {lag}", f"c{i}", _entry("staleness", lag)) for i, lag in enumerate(lags)]
    return _columns(records, parts, "trajectories")
