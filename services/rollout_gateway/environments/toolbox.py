"""All tools of a gateway: built-in tools, the user's functions and the tools of tool servers.

A server is a URL, or a command with the protocol on its standard streams that the gateway starts
once. A server that has never worked counts as a wrong setting. A server that fails later counts as
an infrastructure fault, and the next call reconnects. Needs the extra `mcp`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from paceline.addresses import direct
from paceline.errors import ConfigError, PacelineError, Unavailable
from paceline.local.patience import deadline, patient
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.config import ToolServerConfig
from paceline.services.rollout_gateway.environments.tools import Tool, ToolError, own_tool, python
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.telemetry import get_logger

log = get_logger(__name__)


class ToolServer:
    """One server, connected on first use and again after a loss."""

    def __init__(self, name: str, config: ToolServerConfig) -> None:
        self._name, self._place = name, f"gateway.tool_servers.{name}"
        self._config = config
        self._turn = asyncio.Lock()
        self._held: asyncio.Task[None] | None = None
        self._client: Any = None  # kept after a loss: it shows that the server has worked
        self._over = asyncio.Event()

    async def tools(self) -> Mapping[str, Tool]:
        """The server's tools that the settings list, or all its tools without a list.

        Raises ConfigError for a server that does not start or lacks a tool, Unavailable.
        """
        client = await self._connected()
        async with self._deadline("lists no tools"):
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        wanted = self._config.tools or tuple(listed)
        if missing := [name for name in wanted if name not in listed]:
            seen, allowed = ", ".join(missing), ", ".join(listed) or "none: the server has no tools"
            raise ConfigError(f"{self._place}.tools", seen=seen, allowed=allowed)
        found = [listed[name] for name in wanted]
        forms = {one.name: (one.description or "", one.input_schema) for one in found}
        return {name: Tool(name, *form, partial(self._call, name)) for name, form in forms.items()}

    async def stop(self) -> None:
        """End the server's process or the connection."""
        self._over.set()
        if self._held is not None:
            _, late = await asyncio.wait((self._held,), timeout=self._config.deadline_s)
            if late:
                await cancel(self._held)

    async def _call(self, name: str, arguments: Any) -> str:
        if not isinstance(arguments, dict):
            raise ToolError("the arguments must be a JSON object")
        client = await self._connected()
        try:
            async with self._deadline(f"does not answer {name}"):
                answer = await client.call_tool(name, arguments)
        except PacelineError:
            raise
        except Exception as error:  # an error of the library, or of a lost process
            if await self._lost(client):
                raise Unavailable(f"the tool server {self._name} was lost: {error}") from error
            raise ToolError(str(error)) from error
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in answer.content)
        if answer.is_error:
            raise ToolError(text)
        return text or "[no output]"

    async def _lost(self, client: Any) -> bool:
        """Whether a server that failed a call is gone; the next call then restarts it."""
        try:
            async with self._deadline("is silent"):
                # A ping would do, but the protocol of 2026-07-28 has none.
                await client.list_tools(cache_mode="bypass")
        except Exception as error:  # noqa: BLE001  # as above
            log.warning("a tool server was lost", server=self._name, error=repr(error))
            if client is self._client:
                await self.stop()
            return True
        return False

    async def _connected(self) -> Any:
        async with self._turn:
            if self._held is None or self._held.done():
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._over = asyncio.Event()
                self._held = background(self._hold(ready), f"tool server {self._name}")
                try:
                    async with self._deadline("does not start"):
                        self._client = await ready
                except BaseException:  # late or cancelled: the next call starts it again
                    await cancel(self._held)
                    raise
            return self._client

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Own the connection for its whole life, because the library must open and close it in one
        task.
        """
        try:
            async with self._connection() as client:
                ready.set_result(client)
                await self._over.wait()
        except Exception as error:  # noqa: BLE001  # a user's command or address may raise anything
            if ready.done():
                log.warning("a tool server was lost", server=self._name, error=repr(error))
                return
            if not isinstance(error, ConfigError):
                fault = ConfigError if self._client is None else Unavailable
                message = f"the tool server {self._name} cannot be used: {_first(error)}"
                error = fault(message, seen=self._config.url or " ".join(self._config.command))
            ready.set_exception(error)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """Raises ConfigError without the library, or without the configured token."""
        try:
            from httpx2 import AsyncClient  # the library's HTTP client
            from mcp import Client, StdioServerParameters
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            message, allowed = "tool servers need the library mcp", "pip install 'paceline[mcp]'"
            raise ConfigError(message, seen=self._place, allowed=allowed) from error
        if self._config.url:
            async with (
                AsyncClient(  # deadlines of this class are shorter
                    headers=self._headers(), timeout=None, **direct(self._config.url)
                ) as http,
                Client(streamable_http_client(self._config.url, http_client=http)) as client,
            ):
                yield client
            return
        command, *words = self._config.command
        parameters = StdioServerParameters(command=command, args=words, env=self._config.env)
        async with Client(parameters) as client:
            yield client

    def _headers(self) -> dict[str, str]:
        variable = self._config.token_env
        if not variable:
            return {}
        if not (token := os.environ.get(variable, "")):
            place, allowed = f"{self._place}.token_env", "a variable with the server's token"
            raise ConfigError(place, seen=f"{variable} is not set", allowed=allowed)
        return {"Authorization": f"Bearer {token}"}

    def _deadline(self, what: str) -> AbstractAsyncContextManager[None]:
        """Raises Unavailable with the late operation when the block takes too long."""
        message = f"the tool server {self._name} {what} in time"
        return deadline(patient(self._config.deadline_s), message, Unavailable)


def _first(error: BaseException) -> str:
    """The first exception of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class Toolbox:
    """Opened on first use; servers stay connected until the gateway stops."""

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        own: Mapping[str, str] | None = None,
        servers: Mapping[str, ToolServerConfig] | None = None,
    ) -> None:
        """Without a sandbox there is no tool `python`. `own`: name -> import path."""
        self.sandbox = sandbox
        self._own = own or {}
        self._servers = [ToolServer(name, config) for name, config in (servers or {}).items()]
        self._turn = asyncio.Lock()
        self._tools: Mapping[str, Tool] | None = None

    async def tools(self) -> Mapping[str, Tool]:
        """All tools by name. Raises ConfigError for a setting that can never work, Unavailable."""
        async with self._turn:
            if self._tools is not None:
                return self._tools
            found = [] if self.sandbox is None else [python(self.sandbox)]
            found += [own_tool(name, path) for name, path in self._own.items()]
            for server in self._servers:
                found += (await server.tools()).values()
            names = [tool.name for tool in found]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ConfigError("two tools have the same name", seen=", ".join(twice))
            self._tools = {tool.name: tool for tool in found}
            return self._tools

    async def stop(self) -> None:
        """End the servers."""
        await asyncio.gather(*(server.stop() for server in self._servers))
