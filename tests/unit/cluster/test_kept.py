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
from paceline.local.launch import ChildEvent, Launch

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


async def test_a_node_that_ray_calls_dead_is_lost_at_once(tmp_path: Path) -> None:
    """Another keeper, which would have no node, is not waited for."""
    placed: list[ServiceOrder] = []

    from ray.exceptions import RayActorError

    async def dead(*_: object) -> str:
        raise RayActorError(error_msg="The actor died because its node has died. Node Id: 32ab")

    def keeper(order: ServiceOrder) -> Any:
        placed.append(order)
        made = silent_keeper(order)
        made.look = SimpleNamespace(remote=dead)
        return made

    around = asyncio.get_running_loop().create_future()
    around.set_result({})
    order = ServiceOrder("gateway", str(tmp_path), str(tmp_path), host="10.0.0.2")
    lost: set[str] = set()
    service = KeptService(Launch("gateway", ()), order, [], keeper, around, print, lost)
    with pytest.raises(Unavailable, match=r"gateway is lost.*its node has died") as raised:
        await service.run()
    assert raised.value.reason == START_AGAIN
    assert (len(placed), lost) == (1, {"10.0.0.2"})


async def test_a_keeper_on_a_node_that_is_lost_is_not_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services beside the one that found it lost: without an answer each had been waited for."""
    monkeypatch.setenv("PACELINE_PATIENCE", "0.01")
    killed: list[Any] = []
    monkeypatch.setattr("ray.kill", killed.append)
    told: list[ChildEvent] = []
    lost: set[str] = set()

    def kept(name: str) -> KeptService:
        around = asyncio.get_running_loop().create_future()
        around.set_result({})
        order = ServiceOrder(name, str(tmp_path), str(tmp_path), host="10.0.0.2")
        return KeptService(Launch(name, ()), order, [], silent_keeper, around, told.append, lost)

    first, second = kept("policy_trainer"), kept("drafter_trainer")
    beside = asyncio.create_task(second.run())
    with pytest.raises(Unavailable, match="policy_trainer is lost"):
        await first.run()
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
    for one in (first, second):
        await one.stop(20.0)  # the keeper has no `stop` that could be asked
    assert len(killed) == 2
    assert [one.detail for one in told] == ["its node is lost: it ends there by itself"] * 2
