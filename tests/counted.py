"""Counts recorded by the metrics of the test's own process."""

from __future__ import annotations

from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint


def counted(reader: InMemoryMetricReader, name: str, **labels: str) -> float:
    """Sum of a counter's points with these labels; 0 without points."""
    data = reader.get_metrics_data()
    return sum(
        point.value
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if metric.name == name
        and isinstance(point, NumberDataPoint)
        and labels.items() <= dict(point.attributes or {}).items()
    )
