"""A service for the tests of the entry: records its input, then waits or ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.config import ServiceConfig
from paceline.errors import FailedPrecondition, ResourceExhausted, RunFailed
from paceline.local.entry import run_service


class StubConfig(ServiceConfig):
    mode: str = "wait"
    """wait, finish, fail, full, run, group or bug."""


async def _fail() -> None:
    raise FailedPrecondition("a task of a group failed")


async def _bug() -> None:
    raise ZeroDivisionError("our own fault")


async def serve(config: StubConfig, stop: asyncio.Event) -> None:
    if config.mode == "fail":
        raise FailedPrecondition("the model is [bold]not[/bold] there", seen="models/x")
    if config.mode == "full":
        raise ResourceExhausted("Redis has no memory left")
    if config.mode == "run":
        raise RunFailed("run r failed in step 3: the loss is not finite", seen="nan")
    if config.mode == "group":
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fail())
    if config.mode == "bug":
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fail())
            tasks.create_task(_bug())
    if config.mode == "wait":
        (Path(config.run.dir) / "serving").write_text(config.run.id)
        print("serving", flush=True)
        await stop.wait()


if __name__ == "__main__":
    run_service("policy_trainer", StubConfig, serve)
