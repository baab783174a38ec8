"""Which commands are calls, and how calls end."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from paceline.local.patience import patient
from paceline.services.coordinator.calls.executor import CALLS, Executor
from paceline.services.coordinator.machine import commands
from paceline.services.coordinator.machine.state import Service

RUNNERS_OWN = {commands.BeginStep, commands.CloseStep, commands.FinishRun, commands.Refuse}


def test_every_command_is_a_call_or_the_runners_own() -> None:
    bases = {commands.Command, commands.StepCommand}
    declared = {each for each in vars(commands).values() if isinstance(each, type)}
    every = {each for each in declared if issubclass(each, commands.Command)} - bases
    assert set(CALLS) | RUNNERS_OWN == every
    assert not set(CALLS) & RUNNERS_OWN


class Deaf:
    """Calls that a cancellation does not end, until they are let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.begun = 0

    async def call(self, calls: Any, command: Any) -> None:
        self.begun += 1
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                pass


@pytest.fixture
async def deaf(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deaf]:
    found = Deaf()
    monkeypatch.setitem(CALLS, commands.AwaitService, found.call)
    yield found
    found.let_go.set()


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with capture_logs() as told:
        yield told


async def test_calls_that_do_not_end_are_named_at_the_deadline_and_one_that_was_replaced_too(
    deaf: Deaf, lines: list[Any]
) -> None:
    executor = Executor(cast(Any, None), lambda defect: None)
    for service in (Service.GATEWAY, Service.GATEWAY, Service.DRAFTER_TRAINER):
        executor.execute(commands.AwaitService(service), contextvars.copy_context())
        await asyncio.sleep(0)
    assert deaf.begun == 3
    await asyncio.wait_for(executor.close(0.05), patient(10))
    (told,) = lines
    gateway, drafter = f"AwaitService {Service.GATEWAY}", f"AwaitService {Service.DRAFTER_TRAINER}"
    assert (told["event"], told["after_s"]) == ("calls did not end in time", 0.05)
    assert told["calls"] == sorted([gateway, gateway, drafter])
    deaf.let_go.set()
    await asyncio.wait_for(executor.close(patient(10)), patient(20))
    assert len(lines) == 1
