"""Interrupted rollouts resume from their tokens under a new policy or after a lease. Their
trajectories have a span for each version, and no token is lost or generated twice.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from integration.gateway.commands import commit, lease, push, release, resume, workers
from integration.gateway.conftest import Ends
from integration.gateway.http_agent import SLOW, until_running
from integration.gateway.test_open_traffic import redis_keys, stream_of
from whole_versions import build_manifest, push_weights

from paceline.errors import InvalidInput
from paceline.local.patience import patient
from paceline.rpc import rpc_errors
from paceline.tensors import decode_safetensors
from paceline.trajectory import Trajectory, VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

POLICY = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
SAMPLES, TOKENS = 4, 120


def rollout(served: Any, tokens: int = TOKENS, step: int = 0) -> rpb.RunTasksRequest:
    request: rpb.RunTasksRequest = served.tasks_request(step=step)
    request.sampling.max_tokens, request.sampling.ignore_eos = tokens, True
    return request


async def finished(served: Any, request: rpb.RunTasksRequest) -> list[rpb.RunTasksResponse]:
    with rpc_errors():
        return [news async for news in served.stub.RunTasks(request, timeout=patient(60))]


async def until_tokens(served: Any, run: asyncio.Task[Any], count: int) -> None:
    """Waits until the engines have drawn so many tokens, in the middle of the run."""
    async with asyncio.timeout(patient(20)):
        while await tokens_so_far(served) < count:
            assert not run.done()


async def tokens_so_far(served: Any) -> int:
    return sum(worker.health.tokens_emitted for worker in await workers(served))


def spans(one: Trajectory) -> list[tuple[int, int]]:
    """(policy version, tokens) in order; asserts that they cover the response without a gap."""
    ends = [span.end for span in one.version_spans]
    assert [span.start for span in one.version_spans] == [len(one.token_ids) - TOKENS, *ends[:-1]]
    assert ends[-1] == len(one.token_ids)
    return [(span.policy_version, span.end - span.start) for span in one.version_spans]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mode", [pb.PAUSE_MODE_IN_PLACE, pb.PAUSE_MODE_RETRACT, pb.PAUSE_MODE_ABORT]
)
async def test_a_commit_in_the_middle_of_a_rollout_leaves_whole_samples_in_every_mode(
    serve_gateway: Any,
    script: dict[str, Any],
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
    ends: Ends,
    mode: int,
) -> None:
    script |= SLOW
    keys = redis_keys(redis_url, run_id)
    async with serve_gateway(engine={"workers": 2}, **keys) as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        run = asyncio.create_task(finished(served, rollout(served)))
        await until_tokens(served, run, 5 * SAMPLES)
        await commit(served, VersionSet(1, 1, 0), mode)
        ends.come()
        news = await run
        found = await stream_of(redis_client, run_id, SAMPLES)
        emitted = await tokens_so_far(served)
    assert [one.sample.response_tokens for one in news if one.HasField("sample")] == [TOKENS] * 4
    assert emitted == SAMPLES * TOKENS  # counted by the engines: no token was drawn twice
    for one in found:
        (old, kept), (new, rest) = spans(one)
        assert (old, new, kept + rest) == (0, 1, TOKENS)
        assert kept >= 1
        again = list(one.token_ids[-TOKENS:])
        said = served.codec.encode(served.codec.decode(again[: again.index(1)]))[1:]
        cycle = [*said, 1]  # the script's answer, repeated
        assert again == [cycle[index % len(cycle)] for index in range(TOKENS)]


async def test_a_rollout_that_a_lease_suspends_goes_on_under_the_set_that_serves_then(
    serve_gateway: Any,
    script: dict[str, Any],
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
) -> None:
    # Slow enough for three parts of the rollout on a machine that stalls for seconds.
    script |= {**SLOW, "default_cost_s": 0.05}
    keys = redis_keys(redis_url, run_id)
    # an agent's request would be refused after wait_s; a step's samples are not refused
    async with serve_gateway(engine={"workers": 2}, queue={"wait_s": 0.05}, **keys) as served:
        run = asyncio.create_task(finished(served, rollout(served)))
        await until_tokens(served, run, 5 * SAMPLES)
        for number in (1, 2):
            await asyncio.wait_for(release(served, 2 * number, 0, 1, drain_s=0.0), patient(5))
            kept = await tokens_so_far(served)
            await push(served, pb.WEIGHT_TARGET_POLICY, number, 2 * number)
            await commit(served, VersionSet(number, number, 0), epoch=2 * number)
            await asyncio.sleep(0.2)  # longer than queue.wait_s
            assert (await tokens_so_far(served), run.done()) == (kept, False)
            await resume(served, 2 * number + 1)
            await until_tokens(served, run, kept + SAMPLES)
        news = await run
        found = await stream_of(redis_client, run_id, SAMPLES)
        emitted = await tokens_so_far(served)
    assert len({one.sample.session_id for one in news if one.HasField("sample")}) == SAMPLES
    assert emitted == SAMPLES * TOKENS
    for one in found:
        assert [version for version, _ in spans(one)] == [0, 1, 2]


async def test_requests_have_the_time_to_end_that_the_lease_gives_them(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= SLOW
    async with serve_gateway(engine={"workers": 2}) as served:
        run = asyncio.create_task(finished(served, rollout(served, tokens=40)))
        await until_running(served, SAMPLES)
        lending = asyncio.create_task(release(served, 2, 0, 1, drain_s=patient(20)))
        await asyncio.sleep(0)
        ends.come()
        await lending
        assert len([one for one in await run if one.HasField("sample")]) == SAMPLES
        for wrong in (-1.0, float("nan"), 1e9):
            with pytest.raises(InvalidInput, match="drain_s"):
                await release(served, 3, 0, 1, drain_s=wrong)


@pytest.mark.slow
async def test_the_embedded_engine_goes_on_exactly_after_a_lease_and_a_new_policy(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = redis_keys(redis_url, run_id)
    tensors = list(decode_safetensors((POLICY / "model.safetensors").read_bytes()).values())
    engine = {"kind": "embedded", "workers": 2, "max_sequence_tokens": 256}
    async with serve_gateway(model=str(POLICY), engine=engine, **keys) as served:
        undisturbed = rollout(served)
        undisturbed.purpose = tpb.PURPOSE_EVAL
        expected = hashes(await finished(served, undisturbed))
        run = asyncio.create_task(finished(served, rollout(served)))
        await until_tokens(served, run, SAMPLES * TOKENS + 5 * SAMPLES)
        await release(served, 2, 0, 1, drain_s=0.0)
        # the same numbers under another version: the tokens stay, and only their version changes
        manifest = build_manifest(pb.WEIGHT_TARGET_POLICY, 1, tensors)
        await push_weights(served.channel, manifest, tensors, lease(served, 2))
        await commit(served, VersionSet(1, 1, 0), epoch=2)
        await resume(served, 3)
        again = hashes(await run)
        found = await stream_of(redis_client, run_id, SAMPLES)
        emitted = await tokens_so_far(served)
    assert emitted == 2 * SAMPLES * TOKENS
    assert again.keys() == expected.keys()
    for key, (tokens, gap) in again.items():
        assert tokens == expected[key][0] or min(gap, expected[key][1]) < 1e-4
    assert [[version for version, _ in spans(one)] for one in found] == [[0, 1]] * SAMPLES
    assert all(np.isfinite(one.behavior_logprobs[-TOKENS:]).all() for one in found)


def hashes(news: list[rpb.RunTasksResponse]) -> dict[tuple[str, int], tuple[str, float]]:
    """By sample: the hash of its tokens, and the smallest gap of its draws."""
    ended = [one.sample for one in news if one.HasField("sample")]
    return {(one.task_id, one.sample_index): (one.tokens_hash, one.smallest_gap) for one in ended}
