"""An operator pauses and continues a run, against scripted peers."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from integration.coordinator_world import (
    WAIT_S,
    Script,
    check_slots,
    config_of,
    held,
    journal_of,
    overrides,
    run_to_end,
    running_peers,
    status_of,
)
from rich.console import Console

from paceline.cli.access import Coordinator, coordinator_of
from paceline.cli.active import pause_run, resume_run, stop_run
from paceline.errors import FailedPrecondition
from paceline.services.coordinator import server
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.server import serve
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import rollout_pb2
from paceline.v1.coordinator_pb2_grpc import CoordinatorServiceStub

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_late_readers")]


class Told(io.StringIO):
    """Output of a command; `waits` is set with its second line, which reports that it waits."""

    def __init__(self, waits: asyncio.Event | None) -> None:
        super().__init__()
        self.waits = waits

    def write(self, text: str, /) -> int:
        written = super().write(text)
        if self.waits is not None and "waiting" in self.getvalue():
            self.waits.set()
        return written


Work = Callable[[Coordinator, Console], Coroutine[Any, Any, int]]


async def told(
    config: CoordinatorConfig, work: Work, waits: asyncio.Event | None = None
) -> tuple[int, list[str]]:
    """The exit status of a command and its output; `waits` is set when the command reports that it
    waits.
    """
    out = Told(waits)
    console = Console(file=out, width=200)
    status = await work(coordinator_of([], config.addresses.coordinator), console)
    return status, out.getvalue().splitlines()


async def asked(config: CoordinatorConfig, name: str, request: Any) -> Any:
    """The coordinator's answer to a call."""
    async with coordinator_of([], config.addresses.coordinator).channel() as to:
        stub: Any = CoordinatorServiceStub(to)  # type: ignore[no-untyped-call]
        return await getattr(stub, name)(request, timeout=WAIT_S)


async def test_a_paused_run_rests_after_its_step_lends_no_worker_and_goes_on_when_resumed(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        run = await held(script, config)
        await asked(config, "PauseRun", pb.PauseRunRequest())
        assert "paused after the steps in progress" in await status_of(config)
        pausing = asyncio.create_task(told(config, pause_run, waits := asyncio.Event()))
        await asyncio.wait_for(waits.wait(), WAIT_S)
        script.released.set()
        status, lines = await pausing
        assert (status, lines[0]) == (0, "the run pauses after 2 steps")
        rests = "the run is paused after 2 steps, of 3; to continue: paceline resume"
        assert (lines[1], lines[-1]) == ("waiting for step 1: rollout", rests)
        await script.until(lambda: script.order[-1] == "resume [0, 1]")
        await script.traffic.put(rollout_pb2.WatchTrafficResponse(requests=1, epoch=1))
        await script.until(lambda: script.order[-1] == "resume []")  # callers still wait
        shown = await status_of(config)
        assert "phase paused" in shown
        assert "paused; to continue: paceline resume" in shown
        assert "engine" in shown
        assert await told(config, pause_run) == (0, [lines[0], rests])
        assert await told(config, resume_run) == (0, ["the run continues"])
        assert await told(config, resume_run) == (0, ["the run was not paused and continues"])
        await run
    assert [seq for seq, _, _ in script.commits] == [1, 2, 3]
    entries = await journal_of(config)
    check_slots(entries)
    operators = [one["event"] for one in entries if one["event"] in ("Paused", "Continued")]
    assert operators == [*["Paused"] * 3, *["Continued"] * 2]
    at_rest = [one["event"] for one in entries if one["phase"] == "paused"]
    assert [one for one in at_rest if one != "Detached"] == ["Committed", "Paused"]


@pytest.mark.parametrize("snapshot_entries", [1, 1000])
async def test_a_paused_run_is_still_paused_when_its_coordinator_starts_again(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot_entries: int
) -> None:
    monkeypatch.setattr(CoordinatorConfig, "snapshot_entries", snapshot_entries)
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        stop = asyncio.Event()
        first = asyncio.create_task(serve(config, stop))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        pausing = asyncio.create_task(told(config, pause_run, waits := asyncio.Event()))
        await asyncio.wait_for(waits.wait(), WAIT_S)
        script.released.set()
        assert (await pausing)[0] == 0
        await script.until(lambda: script.order[-1] == "resume [0, 1]")
        stop.set()
        await first
        handed_back = len(script.order)
        run = asyncio.create_task(run_to_end(config))
        await script.until(lambda: len(script.order) > handed_back)
        found = await asked(config, "GetSnapshot", pb.GetSnapshotRequest())
        assert (found.phase, found.paused, found.step) == ("paused", True, 1)
        assert (script.order[handed_back:], len(script.commits)) == (["resume []"], 1)
        assert (await told(config, resume_run))[0] == 0
        await run
    assert len(script.commits) == 3


async def test_a_paused_run_that_is_told_to_stop_ends_and_cannot_be_paused_any_more(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FINISH_GRACE_S", WAIT_S)
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        stop = asyncio.Event()
        run = asyncio.create_task(serve(config, stop))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        pausing = asyncio.create_task(told(config, pause_run, waits := asyncio.Event()))
        await asyncio.wait_for(waits.wait(), WAIT_S)
        script.released.set()
        assert (await pausing)[0] == 0
        status, lines = await told(config, stop_run)
        assert (status, lines[-1]) == (0, "the run has ended after 1 steps")
        for work in (pause_run, resume_run):
            live = "running, paused, evaluate, closing"
            message = f"no run goes on; seen: finished; allowed: phase {live}"
            with pytest.raises(FailedPrecondition, match=message):
                await told(config, work)
        stop.set()
        await run
    assert len(script.commits) == 1


async def test_a_run_in_its_last_step_is_not_paused_and_says_why(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        run = await held(script, config)
        with pytest.raises(FailedPrecondition, match="1 of 1 steps have begun, rollout"):
            await told(config, pause_run)
        script.released.set()
        await run
    assert "paused" not in {one["phase"] for one in await journal_of(config)}


async def test_who_waits_for_a_pause_hears_that_it_was_taken_back(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        run = await held(script, config)
        pausing = asyncio.create_task(told(config, pause_run, waits := asyncio.Event()))
        await asyncio.wait_for(waits.wait(), WAIT_S)
        assert (await told(config, resume_run))[0] == 0
        status, lines = await pausing
        assert (status, lines[-1]) == (1, "the run is not paused any more")
        script.released.set()
        await run
