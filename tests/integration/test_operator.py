"""An operator's commands during a run: rollback, pin and unpin, against scripted peers."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from integration.coordinator_world import (
    WAIT_S,
    Script,
    config_of,
    held,
    journal_of,
    overrides,
    records_of,
    running_peers,
    status_of,
)
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.access import Coordinator, coordinator_of
from paceline.cli.active import (
    Request,
    choose_drafter,
    pause_run,
    resume_run,
    stop_run,
)
from paceline.cli.main import app
from paceline.config import SecurityConfig
from paceline.errors import FailedPrecondition, PacelineError, Unavailable
from paceline.local.ports import free_port
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.server import serve
from paceline.v1 import coordinator_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60), pytest.mark.usefixtures("no_late_readers")]


async def said(config: CoordinatorConfig, request: Request) -> list[str]:
    """Output of the command."""
    told = io.StringIO()
    address = config.addresses.coordinator
    console = Console(file=told, width=200)
    assert await choose_drafter(coordinator_of([], address), request, console) == 0
    return told.getvalue().splitlines()


async def test_paceline_rollback_serves_the_former_drafter_for_a_step(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=2)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=4))
        run = await held(script, config)
        assert await said(config, pb.RollBackRequest()) == [
            "drafter d2 serves; d1 from the next commit on; d3 was promoted and waits for a step",
            "to keep it beyond the next step: paceline drafter pin 1",
        ]
        assert await said(config, pb.RollBackRequest()) == await said(
            config, pb.RollBackRequest(drafter_version=1)
        )
        assert "d1 from the next commit on" in await status_of(config)
        script.released.set()
        await run
    assert script.commits == [(1, 1, 1), (2, 2, 2), (3, 2, 1), (4, 3, 1), (5, 4, 4)]


async def test_a_pin_outlives_the_coordinator_and_stands_in_the_records(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=4))
        stop = asyncio.Event()
        first = asyncio.create_task(serve(config, stop))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        assert await said(config, pb.PinDrafterRequest()) == [
            "drafter d1 serves, pinned; d2 was promoted and waits for unpin"
        ]
        stop.set()
        await first
        script.holding.clear()
        run = await held(script, config)
        assert "drafter d1 serves, pinned" in await status_of(config)
        with pytest.raises(FailedPrecondition, match="a drafter is pinned; seen: d1"):
            await said(config, pb.RollBackRequest())
        script.released.set()
        await run
    assert {drafter for _, _, drafter in script.commits} == {1}
    entries = await journal_of(config)
    assert [record.get("pinned_drafter") for record in records_of(entries)] == [None, *["1"] * 3]
    assert [one["data"] for one in entries if one["event"] == "DrafterChosen"] == [
        {"version": None, "lasting": True},
        {"version": None, "lasting": False},
    ]


async def test_an_unpinned_run_serves_what_was_promoted_meanwhile(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        run = await held(script, config)
        await said(config, pb.PinDrafterRequest(drafter_version=1))
        assert await said(config, pb.UnpinDrafterRequest()) == [
            "drafter d1 serves; d2 was promoted and waits for its own commit"
        ]
        assert await said(config, pb.UnpinDrafterRequest()) == [
            "drafter d1 serves; d2 was promoted and waits for its own commit"
        ]
        script.released.set()
        await run
    assert script.commits == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]


REFUSED: list[tuple[Request, str]] = [
    (pb.RollBackRequest(), "there is no drafter to go back to"),
    (pb.RollBackRequest(drafter_version=7), "no such drafter version is kept; seen: d7"),
    (pb.PinDrafterRequest(drafter_version=7), r"seen: d7; allowed: d0"),
    (pb.RollBackRequest(policy_version=1), "does not go back to an older policy.*paceline stop"),
]


async def test_what_an_operator_cannot_have_is_refused_by_name(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        run = await held(script, config)
        for request, message in REFUSED:
            with pytest.raises(FailedPrecondition, match=message):
                await said(config, request)
        script.released.set()
        await run
    assert script.commits == [(1, 1, 1)]


async def test_a_run_that_ends_first_says_so_to_its_operator(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        stop = asyncio.Event()
        run = asyncio.create_task(serve(config, stop))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        stop.set()
        asked = asyncio.create_task(said(config, pb.UnpinDrafterRequest()))
        await run
        with pytest.raises(PacelineError, match=r"the run has ended|no coordinator answers"):
            await asked


async def test_the_agents_token_chooses_no_drafter(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "operators")
    monkeypatch.setenv("PACELINE_AGENT_TOKEN", "agents")
    monkeypatch.setenv("THEIRS", "agents")
    operator = SecurityConfig()
    async with running_peers(script := Script(hold_step=0), operator) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        run = await held(script, config)
        address = config.addresses.coordinator
        agent = Coordinator(address, SecurityConfig(token_env="THEIRS"))
        requests: tuple[Any, ...] = (
            pb.RollBackRequest(),
            pb.PinDrafterRequest(),
            pb.UnpinDrafterRequest(),
        )
        for request in requests:
            with pytest.raises(PacelineError, match="the agents' token does not open this"):
                await choose_drafter(agent, request, Console(file=io.StringIO()))
        for work in (pause_run, resume_run, stop_run):
            with pytest.raises(PacelineError, match="the agents' token does not open this"):
                await work(agent, Console(file=io.StringIO()))
        assert await choose_drafter(coordinator_of([], address), requests[1], Console()) == 0
        script.released.set()
        await run


@pytest.mark.slow
def test_commands_where_nothing_runs_name_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    alone = ("status", "stop", "pause", "resume")
    chosen = (["drafter", *words] for words in (["pin", "3"], ["rollback"], ["unpin"]))
    for command in (*chosen, *([name] for name in alone)):
        told = CliRunner().invoke(app, [*command, "--address", address])
        assert told.exit_code == 2
        assert f"no coordinator answers; seen: {address}" in " ".join(told.output.split())


def test_a_run_is_found_by_its_address_or_its_name_and_not_by_two(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    for command in ("pause", "resume", "stop", "status"):
        said = CliRunner().invoke(app, [command, address])
        assert said.exit_code == 2
        assert address in " ".join(said.output.split())
        said = CliRunner().invoke(app, [command, str(tmp_path / "none")])
        assert "no such run" in said.output
        said = CliRunner().invoke(app, [command, address, "--address", address])
        assert "RUN and --address name two places" in said.output


def test_a_version_is_a_number_from_zero_on() -> None:
    assert CliRunner().invoke(app, ["drafter", "pin", "-1"]).exit_code == 2
    assert CliRunner().invoke(app, ["drafter", "rollback", "newest"]).exit_code == 2
    with pytest.raises(Unavailable):
        asyncio.run(
            choose_drafter(
                coordinator_of([], f"127.0.0.1:{free_port()}"),
                pb.RollBackRequest(),
                Console(file=io.StringIO()),
            )
        )
