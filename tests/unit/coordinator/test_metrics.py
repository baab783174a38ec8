"""What a step leaves in the coordinator's exported metrics."""

from __future__ import annotations

from metric_points import points
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from coordinator import metrics
from paceline.v1.coordinator_pb2 import StepRecord
from paceline.v1.trajectory_pb2 import VersionSet


def test_a_step_that_is_over_is_exported(metric_reader: InMemoryMetricReader) -> None:
    record = StepRecord(
        step=3,
        versions=VersionSet(seq=5, policy=3, drafter=2),
        response_tokens=400,
        rollout_s=1.5,
        policy_s=0.75,
        preempt_wait_s=0.25,
        step_s=2.5,
        accept_length=2.25,
        slot_s={"idle": 0.5},
        reward_parts={"format": 0.75},
    )
    metrics.record_step(record)
    metrics.record_step(record)
    names = ("steps", "response_tokens", "step_time", "version", "accept_length", "slot_time")
    assert points(metric_reader, metrics, "reward_part") == {("format",): 0.75}
    assert {name: points(metric_reader, metrics, name) for name in names} == {
        "steps": {(): 2},
        "response_tokens": {(): 800},
        "step_time": {("step",): 5.0, ("rollout",): 3.0, ("policy",): 1.5, ("preempt_wait",): 0.5},
        "version": {("policy",): 3, ("drafter",): 2},
        "accept_length": {(): 2.25},
        "slot_time": {("idle",): 1.0},
    }
