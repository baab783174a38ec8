"""The drafter trainer's instruments for a micro-batch, a decision and a lease."""

from __future__ import annotations

from metric_points import points
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer import metrics
from paceline.services.drafter_trainer.learn.learner import MicroResult


def test_acceptance_is_told_by_position_role_and_temperature(
    metric_reader: InMemoryMetricReader,
) -> None:
    decision = m.Judged(
        "kept",
        "eagle",
        2,
        candidate=1.75,
        serving=1.5,
        policy_version=7,
        temperature=0.5,
        survival=[0.5, 0.25],
        serving_survival=[0.5, 0.0],
    )
    metrics.record_decision(decision)
    metrics.record_decision(m.Judged("frozen", "eagle", 2))
    assert points(metric_reader, metrics, "decisions") == {
        ("kept", "eagle"): 1,
        ("frozen", "eagle"): 1,
    }
    assert points(metric_reader, metrics, "judged_policy_version") == {("eagle",): 7}
    assert points(metric_reader, metrics, "survival")["eagle", 2, "candidate", 0.5] == 0.25
    assert points(metric_reader, metrics, "accept_length") == {
        ("eagle", "candidate", 0.5): 1.75,
        ("eagle", "serving", 0.5): 1.5,
    }


def test_loss_terms_samples_and_slot_seconds_are_counted(
    metric_reader: InMemoryMetricReader,
) -> None:
    for _ in range(2):
        MicroResult(0.75, 40, True, {"token": 0.5}).record("lstm", samples=3)
    assert points(metric_reader, metrics, "samples") == {("lstm",): 6}
    assert points(metric_reader, metrics, "positions") == {("lstm",): 80}
    assert points(metric_reader, metrics, "loss") == {
        ("lstm", "total"): 0.75,
        ("lstm", "token"): 0.5,
    }
    metrics.SLOT_TIME.record(3.0)
    metrics.PREEMPTION_LATENCY.record(0.25)
    assert points(metric_reader, metrics, "slot_time") == {(): 3.0}
    assert points(metric_reader, metrics, "preemption_latency") == {(): 0.25}
