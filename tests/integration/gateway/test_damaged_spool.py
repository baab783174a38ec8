"""A gateway serves nothing of a damaged spool, and serves again after the repair."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_versions import build_manifest, push_weights

from paceline.config import SecurityConfig
from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.messages import versions_from_proto
from paceline.rpc import leased, rpc_errors
from paceline.tensors import from_numpy
from paceline.trajectory import VersionSet
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER, WEIGHT_TARGET_POLICY
from paceline.v1.weights_pb2 import GetVersionsRequest, GetVersionsResponse
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights import Spool, commit_versions

NUMBERS = from_numpy("w", np.arange(8, dtype=np.float32))
SERVING = VersionSet(1, 1, 1)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """The directory of a gateway that has served policy 1 with drafter 1."""
    spool = Spool(tmp_path / "damaged")
    for target in (WEIGHT_TARGET_POLICY, WEIGHT_TARGET_DRAFTER):
        spool.write(build_manifest(target, 1, [NUMBERS]), bytes(NUMBERS.view))
    spool.commit(SERVING)
    return tmp_path / "damaged"


def flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


async def versions(served: Any) -> GetVersionsResponse:
    stub: Any = WeightServiceStub(served.channel)
    answer: GetVersionsResponse = await stub.GetVersions(GetVersionsRequest(), timeout=patient(10))
    return answer


async def finish(served: Any) -> VersionSet:
    """Runs a whole rollout; returns the version set at its end."""
    with rpc_errors():
        call = served.stub.RunTasks(served.tasks_request(), timeout=patient(60))
        *_, last = [one async for one in call]
    return versions_from_proto(last.finished.versions)


async def test_over_a_damaged_policy_no_worker_serves_until_it_is_pushed_again(
    serve_gateway: Callable[..., Any], spool: Path
) -> None:
    flip(spool / "policy-1" / "model.safetensors")
    async with serve_gateway(spool_dir=str(spool)) as served:
        with pytest.raises(Unavailable, match="what serves is damaged"):
            await finish(served)
        assert (await versions(served)).damaged == [WEIGHT_TARGET_POLICY]
        manifest = build_manifest(WEIGHT_TARGET_POLICY, 1, [NUMBERS])
        context = leased(SecurityConfig(), served.config.run.id, 0, 1)
        report = await push_weights(served.channel, manifest, [NUMBERS], context)
        assert report.bytes == manifest.total_bytes
        assert await finish(served) == SERVING
        assert not (await versions(served)).damaged


async def test_over_a_damaged_drafter_workers_serve_the_policy_without_it(
    serve_gateway: Callable[..., Any], spool: Path
) -> None:
    flip(spool / "drafter-1" / "model.safetensors")
    async with serve_gateway(spool_dir=str(spool)) as served:
        assert await finish(served) == SERVING
        assert (await versions(served)).damaged == [WEIGHT_TARGET_DRAFTER]
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(10))
        assert versions_from_proto(status.workers[0].health.versions) == VersionSet(1, 1, 0)
        context = leased(SecurityConfig(), served.config.run.id, 0, 1)
        assert await commit_versions(served.channel, context, VersionSet(2, 1, 0))
        assert await finish(served) == VersionSet(2, 1, 0)


@pytest.mark.parametrize("drafter", [True, False], ids=["drafter", "drafter gone"])
async def test_over_a_damaged_list_of_sets_no_worker_serves_until_one_is_committed(
    serve_gateway: Callable[..., Any], spool: Path, drafter: bool
) -> None:
    flip(spool / "versions.json")
    if not drafter:
        shutil.rmtree(spool / "drafter-1")
    async with serve_gateway(spool_dir=str(spool)) as served:
        assert versions_from_proto((await versions(served)).versions) == VersionSet()
        with pytest.raises(Unavailable, match="what serves is damaged"):
            await finish(served)
        context = leased(SecurityConfig(), served.config.run.id, 0, 1)
        await commit_versions(served.channel, context, SERVING)
        assert await finish(served) == SERVING
        assert (await versions(served)).damaged == ([] if drafter else [WEIGHT_TARGET_DRAFTER])
