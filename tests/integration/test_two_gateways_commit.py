"""A set serves at all gateways or at none: two real receivers behind the coordinator's call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from integration.weight_receivers import CONTEXT, P, Receiver, receivers

from paceline.services.coordinator.calls.base import Calls, Reported
from paceline.services.coordinator.calls.weights import commit
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.settings import CommitMode
from paceline.trajectory import VersionSet

FORMER, NEW = VersionSet(1, 1, 0), VersionSet(2, 2, 0)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[list[Receiver]]:
    """Two gateways' receivers with one worker each. Both serve the former set."""
    async with AsyncExitStack() as stack:
        found = []
        for name in ("gateway", "gateway-1"):
            start = await stack.enter_async_context(receivers(tmp_path / name))
            receiver = await start()
            await receiver.push(P, 1)
            await receiver.commit(1, 1, 0)
            found.append(receiver)
        yield found


async def committed(pair: list[Receiver], leased: tuple[int, ...] = ()) -> list[Any]:
    """The events of a commit of the new set."""
    emitted: list[Any] = []
    config = CoordinatorConfig(tasks_path="tasks", drafter_enabled=False)
    peers = SimpleNamespace(gateways=tuple(one.channel for one in pair))
    settings = SimpleNamespace(workers=2)
    state = SimpleNamespace(versions=FORMER, settings=settings, commit_mode=CommitMode.IN_PLACE)
    unused = cast(Any, None)
    calls = Calls(
        config, cast(Any, peers), unused, unused, emitted.append, lambda: 0.0, lambda: state
    )
    command = commands.Commit(CONTEXT.step, CONTEXT.epoch, NEW, leased)
    with suppress(Reported):  # as the coordinator's caller does
        await commit(calls, command)
    return emitted


def served(pair: list[Receiver]) -> list[list[VersionSet]]:
    """The sets that each gateway has served since the former set."""
    return [[fact[1] for fact in one.hooks.told if fact[0] == "commit"][1:] for one in pair]


async def test_a_set_that_all_gateways_have_serves_at_all(pair: list[Receiver]) -> None:
    for one in pair:
        await one.push(P, 2)
    assert await committed(pair) == [events.Committed(0.0, NEW)]
    assert [one.spool.sets.serving for one in pair] == [NEW, NEW]


async def test_a_set_that_the_second_gateway_refuses_serves_at_none(pair: list[Receiver]) -> None:
    await pair[0].push(P, 2)
    (failed,) = await committed(pair)
    assert isinstance(failed, events.CommitFailed)
    assert "policy version is not prepared" in failed.message
    assert served(pair) == [[NEW, FORMER], []]
    assert [one.spool.sets.serving for one in pair] == [FORMER, FORMER]
    await pair[1].push(P, 2)
    assert await committed(pair) == [events.Committed(0.0, NEW)]


async def test_the_gateway_with_a_free_worker_judges_a_set(pair: list[Receiver]) -> None:
    await pair[0].push(P, 2)
    (failed,) = await committed(pair, leased=(0,))
    assert isinstance(failed, events.CommitFailed)
    assert served(pair) == [[], []], "the second gateway refused it before the first was asked"
