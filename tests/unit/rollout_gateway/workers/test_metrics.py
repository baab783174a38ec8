"""Metrics of engines: one set of names, each round and request counted once."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from structlog.testing import capture_logs

from paceline.messages import to_message
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.engines.nouns import RoundSplit
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.metrics import EngineMetrics
from paceline.telemetry.metrics import Metric
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

DECLARED = {one.name: one for one in vars(metrics).values() if isinstance(one, Metric)}


def position_of(point: Any) -> int:
    return int(point.attributes["position"])


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    found = data.resource_metrics[0].scope_metrics[0].metrics
    for metric in found:
        for point in metric.data.data_points:
            assert set(point.attributes or {}) == set(DECLARED[metric.name].labels), metric.name
    return {metric.name: list(metric.data.data_points) for metric in found}


def test_a_request_gives_first_token_time_per_token_and_acceptance_length(
    metric_reader: InMemoryMetricReader,
) -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)
    stats = tpb.SpeculationStats(
        drafted_rounds=2, drafted_round_tokens=5, proposed_at=[2, 2, 1], accepted_at=[2, 1, 0]
    )
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
    generation.ended_s = generation.queued_s + 0.6
    EngineMetrics("sglang").record_end(generation)
    found = points(metric_reader)
    assert found["paceline.engine.time_to_first_token"][0].sum == pytest.approx(0.2)
    assert found["paceline.engine.time_per_output_token"][0].sum == pytest.approx(0.1)
    assert found["paceline.engine.time_per_output_token"][0].explicit_bounds[3] == 0.015
    assert found["paceline.engine.accept_length"][0].sum == pytest.approx(2.5)
    by_position = {
        name: [
            point.value
            for point in sorted(found[f"paceline.engine.drafts_{name}"], key=position_of)
        ]
        for name in ("proposed", "accepted")
    }
    assert by_position == {"proposed": [2, 2, 1], "accepted": [2, 1, 0]}
    assert dict(found["paceline.engine.accept_length"][0].attributes) == {"engine": "sglang"}


def test_a_request_of_one_token_has_no_time_per_output_token(
    metric_reader: InMemoryMetricReader,
) -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)
    assert generation.time_per_output_token_s is None
    generation.accept(
        pb.TokenChunk(request_id=1, token_ids=[4], finish_reason=tpb.FINISH_REASON_STOP)
    )
    EngineMetrics("sglang").record_end(generation)
    found = points(metric_reader)
    assert "paceline.engine.time_to_first_token" in found
    assert "paceline.engine.time_per_output_token" not in found


def look(
    seen: EngineMetrics, pid: int = 1, *, worker: int = 0, tflops: float = 0.0, **facts: Any
) -> None:
    """Record a worker's figures at one look, as they arrive over the wire."""
    ready = pb.WorkerReady(worker_index=worker, pid=pid, device_tflops=tflops)
    seen.record_health(ready, pb.WorkerHealth(**facts))


def test_rounds_of_an_arm_are_counted_once_and_from_zero_after_a_restart(
    metric_reader: InMemoryMetricReader,
) -> None:
    seen = EngineMetrics("embedded")
    for pid, pulls in (
        (7, 10),
        (7, 10),
        (7, 14),
        (7, 12),
        (8, 20),
    ):  # 12: overtaken; 8: a new process
        look(
            seen,
            pid,
            arms=(pb.ArmStats(arm="off", batch_group=5, pulls=pulls, mean_tokens_per_s=1.0),),
        )
    (point,) = points(metric_reader)["paceline.engine.arm_rounds"]
    assert point.value == 34
    assert dict(point.attributes) == {"engine": "embedded", "arm": "off", "batch_group": 5}


def test_tokens_per_second_are_those_of_busy_seconds_since_the_last_look(
    metric_reader: InMemoryMetricReader,
) -> None:
    seen = EngineMetrics("embedded")
    for worker, tokens, busy in ((0, 100, 2.0), (0, 400, 4.0), (0, 400, 4.0), (1, 30, 1.0)):
        look(seen, worker=worker, tflops=0.5, tokens_emitted=tokens, busy_s=busy)
    found = {
        name: {p.attributes["worker"]: p.value for p in each}
        for name, each in points(metric_reader).items()
    }
    del found["paceline.engine.requests"]
    assert found == {
        "paceline.engine.tokens": {0: 400, 1: 30},
        "paceline.engine.busy_time": {0: 4.0, 1: 1.0},
        "paceline.engine.tokens_per_second": {0: 150.0, 1: 30.0},
        "paceline.engine.device_tflops": {0: 0.5, 1: 0.5},
        "paceline.engine.tokens_per_second_per_tflops": {0: 300.0, 1: 60.0},
    }


def test_a_device_that_was_not_measured_has_no_tokens_per_second_per_tflops(
    metric_reader: InMemoryMetricReader,
) -> None:
    look(EngineMetrics("scripted"), tokens_emitted=100, busy_s=2.0)
    found = points(metric_reader)
    assert found["paceline.engine.tokens_per_second"][0].value == 50
    assert not {
        "paceline.engine.device_tflops",
        "paceline.engine.tokens_per_second_per_tflops",
    } & set(found)


def test_seconds_of_rounds_are_counted_by_stage_over_all_workers_and_lives(
    metric_reader: InMemoryMetricReader,
) -> None:
    seen = EngineMetrics("embedded")
    look(seen, split=to_message(RoundSplit(2, 12, 0.5, 0.25, 1.0, 0.125, 0.0625), pb.RoundSplit))
    before = seen.split
    look(seen, split=to_message(RoundSplit(3, 18, 1.0, 0.5, 2.0, 0.25, 0.125), pb.RoundSplit))
    look(
        seen, worker=1, split=to_message(RoundSplit(10, 10, 0.0, 0.0, 4.0, 0.0, 0.0), pb.RoundSplit)
    )
    look(seen, pid=2, split=to_message(RoundSplit(1, 6, 0.25, 0.0, 0.5, 0.0, 0.0), pb.RoundSplit))
    found = points(metric_reader)
    stages = {
        point.attributes["stage"]: point.value for point in found["paceline.engine.round_time"]
    }
    assert stages == {"prefill": 1.25, "draft": 0.5, "forward": 6.5, "sample": 0.25, "keep": 0.125}
    assert found["paceline.engine.rounds"][0].value == 14
    assert found["paceline.engine.verified_tokens"][0].value == 34
    assert seen.split - before == RoundSplit(12, 22, 0.75, 0.25, 5.5, 0.125, 0.0625)


def test_regret_is_told_by_worker(metric_reader: InMemoryMetricReader) -> None:
    arms = (
        pb.ArmStats(arm="off", batch_group=1, pulls=10, mean_tokens_per_s=50.0),
        pb.ArmStats(arm="eagle:5_1_6", batch_group=1, pulls=30, mean_tokens_per_s=100.0),
    )
    look(EngineMetrics("embedded"), worker=3, arms=arms)
    (point,) = points(metric_reader)["paceline.engine.regret"]
    assert point.value == pytest.approx(0.125)
    assert dict(point.attributes) == {"engine": "embedded", "worker": 3}


def test_a_dead_drafter_is_counted_and_logged_once_whatever_its_arms(
    metric_reader: InMemoryMetricReader,
) -> None:
    seen = EngineMetrics("embedded")

    def tell(*deaths: int) -> None:
        names = ("off", "eagle:3_1_4", "eagle:5_1_6")
        arms = [
            pb.ArmStats(arm=arm, batch_group=5, pulls=20, drafter_deaths=died)
            for arm, died in zip(names, deaths, strict=True)
        ]
        look(seen, worker=2, arms=tuple(arms))

    with capture_logs() as lines:
        tell(0, 0, 0)
        assert lines == []
        tell(0, 1, 1)
        tell(0, 1, 1)
    (line,) = lines
    where = {"worker": 2, "speculator": "eagle", "batch_group": 5}
    assert line["log_level"] == "warning"
    assert {key: line[key] for key in where} == where
    tell(0, 3, 3)
    (point,) = points(metric_reader)["paceline.engine.dead_drafters"]
    assert (point.value, dict(point.attributes)) == (3, {"engine": "embedded", **where})


def test_reuse_of_prompts_is_counted_once_and_from_zero_after_a_restart(
    metric_reader: InMemoryMetricReader,
) -> None:
    seen = EngineMetrics("embedded")
    look(seen, worker=1)  # nothing has ended: no rate
    for pid, stats in (
        (
            1,
            pb.PrefixStats(
                prompt_tokens=100, reused_tokens=20, lookups=4, lookup_s=0.5, copy_s=1.0
            ),
        ),
        (
            1,
            pb.PrefixStats(
                prompt_tokens=100, reused_tokens=20, lookups=4, lookup_s=0.5, copy_s=1.0
            ),
        ),
        (
            1,
            pb.PrefixStats(
                prompt_tokens=300, reused_tokens=80, lookups=6, lookup_s=0.75, copy_s=1.5
            ),
        ),
        (
            2,
            pb.PrefixStats(
                prompt_tokens=40, reused_tokens=30, lookups=1, lookup_s=0.25, copy_s=0.5
            ),
        ),
    ):
        look(seen, pid, prefixes=stats)
    found = points(metric_reader)
    sums = {
        name: found[f"paceline.engine.{name}"][0].value
        for name in ("prompt_tokens", "kv_hit_tokens", "kv_lookups")
    }
    assert sums == {"prompt_tokens": 340, "kv_hit_tokens": 110, "kv_lookups": 7}
    access = {
        point.attributes["part"]: point.value for point in found["paceline.engine.kv_access_time"]
    }
    assert access == {"lookup": 1.0, "copy": 2.0}
    (rate,) = found["paceline.engine.kv_hit_rate"]
    assert rate.value == 0.75
    assert dict(rate.attributes) == {"engine": "embedded", "worker": 0}
