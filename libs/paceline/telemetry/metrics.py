"""Declares metrics and records their points with the process's meter.

A metric is declared once, in its service's `metrics.py`; docs/metrics.md is written from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from opentelemetry.metrics import Meter, MeterProvider, NoOpMeterProvider

SCOPE = "paceline"
Labels = dict[str, str | float]


@dataclass(frozen=True, slots=True, eq=False)
class Metric(ABC):
    """What is measured, under the name that OpenTelemetry exports.

    unit: OpenTelemetry's, e.g. s, 1 or {token}.
    """

    name: str
    unit: str
    labels: tuple[str, ...]
    meaning: str

    def record(self, value: float = 1, /, **labels: str | float) -> None:
        """One point, with the process's meter."""
        if self not in _Meter.instruments:
            about = {"name": self.name, "unit": self.unit, "description": self.meaning}
            _Meter.instruments[self] = self.instrument(_Meter.meter, about)
        _Meter.instruments[self](value, labels)

    @abstractmethod
    def instrument(self, meter: Meter, about: dict[str, Any]) -> Callable[..., None]:
        """What takes a value and its labels."""


class Counter(Metric):
    """Grows by what is recorded."""

    def instrument(self, meter: Meter, about: dict[str, Any]) -> Callable[..., None]:
        return meter.create_counter(**about).add


class UpDownCounter(Metric):
    """Grows and shrinks by what is recorded."""

    def instrument(self, meter: Meter, about: dict[str, Any]) -> Callable[..., None]:
        return meter.create_up_down_counter(**about).add


class Gauge(Metric):
    """Is what was recorded last."""

    def instrument(self, meter: Meter, about: dict[str, Any]) -> Callable[..., None]:
        return meter.create_gauge(**about).set


@dataclass(frozen=True, slots=True, eq=False)
class Histogram(Metric):
    """How values are spread over the boundaries; none: OpenTelemetry's."""

    boundaries: tuple[float, ...] = ()

    def instrument(self, meter: Meter, about: dict[str, Any]) -> Callable[..., None]:
        bounds = self.boundaries or None
        return meter.create_histogram(**about, explicit_bucket_boundaries_advisory=bounds).record


class _Meter:
    """The process's meter, which does nothing before `setup`, and what was made with it."""

    meter: Meter = NoOpMeterProvider().get_meter(SCOPE)
    instruments: ClassVar[dict[Metric, Callable[..., None]]] = {}


def use_meter(provider: MeterProvider) -> None:
    """Record all metrics with this provider from now on."""
    _Meter.meter = provider.get_meter(SCOPE)
    _Meter.instruments = {}
