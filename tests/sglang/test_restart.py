"""A killed SGLang: its request ends as unavailable, and another SGLang starts, loads the set whose
commit was under way and serves.

An SGLang that is killed while it starts leaves no process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status
from sglang_served import DEMO, greedy, load_oracle
from transformers import AutoTokenizer
from whole_versions import build_manifest, push_weights

from paceline.config import SecurityConfig
from paceline.local.patience import patient
from paceline.local.processes import child_environment
from paceline.rpc import channel
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec
from paceline.services.rollout_gateway.engines.worker import (
    SOCKET_VARIABLE,
    SPEC_VARIABLE,
    WorkerSpec,
)
from paceline.services.rollout_gateway.server import running
from paceline.tensors import decode_safetensors
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.weights import commit_versions

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def scheduler_of(pid: int) -> psutil.Process:
    """SGLang's scheduler under a worker process."""
    return next(
        one for one in psutil.Process(pid).children(True) if "scheduler" in "".join(one.cmdline())
    )


async def test_a_killed_sglang_is_replaced_and_serves_the_set_whose_commit_it_missed(
    tmp_path: Path,
) -> None:
    config = GatewayConfig.model_validate(
        {
            "model": str(DEMO / "policy_start"),
            "drafter": "off",
            "run": {"id": "restart", "dir": str(tmp_path)},
            "addresses": {"gateway": "127.0.0.1:0", "http": "127.0.0.1:0"},
            "engine": {
                "kind": "sglang",
                "workers": 1,
                "dtype": "float32",
                "max_sequence_tokens": 256,
            },
        }
    )
    prompt = AutoTokenizer.from_pretrained(DEMO / "policy_start").encode("48:36=")
    start, trained = (
        greedy(load_oracle(DEMO / name), prompt, 16) for name in ("policy_start", "policy_trained")
    )
    assert start != trained
    async with (
        running(config) as (port, http_port),
        channel(f"127.0.0.1:{port}", SecurityConfig()) as to_gateway,
    ):
        stub: Any = RolloutServiceStub(to_gateway)
        assert await ask(http_port, prompt, 16) == start
        await push(to_gateway, 1, "policy_trained")
        sampling = tpb.SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, seed=1)
        call = stub.Generate(
            rpb.GenerateRequest(token_ids=rpb.TokenIds(ids=prompt), sampling=sampling),
            timeout=patient(30),
        )
        pieces = aiter(call)
        await anext(pieces)
        status = await stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        scheduler = scheduler_of(status.workers[0].pid)
        scheduler.suspend()
        committing = asyncio.create_task(commit(to_gateway, 1))
        await asyncio.wait((committing,), timeout=1)
        assert not committing.done()
        scheduler.kill()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in pieces:
                pass
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        details = rpc_status.from_call(raised.value).details
        assert any(detail.Is(RetryInfo.DESCRIPTOR) for detail in details)
        await committing  # the call was repeated: the new SGLang loads the committed set
        assert await ask(http_port, prompt, 16) == trained


CONTEXT = tpb.CommandContext(run_id="restart", step=0, epoch=1)


async def push(to_gateway: grpc.aio.Channel, version: int, policy: str) -> None:
    """Pushes a policy of the demo as this version."""
    tensors = list(decode_safetensors((DEMO / policy / "model.safetensors").read_bytes()).values())
    manifest = build_manifest(pb.WEIGHT_TARGET_POLICY, version, tensors)
    await push_weights(to_gateway, manifest, tensors, CONTEXT)


async def commit(to_gateway: grpc.aio.Channel, policy: int) -> None:
    await commit_versions(to_gateway, CONTEXT, VersionSet(policy, policy, 0))


async def ask(port: int, prompt: list[int], count: int) -> list[int]:
    """Greedy token ids over HTTP."""
    body = {"model": "policy_start", "prompt": prompt, "temperature": 0, "max_tokens": count}
    body |= {"ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=patient(150)
    ) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def started_host(folder: Path) -> subprocess.Popen[bytes]:
    """The process of an engine worker that starts SGLang; no gateway reads its messages."""
    spec = SGLangSpec(
        model_dir=str(DEMO / "policy_start"), drafter="off", device="cpu", max_sequence_tokens=256
    )
    worker = WorkerSpec(worker_index=0, kind="sglang", engine=spec.model_dump(mode="json"))
    worker.write(folder / "spec.json")
    environment = {
        **child_environment(),
        SPEC_VARIABLE: str(folder / "spec.json"),
        SOCKET_VARIABLE: f"ipc://{folder / 'socket'}",
    }
    return subprocess.Popen([sys.executable, "-m", find_engine("sglang").process], env=environment)


def begun(process: psutil.Process, library: str) -> bool:
    """Whether SGLang has spawned the process, and the process has loaded the library."""
    try:
        if "spawn_main" not in "".join(process.cmdline()):
            return False
        return not library or any(library in one.path for one in process.memory_maps())
    except psutil.Error:  # the process is between fork and exec
        return False


@pytest.mark.parametrize("loaded", ["", "libtorch_cpu"], ids=["as they begin", "as they import"])
def test_a_host_that_is_killed_while_sglang_starts_leaves_none_of_its_processes(
    tmp_path: Path, loaded: str
) -> None:
    host = started_host(tmp_path)
    of_host = psutil.Process(host.pid)
    until = time.monotonic() + patient(120)
    while not any(begun(one, loaded) for one in of_host.children()):  # the scheduler
        assert host.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    of_host.suspend()  # it spawns no other process meanwhile
    family = of_host.children(recursive=True)
    host.kill()
    host.wait()
    _, left = psutil.wait_procs(family, timeout=patient(20))
    for one in left:
        one.kill()
    assert left == []
