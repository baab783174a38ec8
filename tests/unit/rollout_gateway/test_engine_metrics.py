"""Metrics of engines: one set of names, each round and request counted once."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.trajectory import SpeculationStats, VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway import engine_metrics
from rollout_gateway.engine_metrics import EngineMetrics
from rollout_gateway.engines import wire
from rollout_gateway.engines.base import Load, PrefixStats
from rollout_gateway.generation import Generation


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> InMemoryMetricReader:
    made = InMemoryMetricReader()
    provider = MeterProvider([made])
    monkeypatch.setattr(engine_metrics, "meter", lambda: provider.get_meter("test"))
    return made


def position_of(point: Any) -> int:
    return int(point.attributes["position"])


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {metric.name: list(metric.data.data_points) for metric in metrics}


def test_a_request_gives_first_token_time_per_token_and_acceptance_length(reader: InMemoryMetricReader) -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)
    stats = tpb.SpeculationStats(drafted_rounds=2, drafted_round_tokens=5, proposed_at=[2, 2, 1], accepted_at=[2, 1, 0])
    generation.accept(
        pb.TokenChunk(
            request_id=1,
            token_ids=[4, 5, 6, 7, 8],
            behavior_logprobs=[-1.0] * 5,
            finish_reason=tpb.FINISH_REASON_LENGTH,
            time_to_first_token_s=0.2,
            speculation=stats,
        )
    )
    EngineMetrics("sglang").ended(generation, 0.6)
    found = points(reader)
    assert found["paceline.engine.time_to_first_token"][0].sum == pytest.approx(0.2)
    assert found["paceline.engine.time_per_output_token"][0].sum == pytest.approx(0.1)
    assert found["paceline.engine.time_per_output_token"][0].explicit_bounds[3] == 0.015
    assert found["paceline.engine.accept_length"][0].sum == pytest.approx(2.5)
    by_position = {
        name: [point.value for point in sorted(found[f"paceline.engine.drafts_{name}"], key=position_of)]
        for name in ("proposed", "accepted")
    }
    assert by_position == {"proposed": [2, 2, 1], "accepted": [2, 1, 0]}
    assert dict(found["paceline.engine.accept_length"][0].attributes) == {"engine": "sglang"}


def test_rounds_of_an_arm_are_counted_once_and_from_zero_after_a_restart(reader: InMemoryMetricReader) -> None:
    metrics = EngineMetrics("embedded")
    for pulls in (10, 10, 14, 3):  # the last is a new process
        metrics.arms(0, [pb.ArmStats(arm="off", batch_group=5, pulls=pulls)])
    (point,) = points(reader)["paceline.engine.arm_rounds"]
    assert point.value == 17
    assert dict(point.attributes) == {"engine": "embedded", "arm": "off", "batch_group": 5}


def health(stats: PrefixStats) -> pb.WorkerHealth:
    load = Load(
        running=0, waiting=0, tokens_emitted=0, busy_s=0, speculation=SpeculationStats(), arms=(), prefixes=stats
    )
    return wire.health_to(load, VersionSet())


def test_reuse_of_prompts_is_counted_once_and_from_zero_after_a_restart(reader: InMemoryMetricReader) -> None:
    metrics = EngineMetrics("embedded")
    metrics.prefixes(1, health(PrefixStats()).prefixes)  # nothing has ended: no rate
    for stats in (
        PrefixStats(100, 20, 4, 0.5, 1.0),
        PrefixStats(100, 20, 4, 0.5, 1.0),
        PrefixStats(300, 80, 6, 0.75, 1.5),
        PrefixStats(40, 30, 1, 0.25, 0.5),  # a new process
    ):
        metrics.prefixes(0, health(stats).prefixes)
    found = points(reader)
    sums = {
        name: found[f"paceline.engine.{name}"][0].value for name in ("prompt_tokens", "kv_hit_tokens", "kv_lookups")
    }
    assert sums == {"prompt_tokens": 340, "kv_hit_tokens": 110, "kv_lookups": 7}
    access = {point.attributes["part"]: point.value for point in found["paceline.engine.kv_access_time"]}
    assert access == {"lookup": 1.0, "copy": 2.0}
    (rate,) = found["paceline.engine.kv_hit_rate"]
    assert rate.value == 0.75
    assert dict(rate.attributes) == {"engine": "embedded", "worker": 0}
