"""An operator has workers join a run and leave it, against peers from scripts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from integration.coordinator_world import (
    WAIT_S,
    Script,
    check_slots,
    config_of,
    held,
    journal_of,
    overrides,
    records_of,
    run_to_end,
    running_peers,
    status_of,
)
from integration.test_pause import Work, asked, told

from paceline.cli.choice import resume_run
from paceline.cli.workers import add_workers, drain_workers
from paceline.errors import FailedPrecondition, InvalidInput
from paceline.rpc import rpc_errors
from paceline.services.coordinator.server import serve
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.trajectory_pb2 import PURPOSE_TRAIN

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("no_late_readers")]
NO_DRAFTER = {"drafter_enabled": False}


def adding(count: int) -> Work:
    return lambda coordinator, console: add_workers(coordinator, count, console)


def draining(*workers: int, within_s: float = 0.0) -> Work:
    return lambda coordinator, console: drain_workers(coordinator, workers, within_s, console)


def shares(script: Script) -> dict[int, list[list[int]]]:
    """By step: who was named to get a share of its tasks, at each call."""
    found: dict[int, list[list[int]]] = {}
    for one in script.rollouts:
        if one.purpose == PURPOSE_TRAIN:
            found.setdefault(one.context.step, []).append(list(one.workers))
    return found


async def test_an_added_worker_takes_part_from_the_next_tasks_on_and_a_drained_one_no_more(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(workers=3, vacant={2}, hold_step=1, bubbles=False)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **NO_DRAFTER))
        run = await held(script, config)
        assert "absent" in await status_of(config)
        status, lines = await told(config, adding(1))
        assert (status, lines[0]) == (0, "worker 2 to join")
        assert lines[-1] == "worker 2 there, with a share of the next tasks"
        assert "absent" not in await status_of(config)
        status, lines = await told(config, draining(1, within_s=7.0))
        assert (status, lines[0]) == (0, "worker 1 to leave; workers 0, 2 to stay")
        assert (lines[-1], script.vacant) == ("worker 1 gone", {1})
        assert {"add [2]", "drain [1] 7"} <= {*script.order}
        script.released.set()
        await run
    assert shares(script) == {0: [[0, 1]], 1: [[0, 1], [0, 2]], 2: [[0, 2]]}
    assert script.trained == [0, 1, 2]
    assert [len(groups) for _, groups in script.waited_for] == [2, 2, 2]
    entries = await journal_of(config)
    check_slots(entries, slots=3)
    assert all(one["idle_s"]["absent"] > 0 for one in records_of(entries))


async def test_the_drafter_leaves_the_slot_of_a_worker_that_is_drained(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        run = await held(script, config)  # the drafter trains on the slot of worker 0
        assert (await told(config, draining(0)))[0] == 0
        script.bubbles = False  # a single worker leaves none
        script.released.set()
        await run
    assert script.order.index("drain [0] 0") > script.order.index("draft")
    assert shares(script) == {0: [[]], 1: [[]], 2: [[1]]}  # it had done its share
    entries = await journal_of(config)
    check_slots(entries)
    events = [one["event"] for one in entries]
    asked_at, left_at = events.index("DrainRequested"), events.index("WorkersLeft")
    assert {"Preempted", "Detached"} & {*events[asked_at:left_at]}


async def test_what_was_asked_before_a_coordinator_died_is_done_by_the_next_one(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(workers=3, vacant={2}, hold_step=0, bubbles=False, drain_waits=True)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **NO_DRAFTER))
        stop = asyncio.Event()
        first = asyncio.create_task(serve(config, stop))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        await asked(config, "RequestDrain", pb.RequestDrainRequest(workers=[1], drain_s=0.0))
        await script.until(lambda: "drain [1] 0" in script.order)
        stop.set()
        await first
        script.drain_waits = False
        script.released.set()
        await run_to_end(config)
    assert (script.order.count("drain [1] 0"), script.vacant) == (2, {1, 2})
    assert shares(script)[2] == [[0]]
    check_slots(await journal_of(config), slots=3)


async def test_workers_come_and_go_in_a_pause(redis_url: str, tmp_path: Path) -> None:
    script = Script(workers=3, vacant={2}, hold_step=0, bubbles=False)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **NO_DRAFTER))
        run = await held(script, config)
        await asked(config, "PauseRun", pb.PauseRunRequest())
        script.released.set()
        await script.until(lambda: script.order[-1] == "resume [0, 1, 2]")
        assert (await told(config, adding(1)))[0] == 0
        assert (await told(config, draining(0)))[0] == 0
        assert "paused" in await status_of(config)
        await told(config, resume_run)
        await run
    assert [shares(script)[step] for step in (1, 2)] == [[[1, 2]], [[1, 2]]]
    check_slots(await journal_of(config), slots=3)


async def test_a_worker_that_does_not_start_is_told_of_and_its_place_stays_vacant(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(workers=3, vacant={2}, hold_step=0, bubbles=False, unwilling={2})
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **NO_DRAFTER))
        run = await held(script, config)
        status, lines = await told(config, adding(1))
        assert (status, "worker 2 not started" in lines[-1]) == (1, True)
        script.unwilling.clear()
        assert (await told(config, adding(1)))[0] == 0
        script.released.set()
        await run
    assert shares(script) == {0: [[0, 1]], 1: [[]], 2: [[]]}


@pytest.mark.parametrize(
    ("name", "request_", "kind", "message"),
    [
        ("RequestWorkers", pb.RequestWorkersRequest(), InvalidInput, "seen: 0; allowed: 1 or more"),
        (
            "RequestWorkers",
            pb.RequestWorkersRequest(count=2),
            FailedPrecondition,
            "seen: 2; allowed: 1; gateway.engine.most_workers",
        ),
        ("RequestDrain", pb.RequestDrainRequest(), InvalidInput, "seen: 0 workers"),
        (
            "RequestDrain",
            pb.RequestDrainRequest(workers=[0], drain_s=1e9),
            InvalidInput,
            "allowed: 1 or more workers, 0 to 3600 s",
        ),
        (
            "RequestDrain",
            pb.RequestDrainRequest(workers=[2]),
            FailedPrecondition,
            "seen: worker 2; allowed: 0, 1",
        ),
        (
            "RequestDrain",
            pb.RequestDrainRequest(workers=[0, 1]),
            FailedPrecondition,
            "seen: drain 0, 1; allowed: all but one of 0, 1",
        ),
    ],
)
async def test_what_cannot_be_is_refused_with_what_may_be(
    redis_url: str, tmp_path: Path, name: str, request_: object, kind: type, message: str
) -> None:
    script = Script(workers=3, vacant={2}, hold_step=0, bubbles=False)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1, **NO_DRAFTER))
        run = await held(script, config)
        with pytest.raises(kind, match=message), rpc_errors():
            await asked(config, name, request_)
        script.released.set()
        await run


async def test_a_gateway_of_several_processes_keeps_its_workers(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(hold_step=0, bubbles=False, elastic=False)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **NO_DRAFTER))
        run = await held(script, config)
        for work in (adding(1), draining(0)):
            with pytest.raises(FailedPrecondition, match=r"gateway\.replicas"):
                await told(config, work)
        script.released.set()
        await run
