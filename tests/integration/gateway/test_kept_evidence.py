"""What a gateway's bandits have learned is there when its process is another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration.gateway.conftest import ServeGateway

from paceline.local.patience import patient

ARMS = ("off", "eagle:3_1_4", "ngram:4_1_5")


async def explorations(serve_gateway: ServeGateway) -> int:
    """Of the first rollouts of a gateway."""
    speculation = {"bandit": {"kind": "cost_model", "groups": [1, 8]}}
    async with serve_gateway(speculation=speculation) as served:
        request = served.tasks_request(samples_per_task=8)
        async for response in served.stub.RunTasks(request, timeout=patient(30)):
            if response.WhichOneof("event") == "finished":
                return sum(arm.explorations for arm in response.finished.arms)
    raise AssertionError("the rollouts did not finish")


async def test_a_gateway_that_starts_again_does_not_try_its_arms_anew(
    serve_gateway: ServeGateway, script: dict[str, Any], model_dir: Path
) -> None:
    script |= {
        "arms": ARMS,
        "accept_lengths": {"eagle:3_1_4": 3.0, "ngram:4_1_5": 1.5},
        "costs_s": {},
        "response_tokens": (200, 220),
        "script": [],
    }
    first = await explorations(serve_gateway)
    assert first >= len(ARMS)
    assert await explorations(serve_gateway) < first
    (model_dir.parent / "spool" / "evidence.json").unlink()
    assert await explorations(serve_gateway) >= len(ARMS)
