"""The end of a service after its keeper falls silent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_nodes import WITH_RAY

from paceline.cluster.keeper import START_AGAIN, KeeperReport, KeptPool, PoolOrder
from paceline.errors import Unavailable
from paceline.local.launch import ChildEvent, Launch
from paceline.ranks.messages import Failed

pytestmark = WITH_RAY
LAUNCH = Launch("rollout", ("",))


def keeper(look: Any) -> Any:
    """Places a keeper with a handle as Ray's: it begins, then answers `look` so."""

    async def begun() -> None:
        return None

    begin = SimpleNamespace(remote=begun)
    return lambda _: SimpleNamespace(begin=begin, look=SimpleNamespace(remote=look))


def silent(*_: object) -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


def order(directory: Path) -> PoolOrder:
    return PoolOrder("rollout", ["gateway"], str(directory), str(directory), host="10.0.0.2")


async def test_a_keeper_that_does_not_answer_has_the_run_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PATIENCE", "0.01")  # of its 30 s
    pool = KeptPool(LAUNCH, order(tmp_path), keeper(silent), print, set())
    with pytest.raises(Unavailable, match=r"gateway is lost.*does not answer") as lost:
        await pool.run()
    assert lost.value.reason == START_AGAIN


async def test_a_keeper_that_dies_is_lost_at_once_with_its_services(tmp_path: Path) -> None:
    from ray.exceptions import RayActorError

    async def dead(*_: object) -> str:
        raise RayActorError(error_msg="The actor died because its node has died. Node Id: 32ab")

    lost: set[str] = set()
    pool = KeptPool(LAUNCH, order(tmp_path), keeper(dead), print, lost)
    with pytest.raises(Unavailable, match=r"gateway is lost.*its node has died") as raised:
        await pool.run()
    assert raised.value.reason == START_AGAIN
    assert lost == {"10.0.0.2"}


async def test_a_keeper_that_is_killed_leaves_the_other_pools_of_its_node_their_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import ActorDiedError

    async def killed(*_: object) -> KeeperReport:
        raise ActorDiedError

    async def well(*_: object) -> KeeperReport:
        await asyncio.sleep(0)
        return KeeperReport(0, healthy=True)

    stops: list[float] = []

    async def stop(grace_s: float) -> None:
        stops.append(grace_s)

    monkeypatch.setattr("ray.kill", lambda _: None)
    lost: set[str] = set()
    actor = keeper(well)(None)
    actor.stop = SimpleNamespace(remote=stop)
    other = KeptPool(LAUNCH, order(tmp_path), lambda _: actor, print, lost)
    running = asyncio.create_task(other.run())
    await other.is_healthy.wait()
    with pytest.raises(Unavailable, match="the keeper of gateway is lost") as raised:
        await KeptPool(LAUNCH, order(tmp_path), keeper(killed), print, lost).run()
    assert raised.value.reason == START_AGAIN
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await other.stop(1.0)
    assert stops == [1.0]


async def test_the_error_of_services_is_raised_after_their_events(tmp_path: Path) -> None:
    told: list[ChildEvent] = []
    event = ChildEvent("gateway", "died", 12, "why")
    failed = Failed.of(0, Unavailable("it dies", reason="SERVICE_FAILED"))

    async def over(*_: object) -> KeeperReport:
        return KeeperReport(1, (event,), False, True, failed)

    pool = KeptPool(LAUNCH, order(tmp_path), keeper(over), told.append, set())
    with pytest.raises(Unavailable, match="it dies") as raised:
        await pool.run()
    assert (raised.value.reason, told) == ("SERVICE_FAILED", [event])


async def test_a_keeper_on_a_node_that_is_lost_is_not_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services beside the pool that was found lost: without an answer each had been waited for."""
    monkeypatch.setenv("PACELINE_PATIENCE", "0.01")
    killed: list[Any] = []
    monkeypatch.setattr("ray.kill", killed.append)
    told: list[ChildEvent] = []
    lost: set[str] = set()
    pool = KeptPool(LAUNCH, order(tmp_path), keeper(silent), told.append, lost)
    with pytest.raises(Unavailable, match="gateway is lost"):
        await pool.run()
    assert lost == {"10.0.0.2"}
    await pool.stop(1.0)
    assert len(killed) == 1
    assert [(event.name, event.kind) for event in told] == [("gateway", "stopped")]
