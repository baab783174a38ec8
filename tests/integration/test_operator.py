"""An operator's commands during a run, against scripted peers: tokens, addresses, ends."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from integration.coordinator_world import (
    WAIT_S,
    Script,
    config_of,
    held,
    overrides,
    running_peers,
    status_of,
)
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.access import Coordinator, coordinator_of
from paceline.cli.active import (
    pause_run,
    resume_run,
    stop_run,
)
from paceline.cli.main import app
from paceline.config import SecurityConfig
from paceline.errors import PacelineError
from paceline.local.ports import free_port
from paceline.services.coordinator.server import serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60), pytest.mark.usefixtures("no_late_readers")]


async def test_the_status_names_a_promoted_drafter_that_waits_for_its_commit(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=2))
        run = await held(script, config)
        assert "drafter d2 was promoted and waits for its commit" in await status_of(config)
        script.released.set()
        await run
    assert script.commits == [(1, 1, 1), (2, 2, 2)]


async def test_a_run_that_ends_first_says_so_to_its_operator(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        stop = asyncio.Event()
        run = asyncio.create_task(serve(config, stop))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        stop.set()
        coordinator = coordinator_of([], config.addresses.coordinator)
        asked = asyncio.create_task(resume_run(coordinator, Console(file=io.StringIO())))
        await run
        with pytest.raises(PacelineError, match=r"the run has ended|no coordinator answers"):
            await asked


async def test_the_agents_token_steers_no_run(
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
        for work in (pause_run, resume_run, stop_run):
            with pytest.raises(PacelineError, match="the agents' token does not open this"):
                await work(agent, Console(file=io.StringIO()))
        assert await resume_run(coordinator_of([], address), Console()) == 0
        script.released.set()
        await run


@pytest.mark.slow
def test_commands_where_nothing_runs_name_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    for command in ("status", "stop", "pause", "resume"):
        told = CliRunner().invoke(app, [command, "--address", address])
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
