"""A service that kept failing: the run ends with the cause, not only with the time spent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.config import SecurityConfig
from paceline.errors import DeadlineExceeded, PacelineError, ResourceExhausted
from paceline.local.news import news_pipe
from paceline.local.ports import free_port
from paceline.local.processes import NEWS_VARIABLE
from paceline.rpc import Server, channel
from paceline.rpc.progress import Activity, add_progress
from paceline.services.coordinator.calls.base import Calls, Peers, Reported
from paceline.services.coordinator.calls.executor import await_service
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import Service
from paceline.streams.connection import REDIS_FULL
from paceline.v1.progress_pb2 import GetProgressResponse
from paceline.whole_files import DISK_FULL

LIMIT_S = 120.0
UNUSED = cast(Any, None)
OPEN = SecurityConfig(run_tokens=False)
NO_SPACE = "No space left on device"


class Trainer:
    """A policy trainer that is healthy at once and fails when it is called."""

    def __init__(self) -> None:
        self.emitted: list[Event] = []
        self.now = 0.0
        config = CoordinatorConfig(tasks_path="tasks", service_recovery_s=LIMIT_S)
        peers = cast(Peers, SimpleNamespace(unhealthy=self._unhealthy))
        self._calls = Calls(
            config, peers, UNUSED, UNUSED, self.emitted.append, lambda: self.now, UNUSED
        )

    def called(self) -> AbstractContextManager[None]:
        command = cast(Any, SimpleNamespace(epoch=1))
        return self._calls.reported(Service.POLICY_TRAINER, "policy", command, deadline_s=1.0)

    def fails_of(self, error: PacelineError) -> None:
        with pytest.raises(Reported), self.called():
            raise error

    def speak_to(self, peers: Peers) -> None:
        """Uses these peers from now on."""
        self._calls.peers = peers

    async def awaited(self) -> Event:
        """Return the event that the wait emits."""
        await await_service(self._calls, commands.AwaitService(Service.POLICY_TRAINER))
        return self.emitted[-1]

    async def _unhealthy(self, service: Service, left_s: float) -> dict[int, PacelineError]:
        return {}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Lines that the supervisor received."""
    reading, writing = news_pipe()
    monkeypatch.setenv(NEWS_VARIABLE, str(writing))
    yield lambda: os.read(reading, 1 << 16).decode().splitlines()
    os.close(reading)
    os.close(writing)


async def test_a_run_that_waited_in_vain_says_what_the_service_failed_of() -> None:
    trainer = Trainer()
    trainer.fails_of(ResourceExhausted("too many versions are in flight", seen="p3, p4"))
    trainer.now = LIMIT_S + 1
    failed = await trainer.awaited()
    assert isinstance(trainer.emitted[0], events.ServiceLost)
    assert isinstance(failed, events.CallFailed)
    assert "policy_trainer kept failing" in failed.message
    assert "p3, p4" in failed.message


@pytest.mark.parametrize("reason", [DISK_FULL, REDIS_FULL])
async def test_a_service_without_room_is_waited_for_as_long_as_that_lasts(
    reason: str, told: Callable[[], list[str]]
) -> None:
    trainer = Trainer()
    full = ResourceExhausted("the spool cannot be written", reason=reason, seen=NO_SPACE)
    for _ in range(3):
        trainer.fails_of(full)
        trainer.now += LIMIT_S - 1
        assert isinstance(await trainer.awaited(), events.ServiceBack)
    assert told() == [f"impaired {full}; the run goes on when there is room"]
    with trainer.called():
        pass
    assert told() == ["recovered policy_trainer has room again"]


@pytest.mark.parametrize("gets_on", [True, False])
async def test_a_service_that_loads_for_longer_is_awaited_while_it_makes_progress(
    gets_on: bool,
) -> None:
    activity, trainer, port = Activity("policy_trainer ranks"), Trainer(), free_port()
    activity.begins("loads the model, 340 of 540 MB")
    if not gets_on:
        activity.moved_s -= LIMIT_S

    async def answer() -> GetProgressResponse:
        return GetProgressResponse(parts=[activity.part()])

    looks = list[float]()

    async def unhealthy(service: Service, left_s: float) -> dict[int, PacelineError]:
        looks.append(left_s)
        trainer.now += left_s
        late = DeadlineExceeded("not healthy", seen=f"{left_s} s")
        return {0: late} if len(looks) < 3 else {}

    server = Server(f"127.0.0.1:{port}", OPEN)
    add_progress(server, answer)
    await server.start()
    async with channel(f"127.0.0.1:{port}", OPEN) as peer:
        peers = SimpleNamespace(unhealthy=unhealthy, channels={Service.POLICY_TRAINER: (peer,)})
        trainer.speak_to(cast(Peers, peers))
        ended = await trainer.awaited()
    await server.stop(0.0)
    assert isinstance(ended, events.ServiceBack if gets_on else events.CallFailed)
    assert len(looks) == (3 if gets_on else 1)
