"""A canary worker tries each new set: a refused set serves nobody; a passed set serves on all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.gateway.commands import (
    commit,
    lease,
    note_commands,
    push,
    release,
    resume,
    until_serving,
    worker_versions,
    workers,
)
from integration.gateway.conftest import Ends
from whole_versions import build_manifest, push_weights

from paceline.errors import WeightsError
from paceline.local.patience import patient
from paceline.tensors import decode_safetensors, from_numpy
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

POLICY, DRAFTER = pb.WEIGHT_TARGET_POLICY, pb.WEIGHT_TARGET_DRAFTER
DEMO = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
TWO: dict[str, Any] = {"engine": {"workers": 2}}
ARM = "eagle:3_1_4"
PACED = {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
SLOW = {**PACED, "default_cost_s": 0.3}


async def tokens(served: Any, seed: int, max_tokens: int) -> tuple[list[int], set[int]]:
    """Tokens of a request, and the policy versions that drew them."""
    sampling = tpb.SamplingParams(temperature=1, max_tokens=max_tokens, seed=seed, ignore_eos=True)
    request = rpb.GenerateRequest(text="2+2=", sampling=sampling)
    chunks = [piece.chunk async for piece in served.stub.Generate(request, timeout=patient(30))]
    assert chunks[-1].finish_reason == tpb.FINISH_REASON_LENGTH, chunks[-1].error
    drawn = [token for chunk in chunks for token in chunk.token_ids]
    return drawn, {span.policy_version for chunk in chunks for span in chunk.version_spans}


async def both_busy(served: Any) -> list[asyncio.Task[tuple[list[int], set[int]]]]:
    """Holds a request on each of two workers."""
    running = [asyncio.create_task(tokens(served, seed, 150)) for seed in (1, 2)]
    async with asyncio.timeout(patient(10)):
        while not all(worker.health.running for worker in await workers(served)):
            pass
    return running


async def test_a_policy_without_finite_log_probs_is_refused_and_serves_nobody(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= {**PACED, "nan_policies": [1]}
    async with serve_gateway(**TWO) as served:
        ends.come()
        undisturbed = [(await tokens(served, seed, 150))[0] for seed in (1, 2)]
        await push(served, POLICY, 1)
        ends.wait()
        running = await both_busy(served)
        with pytest.raises(WeightsError, match=r"canary, refused set 1 .*finite log-probs.*DATA"):
            await commit(served, VersionSet(1, 1, 0))
        ends.come()
        for answer, before in zip(await asyncio.gather(*running), undisturbed, strict=True):
            assert answer == (before, {0})
        with pytest.raises(WeightsError, match="finite log-probs"):  # perhaps by one worker alone
            await commit(served, VersionSet(2, 1, 0))
        await until_serving(served, [(0, 0), (0, 0)])
        await push(served, POLICY, 2)
        await commit(served, VersionSet(3, 2, 0))
        assert await worker_versions(served) == [(2, 0), (2, 0)]
        assert (await tokens(served, 1, 4))[1] == {2}


async def push_demo_policy(served: Any, version: int, norm: float | None = None) -> None:
    """The demo's policy under another version; `norm` sets all weights of its last norm."""
    found = decode_safetensors((DEMO / "model.safetensors").read_bytes())
    if norm is not None:
        size = found["model.norm.weight"].shape[0]
        found["model.norm.weight"] = from_numpy(
            "model.norm.weight", np.full(size, norm, dtype=np.float32)
        )
    manifest = build_manifest(POLICY, version, list(found.values()), lm_head_hash=f"{version:016x}")
    await push_weights(served.channel, manifest, list(found.values()), lease(served))


@pytest.mark.slow
async def test_finite_weights_whose_log_probs_are_none_are_refused_and_whole_ones_taken(
    serve_gateway: Any,
) -> None:
    engine = {"kind": "embedded", "workers": 2, "max_sequence_tokens": 64}
    async with serve_gateway(model=str(DEMO), drafter="ngram", engine=engine) as served:
        before, _ = await tokens(served, 1, 16)
        pulls = [[arm.pulls for arm in one.health.arms] for one in await workers(served)]
        await push_demo_policy(served, 2)
        await commit(served, VersionSet(1, 2, 0))
        after = [[arm.pulls for arm in one.health.arms] for one in await workers(served)]
        assert after == pulls, "probes teach nothing"
        await push_demo_policy(served, 3, norm=3e38)
        with pytest.raises(WeightsError, match="finite log-probs"):
            await commit(served, VersionSet(2, 3, 0))
        assert await tokens(served, 1, 16) == (before, {2})
        await until_serving(served, [(2, 0), (2, 0)])


async def test_requests_on_the_canary_go_on_under_a_set_that_passes(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= PACED
    async with serve_gateway(**TWO) as served:
        await push(served, POLICY, 1)
        running = await both_busy(served)
        pids = {worker.pid for worker in await workers(served)}
        await commit(served, VersionSet(1, 1, 0))
        ends.come()
        for drawn, versions in await asyncio.gather(*running):
            assert (len(drawn), versions) == (150, {0, 1})
        assert {worker.pid for worker in await workers(served)} == pids


async def test_a_drafter_whose_drafts_are_hardly_accepted_is_refused(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= {"arms": ["off", ARM], "drafter_accept_lengths": {0: 2.5, 1: 1.0, 2: 2.0}}
    async with serve_gateway(**TWO) as served:
        await push(served, DRAFTER, 1)
        with pytest.raises(WeightsError, match=r"p0.d1\): acceptance; seen: 0.000 .*>= 0.3"):
            await commit(served, VersionSet(1, 0, 1))
        await until_serving(served, [(0, 0), (0, 0)])
        await push(served, DRAFTER, 2)
        await commit(served, VersionSet(2, 0, 2))
        assert await worker_versions(served) == [(0, 2), (0, 2)]
        for worker in await workers(served):
            assert sum(arm.pulls for arm in worker.health.arms) == 0, "probes teach nothing"


async def test_a_drafter_that_served_before_is_gone_back_to_whatever_it_accepts(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= {"arms": ["off", ARM], "drafter_accept_lengths": {0: 1.0, 1: 1.0, 2: 2.5}}
    async with serve_gateway(**TWO) as served:
        for version in (1, 2):
            await push(served, DRAFTER, version)
            await commit(served, VersionSet(version, 0, version))
        await commit(served, VersionSet(3, 0, 1))
        assert await worker_versions(served) == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    "settings", [{"engine": {"workers": 1}}, {**TWO, "canary": {"enabled": False}}]
)
async def test_one_worker_has_no_canary_and_two_need_none(
    serve_gateway: Any, script: dict[str, Any], settings: dict[str, Any]
) -> None:
    script |= {"nan_policies": [1]}
    async with serve_gateway(**settings) as served:
        await push(served, POLICY, 1)
        await commit(served, VersionSet(1, 1, 0))
        assert set(await worker_versions(served)) == {(1, 0)}


async def test_the_canary_commits_alone_and_then_all_others_at_once(
    serve_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_gateway(engine={"workers": 4}) as served:
        await push(served, POLICY, 1)
        order = note_commands(monkeypatch)
        await commit(served, VersionSet(1, 1, 0))
    canary = order[0][1]
    alone = [("sent", canary, "commit_weights"), ("answered", canary, "commit_weights")]
    assert order[:3] == [*alone, ("sent", canary, "enqueue")]
    others = sorted({0, 1, 2, 3} - {canary})
    assert sorted(order[3:6]) == [("sent", index, "commit_weights") for index in others]
    assert sorted(order[6:9]) == [("answered", index, "commit_weights") for index in others]


async def probed(served: Any, chosen: Callable[[Any], bool] = lambda _: True) -> Any:
    """Waits for a chosen worker that runs a probe."""
    async with asyncio.timeout(patient(10)):
        while True:
            for worker in await workers(served):
                if worker.ready and worker.health.running and chosen(worker):
                    return worker


async def test_a_worker_that_dies_as_canary_leaves_the_verdict_to_another(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= SLOW
    async with serve_gateway(**TWO) as served:
        await push(served, POLICY, 1)
        committing = asyncio.create_task(commit(served, VersionSet(1, 1, 0)))
        first = await probed(served)
        os.kill(first.pid, signal.SIGKILL)
        second = await probed(served, lambda worker: worker.pid != first.pid)
        assert second.worker_index != first.worker_index
        await committing
        await until_serving(served, [(1, 0), (1, 0)])


async def test_a_set_that_every_worker_dies_of_is_refused(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= SLOW
    async with serve_gateway(**TWO) as served:
        await push(served, POLICY, 1)
        committing = asyncio.create_task(commit(served, VersionSet(1, 1, 0)))
        first = await probed(served)
        os.kill(first.pid, signal.SIGKILL)
        other = await probed(served, lambda worker: worker.worker_index != first.worker_index)
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(WeightsError, match="every engine worker that tried set 1 was lost"):
            await committing
        await until_serving(served, [(0, 0), (0, 0)])


async def test_a_lent_worker_has_its_memory_for_the_probe_alone(
    serve_gateway: Any, script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    script |= {"nan_policies": [1]}
    async with serve_gateway(**TWO) as served:
        await release(served, 2, 0, 1)
        await push(served, POLICY, 1)
        with pytest.raises(WeightsError, match="finite log-probs"):
            await commit(served, VersionSet(1, 1, 0))
        await until_serving(served, [(0, 0), (0, 0)])
        await push(served, POLICY, 2)
        order = note_commands(monkeypatch)
        await commit(served, VersionSet(2, 2, 0))
        asked = [what for when, _, what in order if when == "sent"]
        assert asked[:4] == ["resume_memory", "commit_weights", "enqueue", "release_memory"]
        assert asked[4] == "commit_weights"
        assert await resume(served, 3) == ([0, 1], 2)


@pytest.mark.parametrize(("leased", "tries"), [((0,), [1]), ((1,), [0]), ((0, 1), [])])
async def test_a_worker_whose_slots_a_trainer_has_tries_nothing(
    serve_gateway: Any,
    monkeypatch: pytest.MonkeyPatch,
    leased: tuple[int, ...],
    tries: list[int],
) -> None:
    async with serve_gateway(**TWO) as served:
        await release(served, 2, 0, 1)
        await push(served, POLICY, 1)
        order = note_commands(monkeypatch)
        await commit(served, VersionSet(1, 1, 0), leased=leased)
        asked = {what: [] for what in ("resume_memory", "enqueue", "commit_weights")}
        for when, worker, what in order:
            if when == "sent" and what in asked:
                asked[what].append(worker)
        assert asked["resume_memory"] == asked["enqueue"] == tries
        assert sorted(asked["commit_weights"]) == [0, 1]
