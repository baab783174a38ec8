"""What the drafter trainer's instruments say of a micro-batch, a decision and a lease."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from drafter_trainer import messages as m
from drafter_trainer import metrics
from drafter_trainer.learn.learner import MicroResult


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    found = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[found])
    monkeypatch.setattr(metrics, "meter", lambda: provider.get_meter("test"))
    yield found
    provider.shutdown()


def points(reader: InMemoryMetricReader, name: str) -> dict[tuple[Any, ...], Any]:
    """Label values in the order of their names -> value."""
    data = reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    (metric,) = [one for one in scope.metrics if one.name == f"paceline.drafter.{name}"]
    return {
        tuple(value for _, value in sorted((point.attributes or {}).items())): getattr(
            point, "value", None
        )
        or getattr(point, "sum", 0)
        for point in metric.data.data_points
    }


def test_acceptance_is_told_by_position_bucket_role_and_temperature(
    reader: InMemoryMetricReader,
) -> None:
    told = metrics.TrainerMetrics()
    decision = m.Judged(
        1,
        "kept",
        "eagle",
        2,
        candidate=1.75,
        serving=1.5,
        policy_version=7,
        temperature=0.5,
        survival=[0.5, 0.25],
        serving_survival=[0.5, 0.0],
        lengths_by_bucket={"early": 2.0},
    )
    told.judged(decision)
    told.judged(m.Judged(1, "frozen", "eagle", 2))
    assert points(reader, "decisions") == {("kept", "eagle"): 1, ("frozen", "eagle"): 1}
    assert points(reader, "judged_policy_version") == {("eagle",): 7}
    assert points(reader, "survival")["eagle", 2, "candidate", 0.5] == 0.25
    conditional = points(reader, "conditional_acceptance")
    assert (conditional["eagle", 1, "serving", 0.5], conditional["eagle", 2, "candidate", 0.5]) == (
        0.5,
        0.5,
    )
    assert points(reader, "accept_length") == {
        ("all", "eagle", "candidate", 0.5): 1.75,
        ("all", "eagle", "serving", 0.5): 1.5,
        ("early", "eagle", "candidate", 0.5): 2.0,
    }


def test_loss_terms_samples_and_slot_seconds_are_counted(reader: InMemoryMetricReader) -> None:
    told = metrics.TrainerMetrics()
    for _ in range(2):
        told.learned("lstm", MicroResult(0.75, 40, True, {"token": 0.5}), samples=3)
    assert points(reader, "samples") == {("lstm",): 6}
    assert points(reader, "positions") == {("lstm",): 80}
    assert points(reader, "loss") == {("lstm", "total"): 0.75, ("lstm", "token"): 0.5}
    leases = metrics.LeaseMetrics()
    leases.held(2, 1.5)
    leases.preempted(0.25)
    assert points(reader, "slot_time") == {(): 3.0}
    assert points(reader, "preemption_latency") == {(): 0.25}
