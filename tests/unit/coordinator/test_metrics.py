"""The coordinator's exported metrics of a step."""

from __future__ import annotations

import pytest
from metric_points import all_points, points
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.services.coordinator import metrics
from paceline.telemetry.metrics import use_meter
from paceline.v1.coordinator_pb2 import StepRecord
from paceline.v1.trajectory_pb2 import VersionSet

NO_METRIC_OF_A_STEP = {
    "step": "counted by paceline.coordinator.steps",
    "trace_id": "a name",
    "tokens_hash": "a name",
    "finished_at_s": "the time itself",
    "arm_rounds": "paceline.engine.arm_rounds",
    "arm_drafted_rounds": "paceline.engine.arm_accept_length",
    "arm_round_tokens": "paceline.engine.arm_accept_length",
    "policy": "paceline.policy.figure",
    "staleness": "paceline.policy.staleness",
    "drafter_slot_s": "paceline.drafter.slot_time",
    "evaluations": "paceline.coordinator.evaluation, when one is over",
    "samples_unscored": "paceline.coordinator.samples",
    "quarantined": "paceline.gateway.quarantined",
}


def record_with(changed: str) -> StepRecord:
    """A record in which every figure differs from 0, and `changed` from the other records'."""
    record = StepRecord()
    for field in StepRecord.DESCRIPTOR.fields:
        value = 40 if field.name == changed else 20
        kind = str if field.type == field.TYPE_STRING else int
        if field.name == "versions":
            record.versions.policy, record.versions.drafter = value, value
        elif field.message_type is not None:
            getattr(record, field.name)["one"] = value
        elif field.is_repeated:
            getattr(record, field.name).extend([kind(value)] * 3)
        else:
            setattr(record, field.name, kind(value))
    return record


def recorded(record: StepRecord) -> dict[object, float]:
    reader = InMemoryMetricReader()
    use_meter(MeterProvider([reader]))
    metrics.record_step(record)
    return dict(all_points(reader))


@pytest.mark.parametrize("field", [one.name for one in StepRecord.DESCRIPTOR.fields])
def test_every_figure_of_a_steps_record_moves_a_metric_here_or_is_told_elsewhere(
    field: str, metric_reader: InMemoryMetricReader
) -> None:
    moves = recorded(record_with("")) != recorded(record_with(field))
    assert moves == (field not in NO_METRIC_OF_A_STEP)


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
    names = ("steps", "response_tokens", "step_time", "slot_time")
    figures = points(metric_reader, metrics, "figure")
    expected = {"reward/format": 0.75, "policy_version": 3, "drafter_version": 2}
    for name, value in (expected | {"accept_length": 2.25}).items():
        assert figures[name,] == value
    assert not [name for (name,) in figures if name.startswith(("policy/", "slot_s/"))]
    assert {name: points(metric_reader, metrics, name) for name in names} == {
        "steps": {(): 2},
        "response_tokens": {(): 800},
        "step_time": {("step",): 5.0, ("rollout",): 3.0, ("policy",): 1.5, ("preempt_wait",): 0.5},
        "slot_time": {("idle",): 1.0},
    }
