"""A coordinator's commands to a gateway under test, under leases of rising epochs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from whole_versions import build_manifest, push_weights

from paceline.local.patience import patient
from paceline.rpc import leased, rpc_errors
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.tensors import from_numpy
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.weights import commit_versions

Order = list[tuple[str, int, str]]


def lease(served: Any, epoch: int = 1) -> tpb.CommandContext:
    return leased(served.config.security, served.config.run.id, 1, epoch)


async def push(served: Any, target: int, version: int, epoch: int = 1) -> None:
    """A version for the scripted engine."""
    tensors = [from_numpy("model.norm.weight", np.full(8, version, dtype=np.float32))]
    manifest = build_manifest(target, version, tensors, lm_head_hash=f"{version:016x}")
    await push_weights(served.channel, manifest, tensors, lease(served, epoch))


async def commit(
    served: Any,
    versions: VersionSet,
    mode: int = pb.PAUSE_MODE_IN_PLACE,
    epoch: int = 1,
    leased: Iterable[int] = (),
) -> None:
    await commit_versions(served.channel, lease(served, epoch), versions, mode, leased=leased)


async def release(served: Any, epoch: int, *workers: int, **options: Any) -> dict[int, int]:
    """Bytes that each worker has released."""
    asked = rpb.ReleaseWorkersRequest(context=lease(served, epoch), workers=workers, **options)
    with rpc_errors():
        answer = await served.stub.ReleaseWorkers(asked, timeout=patient(30))
    return dict(answer.released_bytes)


async def resume(served: Any, epoch: int) -> tuple[list[int], int]:
    """Resumed workers, and the policy version they serve."""
    asked = rpb.ResumeWorkersRequest(context=lease(served, epoch))
    with rpc_errors():
        answer = await served.stub.ResumeWorkers(asked, timeout=patient(30))
    return list(answer.workers), answer.versions.policy


async def workers(served: Any) -> Any:
    """Workers as the gateway's status reports them."""
    return (await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))).workers


async def worker_versions(served: Any) -> list[tuple[int, int]]:
    """(policy, drafter) of the workers that are there."""
    return [
        (worker.health.versions.policy, worker.health.versions.drafter)
        for worker in await workers(served)
        if worker.ready
    ]


async def until_serving(served: Any, versions: list[tuple[int, int]], seconds: float = 20) -> None:
    """Returns when all workers are ready and serve these versions."""
    async with asyncio.timeout(patient(seconds)):
        while await worker_versions(served) != versions:
            pass


def note_commands(monkeypatch: pytest.MonkeyPatch) -> Order:
    """Records each command with its worker, and the time of its answer."""
    order: Order = []
    ask, send = WorkerProcess.ask, WorkerProcess.send

    async def noted(process: WorkerProcess, command: pb.WorkerCommand, *options: float) -> Any:
        answer = await ask(process, command, *options)
        order.append(("answered", process.index, command.WhichOneof("command") or ""))
        return answer

    def sent(process: WorkerProcess, command: pb.WorkerCommand) -> None:
        order.append(("sent", process.index, command.WhichOneof("command") or ""))
        send(process, command)

    monkeypatch.setattr(WorkerProcess, "ask", noted)
    monkeypatch.setattr(WorkerProcess, "send", sent)
    return order
