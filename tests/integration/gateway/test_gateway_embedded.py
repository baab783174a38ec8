"""The embedded engine behind the gateway: the demo's start policy, real weights, real
speculation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import redis.asyncio
from integration.gateway.commands import workers
from safetensors.torch import save
from whole_versions import build_manifest, push_weights

from paceline.errors import WeightsError
from paceline.local.patience import patient
from paceline.local.processes import usable_cores
from paceline.models.config import read_config
from paceline.services.rollout_gateway.config import FeaturesConfig, GatewayConfig
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.workers.local import engine_settings
from paceline.speculators.eagle import EagleNet
from paceline.streams import RedisStream, decode_features, decode_trajectory, run_key
from paceline.tensors import decode_safetensors
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.weights import commit_versions

POLICY = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"


async def test_speculation_changes_no_token_and_new_weights_are_served(
    serve_gateway: Any,
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FeaturesConfig, "dtype", "float32")
    keys = {"trajectories": True, "redis": {"durable_url": redis_url}, "run": {"id": run_id}}
    engine = {"kind": "embedded", "workers": 2, "max_sequence_tokens": 128}
    async with serve_gateway(model=str(POLICY), drafter="eagle", engine=engine, **keys) as served:

        async def answers(
            arm: str, purpose: int, step: int
        ) -> dict[tuple[str, int], rpb.SampleFinished]:
            request = served.tasks_request(purpose=purpose, step=step, capture=True, forced_arm=arm)
            news = [one async for one in served.stub.RunTasks(request, timeout=patient(60))]
            found = [one.sample for one in news if one.HasField("sample")]
            return {(one.task_id, one.sample_index): one for one in found}

        plain = await answers("off", tpb.PURPOSE_EVAL, 0)
        drafted = await answers("eagle:3_1_4", tpb.PURPOSE_TRAIN, 0)
        for key, sample in plain.items():
            if min(sample.smallest_gap, drafted[key].smallest_gap) > 1e-4:
                assert sample.tokens_hash == drafted[key].tokens_hash
        assert sum(sample.speculation.drafted_rounds for sample in drafted.values()) > 0

        stream = RedisStream(redis_client, run_key(run_id, "features"))
        await stream.create_group("test")
        batches = [
            decode_features(e.fields, e.payload) for e in await stream.read("test", "c", 4, 5.0)
        ]
        assert all((batch.hidden_size, batch.hidden.dtype) == (128, "F32") for batch in batches)
        assert {batch.lm_head_hash for batch in batches} != {""}

        tensors = list(decode_safetensors((POLICY / "model.safetensors").read_bytes()).values())
        context = tpb.CommandContext(run_id=run_id, step=0, epoch=1)
        await push_weights(
            served.channel, build_manifest(pb.WEIGHT_TARGET_POLICY, 1, tensors), tensors, context
        )
        await commit_versions(served.channel, context, VersionSet(1, 1, 0))
        again = await answers("off", tpb.PURPOSE_EVAL, 0)
        for key, sample in plain.items():
            if sample.smallest_gap > 1e-4:
                assert again[key].tokens_hash == sample.tokens_hash
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert [worker.health.versions.policy for worker in status.workers] == [1, 1]
        drafter = list(
            decode_safetensors(
                save(EagleNet(read_config(POLICY), seed=1).export_tensors())
            ).values()
        )
        await push_weights(
            served.channel, build_manifest(pb.WEIGHT_TARGET_DRAFTER, 1, drafter), drafter, context
        )
        await commit_versions(served.channel, context, VersionSet(2, 1, 1))
        # Drafter 0 was never pushed, so that no worker can serve it again: the coordinator abandons
        # such a set.
        with pytest.raises(WeightsError, match="not prepared"):
            await commit_versions(served.channel, context, VersionSet(3, 1, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile", ["fp8_tensor", pytest.param("int8_w8a8", marks=pytest.mark.slow)]
)
async def test_policies_pushed_under_a_profile_are_served_in_place_and_trajectories_name_it(
    profile: str,
    serve_gateway: Any,
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
) -> None:
    if profile.startswith("int8"):
        pytest.importorskip("torchao", reason="torchao rounds to INT8: the extra `int8`")
    keys = {"trajectories": True, "redis": {"durable_url": redis_url}, "run": {"id": run_id}}
    engine = {"kind": "embedded", "workers": 1, "max_sequence_tokens": 64}
    async with serve_gateway(
        model=str(POLICY),
        drafter="ngram",
        engine=engine | {"embedded": {"profile": profile}},
        **keys,
    ) as served:
        context = tpb.CommandContext(run_id=run_id, step=0, epoch=1)

        async def hashes(purpose: int) -> dict[tuple[str, int], str]:
            request = served.tasks_request(purpose=purpose, forced_arm="off")
            news = [one async for one in served.stub.RunTasks(request, timeout=patient(60))]
            found = [one.sample for one in news if one.HasField("sample")]
            return {(one.task_id, one.sample_index): one.tokens_hash for one in found}

        async def serve(version: int, policy: Path) -> None:
            raw = (policy / "model.safetensors").read_bytes()
            tensors = list(decode_safetensors(raw).values())
            manifest = build_manifest(pb.WEIGHT_TARGET_POLICY, version, tensors)
            await push_weights(served.channel, manifest, tensors, context)
            await commit_versions(served.channel, context, VersionSet(version, version, 0, profile))

        first = await hashes(tpb.PURPOSE_TRAIN)
        await serve(1, POLICY.parent / "policy_trained")
        second = await hashes(tpb.PURPOSE_EVAL)
        await serve(2, POLICY)
        assert await hashes(tpb.PURPOSE_EVAL) == first != second
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert [worker.health.versions.policy for worker in status.workers] == [2]

        stream = RedisStream(redis_client, run_key(run_id, "trajectories"))
        await stream.create_group("test")
        entries = await stream.read("test", "c", len(first), 5.0)
        sampled = [decode_trajectory(entry.fields, entry.payload) for entry in entries]
        spans = [span for one in sampled for span in one.draw_spans]
        assert {span.number_format for span in spans} == {profile}


@pytest.mark.slow
async def test_a_bias_by_token_id_and_penalties_reach_the_draw(serve_gateway: Any) -> None:
    engine = {"kind": "embedded", "workers": 1, "max_sequence_tokens": 128}
    async with serve_gateway(model=str(POLICY), drafter="eagle", engine=engine) as served:

        async def said(**options: Any) -> list[int]:
            body = {
                "prompt": "12:8=",
                "max_tokens": 12,
                "seed": 1,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = await served.http.post("/v1/completions", json={**body, **options})
            assert response.status_code == 200, response.text
            return list(response.json()["choices"][0]["token_ids"])

        assert await said(logit_bias={"40": 100}) == [40] * 12
        assert 40 not in await said(logit_bias={"40": -100, "41": 30, "42": 30})
        assert await said(repetition_penalty=10) != await said()
        chat = {
            "messages": [{"role": "user", "content": "12:8="}],
            "max_tokens": 4,
            "logit_bias": {"40": 100},
        }
        answer = await served.http.post(
            "/v1/chat/completions", json={**chat, "return_token_ids": True}
        )
        assert answer.json()["choices"][0]["token_ids"] == [40] * 4


@pytest.mark.parametrize("drafter", ["off", "ngram", "eagle"])
def test_the_gateways_settings_are_the_engines(drafter: str) -> None:
    config = GatewayConfig(model=str(POLICY), drafter=drafter)
    assert EmbeddedSpec.model_validate(engine_settings(config)).drafter == drafter


@pytest.mark.slow
async def test_workers_with_a_share_of_the_cores_have_cores_of_their_own(
    serve_gateway: Any,
) -> None:
    engine = {"kind": "embedded", "workers": 2, "threads": 0, "max_sequence_tokens": 128}
    async with serve_gateway(model=str(POLICY), engine=engine) as served:
        first, second = [psutil.Process(one.pid) for one in await workers(served)]
        own = [set(one.cpu_affinity()) for one in (first, second)]
        each = max(1, usable_cores() // 2)
        assert [len(cores) for cores in own] == [each, each]
        assert usable_cores() < 2 or not own[0] & own[1]
        request = served.tasks_request(purpose=tpb.PURPOSE_EVAL)
        news = [one async for one in served.stub.RunTasks(request, timeout=patient(60))]
        assert sum(one.HasField("sample") for one in news) > 0
