"""A drafter of another kind, pushed and committed over gRPC, serves on every worker, also on a
replaced one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from twin_kind import TwinNet

from paceline.local.patience import patient
from paceline.models.config import read_config
from paceline.services.drafter_trainer.driver import push_drafter
from paceline.services.drafter_trainer.messages import Judged
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.weights import commit_versions
from paceline.whole_files import write_hashes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
POLICY = ROOT / "examples" / "demo" / "policy_start"
CONTEXT = tpb.CommandContext(run_id="local", step=1, epoch=1)


async def trained_rounds(served: Any, arm: str) -> int:
    """Rounds of a trained drafter in a completion with a forced arm."""
    sampling = tpb.SamplingParams(temperature=0, max_tokens=20, seed=1, ignore_eos=True)
    request = rpb.GenerateRequest(text="2+2=", sampling=sampling, forced_arm=arm)
    call = served.stub.Generate(request, timeout=patient(20))
    return int([piece.chunk.speculation async for piece in call][-1].trained_rounds)


async def test_a_pushed_kind_serves_also_on_a_worker_that_starts_again(
    serve_gateway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Worker processes import the user's kind like any module.
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    )
    candidate = tmp_path / "candidate"
    TwinNet(read_config(POLICY), seed=1).save(candidate)
    write_hashes(candidate)
    settings = {
        "model": str(POLICY),
        "drafter": "eagle",
        "speculation": {"arms": ["eagle:3_1_4", "twin:3_1_4"]},
        "engine": {
            "kind": "embedded",
            "workers": 1,
            "max_sequence_tokens": 64,
            "embedded": {"more_drafters": ["twin_kind:KIND"]},
        },
    }
    async with serve_gateway(**settings) as served:
        with pytest.raises(grpc.aio.AioRpcError, match="it rests"):
            await trained_rounds(served, "twin:3_1_4")
        judged = Judged("promoted", "twin", 1, lm_head_hash="00ff", path=str(candidate))
        await push_drafter(served.channel, judged, CONTEXT)
        await commit_versions(served.channel, CONTEXT, VersionSet(1, 0, 1), pb.PAUSE_MODE_IN_PLACE)
        worker = (await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))).workers[
            0
        ]
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(patient(60)):
            while True:
                now = (
                    await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
                ).workers[0]
                if now.ready and now.pid != worker.pid and now.health.versions.drafter == 1:
                    break
        assert await trained_rounds(served, "twin:3_1_4") > 0
