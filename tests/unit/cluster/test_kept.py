"""What becomes of a service whose keeper says nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_nodes import WITH_RAY

from paceline.cluster.kept import KeptService
from paceline.cluster.order import START_AGAIN, ServiceOrder
from paceline.errors import Unavailable
from paceline.local.launch import Launch

pytestmark = WITH_RAY


def silent_keeper(_: ServiceOrder) -> Any:
    """A handle as Ray's, of a keeper that is cut off after its beginning."""

    async def begun(_: object) -> dict[str, str]:
        return {}

    def look(*_: object) -> asyncio.Future[str]:
        return asyncio.get_running_loop().create_future()

    return SimpleNamespace(begin=SimpleNamespace(remote=begun), look=SimpleNamespace(remote=look))


async def test_a_keeper_that_does_not_answer_has_the_run_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PATIENCE", "0.01")  # of its 30 s
    around = asyncio.get_running_loop().create_future()
    around.set_result({})
    order = ServiceOrder("gateway", str(tmp_path), str(tmp_path))
    service = KeptService(Launch("gateway", ()), order, [], silent_keeper, around, print)
    with pytest.raises(Unavailable, match=r"gateway is lost.*does not answer") as lost:
        await service.run()
    assert lost.value.reason == START_AGAIN
