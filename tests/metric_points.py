"""Reads the values recorded by a service's instruments."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.telemetry.metrics import Metric


def all_points(reader: InMemoryMetricReader) -> dict[tuple[str, Any], float]:
    """(Metric, labels) -> value or sum, of all recorded points."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    (scope,) = data.resource_metrics[0].scope_metrics
    return {
        (metric.name, tuple(sorted((point.attributes or {}).items()))): getattr(
            point, "value", getattr(point, "sum", 0)
        )
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def points(
    reader: InMemoryMetricReader, declared: ModuleType, name: str
) -> dict[tuple[Any, ...], Any]:
    """Label values, in the order of the labels' names -> value or sum. The module declares the
    metric under `name` in capitals.
    """
    wanted: Metric = getattr(declared, name.upper())
    data = reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    (metric,) = [one for one in scope.metrics if one.name == wanted.name]
    found = {}
    for point in metric.data.data_points:
        labels: dict[str, Any] = dict(point.attributes or {})
        assert set(labels) == set(wanted.labels)
        said = getattr(point, "value", None) or getattr(point, "sum", 0)
        found[tuple(value for _, value in sorted(labels.items()))] = said
    return found
