"""Rows that the publisher keeps, drops and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from counted import counted
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from watched_stream import WatchedStream

from paceline.local.patience import patient
from paceline.services.rollout_gateway import features
from paceline.services.rollout_gateway.config import FeaturesConfig
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, row_dtype
from paceline.services.rollout_gateway.features import FeaturePublisher, Origin
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.streams import RedisStream, decode_features, run_key
from paceline.v1 import engine_pb2 as pb

TOKENS = [10, 11, 12, 13, 14, 15]


def rows(*positions: int, version: int = 0, tokens: list[int] = TOKENS) -> RowArray:
    made = np.zeros(len(positions), dtype=row_dtype(4))
    made["request_id"] = 1
    made["position"] = positions
    made["token_id"] = [tokens[position] for position in positions]
    made["policy_version"] = version
    return made


def origin() -> Origin:
    return Origin("run", 0, "s", "g", 0.7, 2, TOKENS)


def publisher() -> FeaturePublisher:
    client = redis.asyncio.Redis(port=1)  # never reached: nothing is started
    return FeaturePublisher(client, FeaturesConfig(), lambda version: f"head-{version}")


async def test_a_full_queue_drops_the_oldest_batch_and_counts_its_rows(
    metric_reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "QUEUE_BATCHES", 1)
    sender = publisher()
    for _ in range(3):
        sender.expect(1)
        sender.add_rows(rows(0, 1, 2, 3, 4))
        sender.publish(1, origin())
    assert sender.rows_dropped == 10
    assert counted(metric_reader, "paceline.gateway.feature_rows_dropped") == 10


async def test_sessions_that_end_together_travel_together(
    redis_client: redis.asyncio.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    arrived = asyncio.Event()
    append = RedisStream.append_all

    async def counted_append(stream: RedisStream, entries: Sequence[Any]) -> None:
        await append(stream, entries)
        sent.append(len(entries))
        arrived.set()

    monkeypatch.setattr(RedisStream, "append_all", counted_append)
    sender = FeaturePublisher(redis_client, FeaturesConfig(), lambda version: f"head-{version}")
    sender.start(RowLayout.last(2))
    for session in ("s", "t", "u"):
        sender.expect(1)
        sender.add_rows(rows(0, 1, 2, 3, 4))
        sender.publish(1, replace(origin(), run_id=run_id, session_id=session))
    async with asyncio.timeout(patient(10)):
        await arrived.wait()
    await sender.stop()
    assert (sent, sender.batches, sender.rows_dropped) == ([3], 3, 0)
    stream = WatchedStream(redis_client, run_key(run_id, "features"))
    entries = [decode_features(one.fields, one.payload) for one in await stream.history()]
    assert [one.session_id for one in entries] == ["s", "t", "u"]
    await stream.close()


async def test_rows_beyond_the_budget_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(features, "GATHER_BYTES", rows(0, 1).nbytes)
    sender = publisher()
    sender.expect(1)
    sender.add_rows(rows(0, 1))
    sender.add_rows(rows(2))
    assert sender.rows_dropped == 1
    sender.forget(1)
    sender.expect(1)
    sender.add_rows(rows(0, 1))
    assert sender.rows_dropped == 1


async def test_rows_nobody_asked_for_are_ignored() -> None:
    sender = publisher()
    sender.add_rows(rows(0, 1))
    sender.publish(1, origin())
    assert sender.rows_dropped == 0


async def test_a_request_that_is_not_recorded_leaves_no_rows() -> None:
    sender = publisher()
    sender.expect(1)
    sender.add_rows(rows(0, 1))
    router = SimpleNamespace(abort=lambda generation: None)
    gateway: Any = SimpleNamespace(router=router, publisher=sender)
    Gateway.abort(gateway, Generation(pb.EngineRequest(request_id=1), 0))
    assert (sender._gathered, sender._gathered_bytes) == ({}, 0)
