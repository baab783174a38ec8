"""Tools of MCP servers in conversations of the built-in environment: real servers, on standard
streams and over streamable HTTP.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
from unit.rollout_gateway.environments.test_dialogues import answers
from unit.rollout_gateway.environments.test_tool_use import Script, calls, says, task

from paceline.errors import ConfigError, Unavailable
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.services.rollout_gateway.config import ToolServerConfig
from paceline.services.rollout_gateway.environments.kinds import ToolUse
from paceline.services.rollout_gateway.environments.toolbox import Toolbox, ToolServer

SERVER = """
import os
import sys

import uvicorn
from mcp.server import MCPServer
from mcp.shared.exceptions import MCPError

server = MCPServer("shop")


@server.tool()
def price(item: str) -> str:
    "What an item costs."
    return {"bolt": "0.50"}[item]


@server.tool()
def weigh(item: str) -> str:
    "Refuses by an error of the protocol."
    raise MCPError(-32602, f"nobody weighs a {item}")


@server.tool()
def leave() -> str:
    "Ends this server."
    os._exit(3)


def guarded(app, token):
    async def serve(scope, receive, send):
        given = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
        if scope["type"] == "http" and given != f"Bearer {token}":
            await send({"type": "http.response.start", "status": 401})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    return serve


if len(sys.argv) > 2:
    app = guarded(server.streamable_http_app(), sys.argv[2])
    uvicorn.run(app, port=int(sys.argv[1]))
elif len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
"""
BOLT = ("price", '{"item": "bolt"}')


class Shop:
    """A server of this test's own, and toolboxes over it."""

    def __init__(self, file: Path, transport: str) -> None:
        self.transport = transport
        self.port = free_port()
        self.process: asyncio.subprocess.Process | None = None  # over HTTP, else the toolbox's
        self._file = file
        self._opened: list[Toolbox] = []

    async def begin(self, *token: str) -> None:
        """Serve over HTTP at the same address each time; a `token` restricts the clients."""
        if self.transport == "streams":
            return
        await self.end()  # an ending server would still listen
        command = (sys.executable, str(self._file), str(self.port), *token)
        self.process = await asyncio.create_subprocess_exec(
            *command, stdout=DEVNULL, stderr=DEVNULL
        )
        async with asyncio.timeout(patient(30)):
            while not await self._listens():
                assert self.process.returncode is None
                await asyncio.sleep(0.05)

    async def _listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def end(self) -> None:
        """End the server as the loss of its machine would."""
        if self.process is not None:
            if self.process.returncode is None:
                self.process.kill()
            await asyncio.wait_for(self.process.wait(), patient(10))

    def toolbox(self, **settings: Any) -> Toolbox:
        """Return a toolbox over the server with these settings."""
        here = {
            "streams": {"command": (sys.executable, str(self._file))},
            "http": {"url": f"http://127.0.0.1:{self.port}/mcp"},
        }
        server = ToolServerConfig.model_validate(here[self.transport] | settings)
        self._opened.append(Toolbox(servers={"shop": server}))
        return self._opened[-1]

    async def stop(self) -> None:
        for one in self._opened:
            await one.stop()
        await self.end()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Callable[[str], Shop]]:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    (file := tmp_path / "server.py").write_text(SERVER)
    made: list[Shop] = []

    def shop(transport: str) -> Shop:
        made.append(Shop(file, transport))
        return made[-1]

    yield shop
    for one in made:
        await one.stop()


@pytest.fixture(params=["streams", "http"])
async def shop(place: Callable[[str], Shop], request: pytest.FixtureRequest) -> Shop:
    """A server that serves."""
    one = place(request.param)
    await one.begin()
    return one


@pytest.fixture
async def far(place: Callable[[str], Shop]) -> Shop:
    """A server that serves over HTTP."""
    one = place("http")
    await one.begin()
    return one


async def asks(environment: ToolUse, *wished: tuple[str, str]) -> list[str]:
    """Return the tool answers that a model with these calls receives; its sample has not failed."""
    episode = await environment.run(task(), Script(calls(*wished), says("done")))
    assert episode.finish == "stop"
    return answers(episode)


async def fails(environment: ToolUse, name: str, arguments: str) -> bool:
    """Return whether the sample fails after its model called a tool, without the model's fault."""
    episode = await environment.run(task(), Script(calls((name, arguments)), says("done")))
    return episode.finish == "error"


@pytest.mark.few(1)
async def test_tools_of_a_server_are_called(shop: Shop) -> None:
    environment = ToolUse(shop.toolbox(tools=["price"]))
    await environment.prepare([{}])
    wished = [BOLT, ("price", '{"item": "nut"}'), ("price", "[]")]
    model = Script(calls(*wished), says("done"))
    told = answers(await environment.run(task(), model))
    assert told[0] == "0.50"
    assert told[1].startswith("error: ")
    assert "price" in told[1]
    assert told[2] == "error: the arguments must be a JSON object"
    names = [tool["function"]["name"] for tool in model.tools]
    assert names == ["price"]
    assert model.tools[0]["function"]["description"] == "What an item costs."
    assert model.tools[0]["function"]["parameters"]["required"] == ["item"]


@pytest.mark.slow
async def test_calls_that_are_made_together_are_each_answered(shop: Shop) -> None:
    environment = ToolUse(shop.toolbox())
    assert await asks(environment, *[BOLT] * 8) == ["0.50"] * 8


@pytest.mark.few(1)
async def test_an_error_of_the_protocol_is_told_to_the_model_and_the_server_goes_on(
    shop: Shop,
) -> None:
    environment = ToolUse(shop.toolbox())
    told = await asks(environment, ("weigh", '{"item": "bolt"}'), BOLT)
    assert told == ["error: nobody weighs a bolt", "0.50"]


@pytest.mark.slow
async def test_a_server_that_was_lost_is_a_machines_fault_and_serves_again(shop: Shop) -> None:
    environment = ToolUse(shop.toolbox(deadline_s=20))
    await environment.prepare([{}])
    assert await fails(environment, "leave", "{}")
    await shop.begin()
    assert await asks(environment, BOLT) == ["0.50"]


@pytest.mark.slow
async def test_a_server_that_is_away_is_a_machines_fault_each_time_it_is_asked(far: Shop) -> None:
    environment = ToolUse(far.toolbox())
    assert await asks(environment, BOLT) == ["0.50"]
    await far.end()
    for _ in range(3):  # lost, and then found nowhere
        assert await fails(environment, *BOLT)
    await far.begin()
    assert await asks(environment, BOLT) == ["0.50"]


@pytest.mark.slow
async def test_a_server_that_was_started_again_between_two_calls_serves_the_next_but_one(
    far: Shop,
) -> None:
    environment = ToolUse(far.toolbox())
    assert await asks(environment, BOLT) == ["0.50"]
    await far.end()
    await far.begin()
    await environment.run(task(), Script(calls(BOLT), says("done")))  # finds out at the latest
    assert await asks(environment, BOLT) == ["0.50"]


@pytest.mark.slow
async def test_a_server_that_is_silent_is_late_and_goes_on_with_the_next_call(
    far: Shop, skip: Callable[[float], None]
) -> None:
    async def hours_pass() -> None:
        while True:
            await asyncio.sleep(0.05)
            skip(3600.0)

    environment = ToolUse(far.toolbox(deadline_s=60))
    await environment.prepare([{}])
    assert far.process is not None
    os.kill(far.process.pid, signal.SIGSTOP)
    passing = asyncio.create_task(hours_pass())
    try:
        assert await fails(environment, *BOLT)
    finally:
        passing.cancel()
        os.kill(far.process.pid, signal.SIGCONT)
    assert await asks(environment, BOLT) == ["0.50"]


@pytest.mark.slow
async def test_a_server_that_cannot_be_used_is_refused_before_the_run(shop: Shop) -> None:
    with pytest.raises(ConfigError, match=r"tools; seen: sell; allowed: price, weigh, leave"):
        await shop.toolbox(tools=["sell"]).tools()


async def test_a_command_that_is_no_server_is_refused_before_the_run(
    place: Callable[[str], Shop],
) -> None:
    with pytest.raises(ConfigError, match="the tool server shop cannot be used"):
        await place("streams").toolbox(command=["/nowhere/server"]).tools()
    command = [sys.executable, "-c", "pass"]
    with pytest.raises((ConfigError, Unavailable)):
        await place("streams").toolbox(command=command, deadline_s=5).tools()


@pytest.mark.slow
async def test_a_url_where_no_server_is_is_refused_before_the_run(
    place: Callable[[str], Shop], far: Shop
) -> None:
    with pytest.raises(ConfigError, match=r"shop cannot be used: ConnectError.*/mcp"):
        await place("http").toolbox().tools()
    elsewhere = f"http://127.0.0.1:{far.port}/elsewhere"
    with pytest.raises(ConfigError, match=r"shop cannot be used: .*Not Found.*/elsewhere"):
        await far.toolbox(url=elsewhere).tools()


@pytest.mark.slow
async def test_a_server_on_this_machine_is_reached_without_a_proxy(
    far: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert "price" in await far.toolbox().tools()


@pytest.mark.slow
async def test_a_server_that_does_not_start_in_time_is_late_each_time_it_is_asked() -> None:
    silent = (sys.executable, "-c", "import time; time.sleep(60)")
    settings = ToolServerConfig(command=silent, deadline_s=0.3)
    toolbox = Toolbox(servers={"shop": settings})
    for _ in range(2):
        with pytest.raises(Unavailable, match="the tool server shop does not start in time"):
            await toolbox.tools()
    await toolbox.stop()


async def test_a_time_out_of_a_connection_is_no_late_answer() -> None:
    server = ToolServer("shop", ToolServerConfig(command=("shop",)))
    with pytest.raises(TimeoutError, match="connection"):
        async with server._deadline("does not answer price"):
            raise TimeoutError("connection")


@pytest.mark.parametrize("settings", [{}, {"command": ["a"], "url": "http://127.0.0.1:1/mcp"}])
def test_a_server_is_a_command_or_a_url(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a command or a url"):
        ToolServerConfig.model_validate(settings)
    with pytest.raises(ValueError, match="a token is sent to a url"):
        ToolServerConfig(command=("shop",), token_env="TOKEN")


@pytest.mark.slow
async def test_a_server_that_asks_for_a_token_gets_it_from_the_environment(
    place: Callable[[str], Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = place("http")
    await guarded.begin("secret")
    with pytest.raises(ConfigError, match="the tool server shop cannot be used: MCPError"):
        await guarded.toolbox().tools()
    with pytest.raises(ConfigError, match="token_env; seen: SHOP_TOKEN is not set"):
        await guarded.toolbox(token_env="SHOP_TOKEN").tools()

    monkeypatch.setenv("SHOP_TOKEN", "secret")
    toolbox = guarded.toolbox(token_env="SHOP_TOKEN")
    assert {"price", "weigh"} <= set(await toolbox.tools())


async def test_without_the_library_a_server_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    servers = {"shop": ToolServerConfig(command=("shop",))}
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[mcp\]'"):
        await Toolbox(servers=servers).tools()
