"""A server of OpenEnv for tests, made from its package: `openenv_server.py KIND PORT_FILE`.

`guess` takes texts: it rewards a long answer, then ends. `tools` offers a tool. The Python of the
process needs the package and nothing of Paceline.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)

FULL = 2
"""Most sessions of the kind `full`."""


class Say(Action):  # type: ignore[misc]
    message: str


class Heard(Observation):  # type: ignore[misc]
    echo: str = ""


class Guess(Environment):  # type: ignore[misc]
    """Three steps; each is worth 0.25, the last 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self.steps, self.seed = 0, seed
        return Heard(echo=f"seed {seed}")

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        self.steps += 1
        if self.seed == 13:
            os._exit(1)
        if self.seed == 14:
            threading.Event().wait()
        if self.seed == 15:
            raise RuntimeError("no such move")
        done = self.steps == 3
        text = f"{len(action.message)} characters. Are you sure?"
        return Heard(echo=text, reward=1.0 if done else 0.25, done=done)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Tools(MCPEnvironment):  # type: ignore[misc]
    """A tool; the call is worth 0.5."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("weather")

        @server.tool()
        def weather(city: str, days: float = 1.0) -> str:
            """The weather of a city."""
            return f"rain in {city}"

        super().__init__(server)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> Observation:
        return Observation()

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **options: Any
    ) -> Observation:
        found = await super().step_async(action, timeout_s, **options)
        found.reward = 0.5
        return found

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(metadata={"error": "an unknown action"})

    @property
    def state(self) -> State:
        return State()


def end_with_parent() -> None:
    """Ends the process at the end of its standard input, which the test holds open."""
    sys.stdin.read()
    os._exit(0)


def main(kind: str, port_file: str) -> None:
    if kind == "tools":
        app = create_fastapi_app(Tools, Action, Observation, max_concurrent_envs=64)
    else:
        most = FULL if kind == "full" else 64
        app = create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=most)
    listening = socket.create_server(("127.0.0.1", 0))
    Path(port_file).write_text(str(listening.getsockname()[1]))
    Path(port_file).with_suffix(".listens").write_text("yes")  # a pipe: its reader waits
    threading.Thread(target=end_with_parent, daemon=True).start()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
