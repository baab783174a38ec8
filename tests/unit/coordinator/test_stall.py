"""The alarm of a stalled run names the service that it waits for; a resting run raises no alarm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from metric_points import points
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.config import AddressesConfig, SecurityConfig
from paceline.local.patience import VARIABLE
from paceline.local.ports import free_port
from paceline.rpc import Server
from paceline.rpc.progress import add_progress
from paceline.services.coordinator import metrics
from paceline.services.coordinator.calls.base import Calls, Peers
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import (
    LearnerTrack,
    Phase,
    RolloutTrack,
    Service,
    State,
)
from paceline.services.coordinator.observed import StallWatch
from paceline.v1.progress_pb2 import GetProgressResponse, Part

ROLLS_OUT = State(phase=Phase.RUNNING, rollouts=RolloutTrack(Phase.ROLLOUT))
TRAINS = State(phase=Phase.RUNNING, learner=LearnerTrack(Phase.POLICY))
COMMITS = State(phase=Phase.RUNNING, learner=LearnerTrack(Phase.COMMIT))
RESTS = State(phase=Phase.PAUSED, paused=True)
BEGAN = events.StepBegan(0.0, 0)
GATEWAY, POLICY = Service.GATEWAY, Service.POLICY_TRAINER
AT_ONCE_S = 1e-9
"""Any time without progress is too long."""


class Watched:
    """The watch of a run."""

    def __init__(self, peers: Peers) -> None:
        config = CoordinatorConfig(tasks_path="tasks", stall_alarm_s=AT_ONCE_S)
        unused = cast(Any, None)
        self._state = State()
        self._watch = StallWatch(
            Calls(config, peers, unused, unused, lambda _: None, lambda: 0.0, lambda: self._state)
        )

    async def told(self, event: Event, state: State) -> GetProgressResponse:
        """Return the progress after one look."""
        self._state = state
        self._watch.observe(event, state)
        await self._watch._look()
        return await self._watch.progress()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    nobody = {service.value: f"127.0.0.1:{free_port()}" for service in Service}
    peers = Peers(AddressesConfig.model_validate(nobody), SecurityConfig())
    yield Watched(peers)  # all services are away
    await peers.close()


async def test_no_progress_is_due_while_a_run_rests_and_it_is_due_again_when_it_goes_on(
    watched: Watched,
) -> None:
    run = ((BEGAN, ROLLS_OUT), (events.Paused(1.0), RESTS), (events.Continued(2.0), ROLLS_OUT))
    progress = [await watched.told(event, state) for event, state in run]
    found = [(bool(one.alarm), one.parts[0].doing) for one in progress]
    doing = "rollout of step 0"
    assert found == [(True, doing), (False, "paused of step 0"), (True, doing)]


@pytest.mark.parametrize(
    ("state", "lost", "named"),
    [
        (ROLLS_OUT, (), GATEWAY),
        (ROLLS_OUT, (POLICY,), POLICY),
        (TRAINS, (), POLICY),
        (TRAINS, (POLICY,), POLICY),
        (TRAINS, (GATEWAY,), GATEWAY),
        (COMMITS, (), GATEWAY),
        (COMMITS, (POLICY,), GATEWAY),  # a commit proceeds without this service
    ],
)
async def test_the_alarm_names_who_is_away_else_who_works(
    watched: Watched, state: State, lost: tuple[Service, ...], named: Service
) -> None:
    progress = await watched.told(BEGAN, replace(state, lost=frozenset(lost)))
    assert progress.parts[0].waits_for == named
    assert f"coordinator waits for {named}" in progress.alarm


async def test_an_alarm_counts_once_for_each_time_that_the_run_stands_still(
    watched: Watched, metric_reader: InMemoryMetricReader
) -> None:
    for _ in range(2):
        assert (await watched.told(BEGAN, ROLLS_OUT)).alarm
        await watched._watch._look()  # it still does
        assert not (await watched.told(events.Paused(1.0), RESTS)).alarm
    assert points(metric_reader, metrics, "alarms") == {("gateway",): 2}


@pytest.mark.parametrize(("patience", "alarms"), [("0.5", True), ("10", False)])
async def test_a_service_that_answers_late_on_a_busy_machine_gets_on(
    monkeypatch: pytest.MonkeyPatch, patience: str, alarms: bool
) -> None:
    async def late() -> GetProgressResponse:
        await asyncio.sleep(0.625)
        return GetProgressResponse(parts=[Part(name=POLICY, doing="trains", still_s=0.0)])

    addresses = {service.value: f"127.0.0.1:{free_port()}" for service in Service}
    server = Server(addresses[POLICY], SecurityConfig())
    add_progress(server, late)
    await server.start()
    peers = Peers(AddressesConfig.model_validate(addresses), SecurityConfig())
    monkeypatch.setattr("paceline.services.coordinator.observed.ASK_S", 0.5)
    monkeypatch.setenv(VARIABLE, patience)
    progress = await Watched(peers).told(BEGAN, TRAINS)
    assert bool(progress.alarm) == alarms
    assert bool(progress.parts[2].trouble) == alarms
    await peers.close()
    await server.stop(0.0)


@pytest.mark.parametrize(("patience", "alarms"), [("1", True), ("1e12", False)])
async def test_a_run_may_stand_still_for_longer_on_a_busy_machine(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, patience: str, alarms: bool
) -> None:
    monkeypatch.setenv(VARIABLE, patience)
    assert bool((await watched.told(BEGAN, ROLLS_OUT)).alarm) == alarms
