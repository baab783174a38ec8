"""The coordinator has a real gateway turn off the paths that an audit found inexact."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from examples.scripted_engine.engine import SCRIPTED_PATH
from paceline.config import SecurityConfig
from paceline.errors import FailedPrecondition, InvalidInput
from paceline.local.patience import patient
from paceline.rpc import leased, rpc_errors
from paceline.services.rollout_gateway.calls.call import Call, Plan
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

EAGLE, NGRAM = "eagle:3_1_4", "ngram:4_1_5"


def asked(served: Any, *paths: str, epoch: int = 1) -> rpb.QuarantineRequest:
    context = leased(SecurityConfig(), served.config.run.id, 0, epoch)
    return rpb.QuarantineRequest(context=context, paths=paths)


async def arms_used(served: Any, forced: str = "") -> set[str]:
    """Arms of the rounds that draw from now on."""
    used: set[str] = set()
    for _ in range(12):
        request = rpb.GenerateRequest(
            text="1+1=",
            sampling=tpb.SamplingParams(temperature=1.0, max_tokens=32, seed=1),
            forced_arm=forced,
        )
        async for piece in served.stub.Generate(request, timeout=patient(20)):
            used |= {span.arm for span in piece.chunk.draw_spans}
    return used


async def test_arms_in_quarantine_draft_nothing_on_any_worker_whoever_asks_for_them(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script["arms"] = ["off", EAGLE, NGRAM]
    async with serve_gateway(speculation={"bandit": {"epsilon": 1.0}}) as served:
        assert EAGLE in await arms_used(served)
        answer = await served.stub.Quarantine(asked(served, f"arm={EAGLE}"))
        assert list(answer.unmet) == []
        assert EAGLE not in await arms_used(served)
        assert await arms_used(served, forced=EAGLE) == {"off"}

        status = await served.stub.GetStatus(rpb.GetStatusRequest())
        os.kill(status.workers[0].pid, signal.SIGKILL)
        assert EAGLE not in await arms_used(served)  # by the replacement worker

        await served.stub.Quarantine(asked(served, f"arm={NGRAM}", "reused"))
        assert await arms_used(served) == {"off"}
        assert served.config.engine.workers == 1


async def test_a_worker_obeys_a_quarantine_that_comes_while_the_worker_is_equipped(
    model_dir: Path, script: dict[str, Any]
) -> None:
    path = model_dir.parent / "script.json"
    path.write_text(json.dumps(script | {"arms": ["off", EAGLE, NGRAM]}))
    settings = {
        "model": str(model_dir),
        "engine": {"kind": SCRIPTED_PATH, "workers": 1, "options": {"file": str(path)}},
        "speculation": {"forced_arm": EAGLE},
    }
    gateway = Gateway(GatewayConfig.model_validate(settings))
    equip = gateway.router.on_ready
    assert equip is not None

    async def equip_slowly(process: WorkerProcess) -> None:
        await equip(process)
        await gateway.quarantined.add([f"arm={EAGLE}"])

    gateway.router.on_ready = equip_slowly
    try:
        await gateway.start()
        call = Call(gateway, Plan((5, 6), sampling=Sampling(seed=1, max_tokens=8)))
        await call.run()
        assert {span.arm for span in call.whole.draw_spans} == {"off"}
    finally:
        await gateway.stop()


async def test_drafted_stands_for_every_arm_and_what_cannot_be_turned_off_is_told(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script["arms"] = ["off", EAGLE, NGRAM]
    async with serve_gateway() as served:
        request = asked(served, "drafted", "plain", "numbers=int8", "numbers=bfloat16", "swapped")
        answer = await served.stub.Quarantine(request)
        # The next set has no profile; the serving dtype cannot be turned off.
        assert list(answer.unmet) == ["plain", "numbers=bfloat16"]
        assert await arms_used(served) == {"off"}
        again = await served.stub.Quarantine(request)
        assert again == answer


@pytest.mark.few(2)
@pytest.mark.parametrize("path", ["", "arm=", "numbers=", "cache", "ARM=off"])
async def test_a_name_that_is_no_path_is_refused_and_nothing_is_turned_off(
    serve_gateway: Any, script: dict[str, Any], path: str
) -> None:
    script["arms"] = ["off", EAGLE]
    async with serve_gateway(speculation={"forced_arm": EAGLE}) as served:
        with pytest.raises(InvalidInput, match="no such path"), rpc_errors():
            await served.stub.Quarantine(asked(served, "drafted", path))
        assert await arms_used(served) == {EAGLE}


async def test_a_command_of_an_older_lease_is_refused(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        await served.stub.Quarantine(asked(served, "reused", epoch=5))
        with pytest.raises(FailedPrecondition, match="newer lease"), rpc_errors():
            await served.stub.Quarantine(asked(served, "plain", epoch=4))
