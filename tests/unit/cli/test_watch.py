"""Following a run over a real socket and a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.access import coordinator_of
from paceline.cli.active import read_figures, show_status
from paceline.cli.live import RunState, follow
from paceline.config import ServiceConfig
from paceline.events import FactPublisher
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.rpc import Server
from paceline.rpc.progress import add_progress
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from paceline.v1.progress_pb2 import GetProgressResponse, Part
from paceline.v1.trajectory_pb2 import CommandContext, VersionSet

RUN = "demo-0-1"


def record(step: int) -> pb.StepRecord:
    return pb.StepRecord(step=step, step_s=1.0, versions=VersionSet(policy=step))


class Finished(CoordinatorServiceServicer):
    """Serves the steps that a subscriber missed."""

    def __init__(self) -> None:
        self.records: list[pb.StepRecord] = []
        self.phase = "rollout"
        self.asked = asyncio.Event()

    async def GetSnapshot(
        self, request: pb.GetSnapshotRequest, context: Any
    ) -> pb.GetSnapshotResponse:
        self.asked.set()
        return pb.GetSnapshotResponse(
            run_id=RUN,
            step=len(self.records),
            total_steps=9,
            phase=self.phase,
            slots=[pb.SlotRange(first=0, count=1, holder=pb.HOLDER_DRAFTER, epoch=7)],
            last_step=self.records[-1] if self.records else None,
        )

    async def ListSteps(self, request: pb.ListStepsRequest, context: Any) -> pb.ListStepsResponse:
        first = request.from_step
        return pb.ListStepsResponse(steps=self.records[first : first + 3])


@pytest.fixture
async def run() -> AsyncIterator[tuple[ServiceConfig, Finished, FactPublisher]]:
    addresses = {
        "coordinator": f"127.0.0.1:{free_port()}",
        "events": f"tcp://127.0.0.1:{free_port()}",
    }
    config = ServiceConfig.model_validate({"run": {"id": RUN}, "addresses": addresses})
    servicer, server = Finished(), Server(config.addresses.coordinator, config.security)
    server.add(add_CoordinatorServiceServicer_to_server, servicer, "paceline.v1.CoordinatorService")
    gateway = Part(name="gateway", counts={"offers": 2, "requests_waiting": 0, "open_groups": 1})

    async def progress() -> GetProgressResponse:
        return GetProgressResponse(parts=[Part(name="coordinator", counts={"steps": 9}), gateway])

    add_progress(server, progress)
    await server.start()
    with FactPublisher(config.addresses.events, RUN) as facts:
        yield config, servicer, facts
    await server.stop(0.1)


def test_a_step_is_told_once_and_a_missed_one_closes_the_gap() -> None:
    told: list[int] = []
    state = RunState(RUN, 10, lambda one: told.append(one.step))
    for step in (1, 1, 0, 3, 0, 1):
        state.apply_record(record(step))
    assert (told, state.complete, state.ahead) == ([1, 0, 3], 2, {3})


def test_a_run_that_has_not_begun_says_nothing_about_its_length() -> None:
    state = RunState(RUN, 10, lambda _: None)
    state.apply_snapshot(pb.GetSnapshotResponse(phase="new", total_steps=1))
    assert (state.total_steps, state.phase) == (10, "starting")
    state.apply_snapshot(pb.GetSnapshotResponse(phase="evaluate", total_steps=12))
    assert (state.total_steps, state.phase) == (12, "evaluate")


def test_a_run_that_comes_to_rest_is_shown_as_paused_until_it_goes_on() -> None:
    state = RunState(RUN, 9, lambda record: None)
    state.apply_fact(pb.Fact(slots=[pb.SlotRange(first=0, count=2, holder=pb.HOLDER_POLICY)]))
    rests = [pb.SlotRange(first=0, count=2, holder=pb.HOLDER_ENGINE)]
    phases = []
    for fact in (
        pb.Fact(slots=rests, paused=True),
        pb.Fact(services_away=pb.ServicesAway(services=["drafter_trainer"])),
        pb.Fact(paused=False),
        pb.Fact(step_began=pb.StepBegan(samples=8)),
    ):
        state.apply_fact(fact)
        phases.append(state.phase)
    assert phases == ["paused", "paused", "ready", "rollout"]


def test_a_failed_run_that_begins_again_is_not_failed() -> None:
    state = RunState(RUN, 10, lambda _: None)
    state.apply_fact(pb.Fact(run_finished=pb.RunFinished(failure="the gateway kept failing")))
    assert state.phase == "failed"
    state.apply_fact(pb.Fact(context=CommandContext(step=4), step_began=pb.StepBegan(samples=8)))
    assert (state.failure, state.phase) == ("", "rollout")


async def publish_until(facts: FactPublisher, fact: pb.Fact, done: asyncio.Event) -> None:
    """A subscriber joins at its own time: facts before that are lost, as in a real run."""
    while not done.is_set():
        await facts.publish(fact)
        try:
            await asyncio.wait_for(done.wait(), 0.05)
        except TimeoutError:
            continue


async def test_missed_steps_are_asked_for_page_by_page_and_each_is_told_once(
    run: tuple[ServiceConfig, Finished, FactPublisher],
) -> None:
    config, servicer, facts = run
    told, heard = [], asyncio.Event()

    def on_record(finished: pb.StepRecord) -> None:
        told.append(finished.step)
        if finished.step == 7:
            heard.set()

    state = RunState(RUN, 9, on_record)
    following = asyncio.create_task(follow(config, state))
    await asyncio.wait_for(servicer.asked.wait(), patient(10))
    servicer.records = [record(step) for step in range(7)]  # finished while nobody listened
    fact = pb.Fact(
        context=CommandContext(run_id=RUN, step=7), step_finished=pb.StepFinished(record=record(7))
    )
    await asyncio.wait_for(publish_until(facts, fact, heard), patient(10))
    assert told == list(range(8))
    await facts.publish(pb.Fact(run_finished=pb.RunFinished()))
    await asyncio.wait_for(following, patient(10))
    assert state.phase == "finished"


async def test_a_finished_run_that_is_resumed_with_more_steps_is_followed(
    run: tuple[ServiceConfig, Finished, FactPublisher],
) -> None:
    config, servicer, facts = run
    servicer.phase, shown = "finished", asyncio.Event()
    state = RunState(RUN, 9, lambda _: shown.set())
    following = asyncio.create_task(follow(config, state))
    await asyncio.wait_for(servicer.asked.wait(), patient(10))
    fact = pb.Fact(
        context=CommandContext(run_id=RUN), step_finished=pb.StepFinished(record=record(0))
    )
    await asyncio.wait_for(publish_until(facts, fact, shown), patient(10))
    await facts.publish(pb.Fact(run_finished=pb.RunFinished()))
    await asyncio.wait_for(following, patient(10))


async def test_a_run_without_a_coordinator_is_followed_once_it_speaks() -> None:
    addresses = {
        "coordinator": f"127.0.0.1:{free_port()}",
        "events": f"tcp://127.0.0.1:{free_port()}",
    }
    config = ServiceConfig.model_validate({"run": {"id": RUN}, "addresses": addresses})
    began = asyncio.Event()
    state = RunState(RUN, 9, lambda _: began.set())
    following = asyncio.create_task(follow(config, state))
    with FactPublisher(config.addresses.events, RUN) as facts:
        fact = pb.Fact(
            context=CommandContext(run_id=RUN), step_finished=pb.StepFinished(record=record(0))
        )
        await asyncio.wait_for(publish_until(facts, fact, began), patient(20))
        await facts.publish(pb.Fact(run_finished=pb.RunFinished()))
        await asyncio.wait_for(following, patient(20))
    assert state.phase == "finished"


async def test_status_shows_phase_slots_and_the_last_step(
    run: tuple[ServiceConfig, Finished, FactPublisher],
) -> None:
    config, servicer, _ = run
    servicer.records = [record(step) for step in range(3)]
    output = StringIO()
    there = coordinator_of([], config.addresses.coordinator)
    assert await show_status(there, Console(file=output, width=200)) == 0
    lines = output.getvalue().splitlines()
    assert lines[0].split("  ") == [
        f"run {RUN}",
        "step 3 of 9",
        "phase rollout",
        "serving p0.d0 (set 0)",
    ]
    assert any("drafter" in line and "7" in line for line in lines)
    assert lines[-2:-1] == ["gateway: offers 2, open groups 1"]
    assert lines[-1].startswith("last: step 3/9")


async def test_the_pages_figures_come_from_the_coordinator(
    run: tuple[ServiceConfig, Finished, FactPublisher],
) -> None:
    config, _, _ = run
    assert await read_figures(config) == {
        "serving": "p0.d0",
        "promoted": "none",
        "gateway": "offers 2, open groups 1",
        "waits": "coordinator",
    }
