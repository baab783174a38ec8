"""New versions reach every worker, also late and replaced workers; a set is served as a whole or
not at all.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from integration.gateway.commands import (
    commit,
    lease,
    push,
    release,
    resume,
    until_serving,
    worker_versions,
    workers,
)
from integration.gateway.conftest import Ends
from integration.gateway.http_agent import loads

from paceline.errors import InvalidInput, StaleEpoch, WeightsError
from paceline.local.patience import patient
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.weights import abort_version


async def test_a_commit_swaps_all_workers_and_running_requests_go_on(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway(engine={"workers": 2}) as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        assert await worker_versions(served) == [(0, 0), (0, 0)]
        sampling = tpb.SamplingParams(temperature=1, max_tokens=100, seed=1, ignore_eos=True)
        call = served.stub.Generate(
            rpb.GenerateRequest(text="2+2=", sampling=sampling), timeout=patient(20)
        ).__aiter__()
        first = await anext(call)
        await commit(served, VersionSet(1, 1, 0))
        ends.come()
        chunks = [first.chunk] + [piece.chunk async for piece in call]
        versions = [span.policy_version for chunk in chunks for span in chunk.version_spans]
        assert (versions[0], versions[-1]) == (0, 1)
        assert versions == sorted(versions)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 100
        assert await worker_versions(served) == [(1, 0), (1, 0)]


async def test_a_replaced_worker_and_a_restarted_gateway_serve_the_committed_set(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(engine={"workers": 2}) as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 3)
        await push(served, pb.WEIGHT_TARGET_DRAFTER, 2)
        await commit(served, VersionSet(1, 3, 2))
        os.kill((await workers(served))[0].pid, signal.SIGKILL)
        async with asyncio.timeout(patient(20)):
            while (await workers(served))[0].ready:
                pass
        await until_serving(served, [(3, 2), (3, 2)])
    async with serve_gateway(engine={"workers": 2}) as served:
        assert await worker_versions(served) == [(3, 2), (3, 2)]
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert (status.versions.seq, status.versions.policy, status.versions.drafter) == (1, 3, 2)


async def test_a_commit_of_an_old_lease_is_refused_by_a_restarted_gateway_too(
    serve_gateway: Any,
) -> None:
    async with serve_gateway() as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await commit(served, VersionSet(1, 1, 0), epoch=6)
    async with serve_gateway() as served:
        with pytest.raises(StaleEpoch, match="seen: 1; allowed: at least 6"):
            await commit(served, VersionSet(2, 1, 0))
        await commit(served, VersionSet(2, 1, 0), epoch=6)


async def test_a_drafter_rolls_back_under_a_new_seq_and_unprepared_versions_are_refused(
    serve_gateway: Any,
) -> None:
    async with serve_gateway() as served:
        with pytest.raises(WeightsError, match="not prepared"):
            await commit(served, VersionSet(1, 5, 0))
        await push(served, pb.WEIGHT_TARGET_DRAFTER, 1)
        await commit(served, VersionSet(1, 0, 1))
        await push(served, pb.WEIGHT_TARGET_DRAFTER, 2)
        await commit(served, VersionSet(2, 0, 2))
        await commit(served, VersionSet(3, 0, 1))
        assert await worker_versions(served) == [(0, 1)]
        with pytest.raises(WeightsError, match="seq"):
            await commit(served, VersionSet(3, 0, 2))


async def test_a_profile_serves_with_its_set_on_every_worker_also_a_late_one(
    serve_gateway: Any,
) -> None:
    rounded = VersionSet(2, 2, 0, "int8")
    async with serve_gateway(engine={"workers": 2}) as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await commit(served, VersionSet(1, 1, 0))
        await push(served, pb.WEIGHT_TARGET_POLICY, 2)
        with pytest.raises(InvalidInput, match="no such profile; seen: int4"):
            await commit(served, replace(rounded, profile="int4"))
        assert [one.health.versions.profile for one in await workers(served)] == ["", ""]
        await commit(served, rounded)
        assert [one.health.versions.profile for one in await workers(served)] == ["int8", "int8"]
        os.kill((await workers(served))[0].pid, signal.SIGKILL)
        async with asyncio.timeout(patient(20)):
            while (await workers(served))[0].ready:
                pass
        await until_serving(served, [(2, 0), (2, 0)])
        assert [one.health.versions.profile for one in await workers(served)] == ["int8", "int8"]
    async with serve_gateway(engine={"workers": 2}) as served:
        assert [one.health.versions.profile for one in await workers(served)] == ["int8", "int8"]
        await push(served, pb.WEIGHT_TARGET_POLICY, 3)
        await commit(served, VersionSet(3, 3, 0))
        assert [one.health.versions.profile for one in await workers(served)] == ["", ""]


async def test_an_aborted_version_cannot_be_committed(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await abort_version(served.channel, lease(served), pb.WEIGHT_TARGET_POLICY, 1)
        with pytest.raises(WeightsError):
            await commit(served, VersionSet(1, 1, 0))


async def test_abort_mode_ends_running_requests_and_they_go_on_under_the_new_policy(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway() as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        sampling = tpb.SamplingParams(temperature=1, max_tokens=100, seed=1, ignore_eos=True)
        request = rpb.GenerateRequest(text="2+2=", sampling=sampling)
        call = served.stub.Generate(request, timeout=patient(20)).__aiter__()
        first = await anext(call)
        await commit(served, VersionSet(1, 1, 0), pb.PAUSE_MODE_ABORT)
        ends.come()
        chunks = [first.chunk] + [piece.chunk async for piece in call]
        assert chunks[-1].finish_reason == tpb.FINISH_REASON_LENGTH
        spans = [span for chunk in chunks for span in chunk.version_spans]
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert (spans[0].policy_version, spans[-1].policy_version) == (0, 1)
        assert sum(len(chunk.token_ids) for chunk in chunks) == spans[-1].end == 100


async def test_a_caller_that_leaves_while_a_commit_aborts_is_not_brought_back(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway() as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        sampling = tpb.SamplingParams(temperature=1, max_tokens=400, seed=1, ignore_eos=True)
        request = rpb.GenerateRequest(text="2+2=", sampling=sampling)
        call = served.stub.Generate(request, timeout=patient(20))
        await anext(call.__aiter__())
        committing = asyncio.create_task(commit(served, VersionSet(1, 1, 0), pb.PAUSE_MODE_ABORT))
        call.cancel()
        await committing
        async with asyncio.timeout(patient(10)):
            while sum(await loads(served)):
                pass


async def test_a_pause_mode_that_does_not_exist_is_refused(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        with pytest.raises(InvalidInput, match="no such pause mode; seen: 9"):
            await commit(served, VersionSet(1, 1, 0), 9)


def asked(served: Any) -> dict[str, Any]:
    return {"model": served.config.model_dir.name, "prompt": "1+1=", "max_tokens": 8}


async def test_workers_that_are_lent_answer_nobody_and_come_back_with_what_was_committed(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(engine={"workers": 2}) as served:
        freed = await release(served, 3, 0, 1)
        assert set(freed) == {0, 1}
        assert min(freed.values()) > 0
        waiting = asyncio.create_task(served.http.post("/v1/completions", json=asked(served)))
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await commit(served, VersionSet(1, 1, 0))
        assert not waiting.done()
        with pytest.raises(StaleEpoch, match="newer lease"):
            await resume(served, 2)
        assert not waiting.done()
        assert await resume(served, 4) == ([0, 1], 1)
        assert await worker_versions(served) == [(1, 0), (1, 0)]
        answer = await asyncio.wait_for(waiting, patient(20))
        assert answer.status_code == 200, answer.text
        with pytest.raises(StaleEpoch):
            await release(served, 3, 0, 1)
        with pytest.raises(InvalidInput, match=r"no such worker; seen: 2"):
            await release(served, 5, 2)


async def test_a_restarted_gateway_leaves_lent_slots_to_their_holders(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        await release(served, 1, 0)
    async with serve_gateway(queue={"wait_s": 0.1}) as served:
        assert (await served.http.post("/v1/completions", json=asked(served))).status_code == 503
        assert await resume(served, 2) == ([0], 0)
        assert (await served.http.post("/v1/completions", json=asked(served))).status_code == 200
    async with serve_gateway() as served:
        assert (await served.http.post("/v1/completions", json=asked(served))).status_code == 200


async def test_a_request_that_waits_too_long_for_lent_workers_is_told_why(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(queue={"wait_s": 0.1}) as served:
        await release(served, 1, 0)
        answer = await served.http.post("/v1/completions", json=asked(served))
        assert answer.status_code == 503
        assert "slots are lent to a trainer; waited 0.1 s" in answer.text
