"""Declares metrics and records their points with the process's meter.

A metric is declared once, in its service's `metrics.py`; docs/metrics.md is generated from there.
The docstring below a declaration is its meaning.
"""

import ast
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import ClassVar

from opentelemetry import metrics

SCOPE = "paceline"
Labels = dict[str, str | float]


@cache
def _meanings(file: str) -> dict[str, str]:
    """Meanings of the metrics that a module declares, by name."""
    statements = ast.parse(Path(file).read_text(encoding="utf-8")).body
    found = {}
    for declared, below in pairwise(statements):
        match declared, below:
            case (
                ast.Assign(value=ast.Call(args=[ast.Constant(value=str(name)), *_])),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Metric(ABC):
    """A measured quantity, under its exported OpenTelemetry name.

    unit: OpenTelemetry's, e.g. s, 1 or {token}.
    """

    name: str
    unit: str
    labels: tuple[str, ...] = ()
    # source of the declaration, two frames above this function
    file: str = field(default_factory=lambda: sys._getframe(2).f_code.co_filename, kw_only=True)

    @property
    def meaning(self) -> str:
        """The docstring below the declaration; empty inside a function."""
        return _meanings(self.file).get(self.name, "")

    def record(self, value: float = 1, /, **labels: str | float) -> None:
        """Records one point with the process's meter."""
        take = _Meter.instruments.get(self)
        if take is None:
            about = {"name": self.name, "unit": self.unit, "description": self.meaning}
            made = self.instrument(_Meter.meter, about)
            take = _Meter.instruments.setdefault(self, made)  # another thread may have been first
        take(value, labels)

    @abstractmethod
    def instrument(self, meter: metrics.Meter, about: Mapping[str, str]) -> Callable[..., None]:
        """A function that takes a value and its labels."""


class Counter(Metric):
    """Sum of the recorded values, which are not negative."""

    def instrument(self, meter: metrics.Meter, about: Mapping[str, str]) -> Callable[..., None]:
        return _Kept(meter.create_observable_counter, about).add


class UpDownCounter(Metric):
    """Sum of the recorded values of either sign."""

    def instrument(self, meter: metrics.Meter, about: Mapping[str, str]) -> Callable[..., None]:
        return _Kept(meter.create_observable_up_down_counter, about).add


class Gauge(Metric):
    """The value recorded last."""

    def instrument(self, meter: metrics.Meter, about: Mapping[str, str]) -> Callable[..., None]:
        return _Kept(meter.create_observable_gauge, about).set


@dataclass(frozen=True, slots=True, eq=False)
class Histogram(Metric):
    """Distribution of the recorded values over the boundaries; none: OpenTelemetry's."""

    boundaries: tuple[float, ...] = ()

    def instrument(self, meter: metrics.Meter, about: Mapping[str, str]) -> Callable[..., None]:
        bounds = self.boundaries or None
        return meter.create_histogram(**about, explicit_bucket_boundaries_advisory=bounds).record


class _Kept:
    """Values by labels until they are collected. A point costs one addition, a quarter of an SDK
    counter's cost; a rollout records about thirty points per sample.
    """

    def __init__(self, create: Callable[..., object], about: Mapping[str, str]) -> None:
        """`create`: the meter's function for an observable instrument."""
        self._values: dict[tuple[tuple[str, str | float], ...], float] = {}
        self._lock = Lock()  # points arrive from every thread
        create(**about, callbacks=[self.observations])  # a reader may call at once

    def add(self, value: float, labels: Labels) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + value

    def set(self, value: float, labels: Labels) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = value

    def observations(self, _: metrics.CallbackOptions) -> list[metrics.Observation]:
        """All values, for a reader."""
        with self._lock:
            return [
                metrics.Observation(value, dict(labels)) for labels, value in self._values.items()
            ]


class _Meter:
    """The process's meter, which does nothing before `setup`, and its instruments."""

    meter: metrics.Meter = metrics.NoOpMeterProvider().get_meter(SCOPE)
    instruments: ClassVar[dict[Metric, Callable[..., None]]] = {}


def use_meter(provider: metrics.MeterProvider) -> None:
    """Records all metrics with this provider from now on."""
    _Meter.meter = provider.get_meter(SCOPE)
    _Meter.instruments = {}
