"""The exported metrics of a step."""

from __future__ import annotations

from metric_points import points
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.services.policy_trainer import metrics
from paceline.services.policy_trainer.messages import BatchFacts, Progress, StepFacts


def test_a_step_is_exported_with_all_that_it_measured(metric_reader: InMemoryMetricReader) -> None:
    figures = {"loss": 0.25, "behavior_gap/lag=2": 0.5, "seconds/batch_wait": 3.0}
    batch = BatchFacts(8, 90, {}, {}, 1, 0.5, 0.125)
    metrics.record_step(Progress(4, 3, 24, 0, batch, StepFacts(figures, train_s=2.0)))
    assert points(metric_reader, metrics, "figure") == {
        ("loss", "all"): 0.25,
        ("behavior_gap", "lag=2"): 0.5,
    }
    assert points(metric_reader, metrics, "steps") == {(): 1}
    assert points(metric_reader, metrics, "part_time") == {("train",): 2.0, ("batch_wait",): 3.0}
    assert points(metric_reader, metrics, "tokens_per_second") == {(): 45.0}
    assert points(metric_reader, metrics, "reward") == {("mean",): 0.5, ("std",): 0.125}
    assert points(metric_reader, metrics, "version") == {(): 4}
    assert points(metric_reader, metrics, "trained") == {
        ("trajectories",): 8,
        ("tokens",): 90,
        ("groups_without_variance",): 1,
    }
