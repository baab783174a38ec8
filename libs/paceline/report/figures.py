"""Draws the charts of a run by RL step; charts.toml describes them.

A figure that a step did not measure is a gap in its line.
"""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from paceline.report import charts
from paceline.report.charts import Series
from paceline.report.journal import PROBE, RunHistory
from paceline.v1.coordinator_pb2 import StepRecord

_NAN = float("nan")
_SMOOTH = 10
_LINES = 7
"""Maximum number of lines in one chart: one colour each."""
_GREY = frozenset(("off", "idle", "rest"))
AUDIT_GAP = "audit_gap/"


Of = Callable[[StepRecord], float]
"""A figure of a step; NaN if the step did not measure it."""


class OtherRun(NamedTuple):
    """A run that is shown beside another one."""

    run_id: str
    history: RunHistory
    settings: Sequence[tuple[str, str, str]]  # that differ: key, value here, value there


class Chart(NamedTuple):
    """Lines or columns by RL step; charts.toml explains the fields."""

    title: str
    note: str
    figures: Sequence[str] = ()
    map: str = ""
    prefix: str = ""
    per: str = ""
    evaluations: Sequence[str] = ()
    stacked: bool = False
    smooth: bool = False
    swaps: bool = False

    def draw(self, history: RunHistory, other: OtherRun | None = None) -> str:
        """The drawing as SVG; empty if nothing was measured. Lines of the other run are dashed, in
        the colour of their line here.
        """
        series = [
            replace(one, color="c7" if one.name in _GREY else f"c{i}")
            for i, one in enumerate(self._lines(history)[:_LINES])
        ]
        if self.stacked:
            return charts.stacked_columns(series, y_label=self.title)
        lines = [one for one in series if self.smooth and not one.dots]
        raw = [replace(one, name=f"{one.name} of a step", faint=True) for one in lines]
        colors = {one.name: f"{one.color} other" for one in series}
        if other:
            series += [
                replace(one, name=f"{one.name} of {other.run_id}", color=colors[one.name])
                for one in self._lines(other.history)
                if one.name in colors
            ]
        if self.smooth:
            series = raw + [one if one.dots else _smoothed(one) for one in series]
        marks = _swaps(history.records) if self.swaps else ()
        return charts.line_chart(series, y_label=self.title, marks=marks)

    def _lines(self, history: RunHistory) -> list[Series]:
        """The lines of figures, then of keys, then the evaluations by finished steps."""
        found: dict[str, Of] = {_label(one): partial(_value, path=one) for one in self.figures}
        found |= {key.removeprefix(self.prefix): self._of(key) for key in self._keys(history)}
        lines = [
            Series(name, [(one.step + 1.0, of(one)) for one in history.records])
            for name, of in found.items()
        ]
        for kind in self.evaluations:
            name = history.widest_pass if kind == "widest_pass" else kind
            points = [(float(steps), value) for steps, value in history.evaluated(name)]
            label = "probe" if name == PROBE else f"held-out {name}"
            lines += [Series(label, points, dots=True)] if name else []
        return lines

    def _keys(self, history: RunHistory) -> Iterator[str]:
        """Keys of the map in any step that begin with the prefix."""
        keys = {key for one in history.records if self.map for key in getattr(one, self.map)}
        for key in sorted(keys, key=lambda key: (key in _GREY, len(key), key)):
            if key.startswith(self.prefix):
                yield key

    def _of(self, key: str) -> Of:
        """The figure of a key: its value, or its share of the map or part of another map."""

        def value(record: StepRecord) -> float:
            whole = 1.0
            if self.per == self.map:
                whole = sum(getattr(record, self.map).values())
            elif self.per:
                whole = getattr(record, self.per).get(key, 0)
            return _ratio(_value(record, f"{self.map}/{key}"), whole)

        return value


def _smoothed(series: Series) -> Series:
    return replace(series, points=charts.running_mean(series.points, _SMOOTH))


def _swaps(records: Sequence[StepRecord]) -> list[float]:
    """Steps served by another drafter than the step before."""
    return [
        float(later.step + 1)
        for earlier, later in pairwise(records)
        if earlier.versions.drafter != later.versions.drafter
    ]


def _quantile(which: int) -> Of:
    """One of the three quantiles of the response lengths: median, 90th percentile, longest."""
    return lambda one: float(dict(enumerate(one.response_length_quantiles)).get(which, _NAN))


def _rest(one: StepRecord) -> float:
    return max(0.0, one.step_s - one.rollout_s - one.policy_s - one.preempt_wait_s)


_COMPUTED: dict[str, Of] = {
    "reward": lambda one: one.reward_mean,
    "live": lambda one: one.accept_length or _NAN,
    "tokens/s": lambda one: _ratio(one.response_tokens, one.rollout_s) or _NAN,
    "median": _quantile(0),
    "90th percentile": _quantile(1),
    "longest": _quantile(2),
    "rest": _rest,
}
"""Figures that are no field of the record, by label."""


def _label(path: str) -> str:
    """The name of a figure's line."""
    last = path.rpartition("/")[2].removesuffix("_s").replace("_", " ")
    return path if path in _COMPUTED else last


def _value(record: StepRecord, path: str) -> float:
    """The figure at a path in the record, such as "policy/loss", or a computed one."""
    if path in _COMPUTED:
        return _COMPUTED[path](record)
    field, _, key = path.partition("/")
    value = getattr(record, field)
    return float(value.get(key, _NAN) if key else value)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else _NAN


_DESCRIBED = tomllib.loads(Path(__file__).with_name("charts.toml").read_text(encoding="utf-8"))
CHARTS = tuple(Chart(**one) for one in _DESCRIBED["chart"])
