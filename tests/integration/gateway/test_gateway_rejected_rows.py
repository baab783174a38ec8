"""Rows of rejected drafts on their way from an engine worker through the ring and Redis to whoever
reads a batch.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from rejected_oracle import contexts_of_batch, last_states
from transformers import AutoModelForCausalLM

from paceline.errors import MissingCapability
from paceline.local.patience import patient
from paceline.models.config import read_config
from paceline.services.drafter_trainer.rows.sample import sample_from
from paceline.streams import FeatureBatch, RedisStream, decode_features, run_key
from paceline.tensors import as_numpy
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

POLICY = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
ARM = "eagle:4_3_10"


async def batches_of(client: redis.asyncio.Redis, run_id: str, count: int) -> list[FeatureBatch]:
    """The first `count` batches of the features stream, waited for."""
    stream = RedisStream(client, run_key(run_id, "features"))
    await stream.create_group("test")
    found: list[FeatureBatch] = []
    async with asyncio.timeout(patient(15)):
        while len(found) < count:
            found += [
                decode_features(e.fields, e.payload)
                for e in await stream.read("test", "c", count, 1.0)
            ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rejected", "layers"), [(True, []), (False, []), (True, [2, 6])])
async def test_batches_hold_rejected_rows_when_asked_and_their_states_are_those_of_transformers(
    rejected: bool,
    layers: list[int],
    serve_gateway: Any,
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
) -> None:
    settings = {
        "model": str(POLICY),
        "drafter": "eagle",
        "trajectories": True,
        "redis": {"durable_url": redis_url},
        "run": {"id": run_id},
        "features": {"dtype": "float32", "rejected": rejected, "layers": layers},
        "speculation": {"arms": [ARM], "forced_arm": ARM},
        "engine": {
            "kind": "embedded",
            "workers": 1,
            "max_sequence_tokens": 64,
            "embedded": {"verify_budget": False},
        },
    }
    async with serve_gateway(**settings) as served:
        request = served.tasks_request(purpose=tpb.PURPOSE_TRAIN, capture=True)
        samples = [
            one.sample
            async for one in served.stub.RunTasks(request, timeout=patient(60))
            if one.HasField("sample")
        ]
        batches = await batches_of(redis_client, run_id, len(samples))
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
    assert status.feature_rows_dropped == 0
    assert len(batches) == 4
    for batch in batches:
        assert batch.layers == ",".join([*map(str, layers), "last"])
        assert sample_from(batch, read_config(POLICY)).hidden.shape == (
            batch.rows,
            128 * (len(layers) + 1),
        )
    if not rejected:
        assert [batch.rejected for batch in batches] == [None] * 4
        assert status.workers[0].health.rejected_left_out == 0
        return
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32").eval()
    compared = 0
    for batch in batches:
        drafts = batch.rejected
        assert drafts is not None
        contexts = contexts_of_batch(
            drafts.parents.tolist(), drafts.token_ids.tolist(), batch.token_ids.tolist()
        )
        assert [len(one) - 1 for one in contexts] == drafts.positions.tolist()
        np.testing.assert_allclose(
            as_numpy(drafts.hidden), last_states(model, contexts, layers), rtol=0, atol=1e-4
        )
        compared += len(contexts)
    assert compared > 10
    assert status.workers[0].health.rejected_left_out > 0


async def test_an_engine_without_rejected_rows_is_refused_by_name_and_setting(
    serve_gateway: Any, redis_url: str, run_id: str
) -> None:
    settings = {"trajectories": True, "redis": {"durable_url": redis_url}, "run": {"id": run_id}}
    with pytest.raises(
        MissingCapability,
        match=r"scripted.*rejected_rows.*engine\.kind=embedded.*features\.rejected",
    ):
        async with serve_gateway(features={"rejected": True}, **settings):
            pass
