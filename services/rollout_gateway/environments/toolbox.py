"""All tools of a gateway: built-in tools, the user's functions and the tools of tool servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from paceline.errors import ConfigError
from paceline.services.rollout_gateway.config import ToolServerConfig
from paceline.services.rollout_gateway.environments.own_tools import own_tool
from paceline.services.rollout_gateway.environments.tool_servers import ToolServer
from paceline.services.rollout_gateway.environments.tools import Tool, python
from paceline.services.rollout_gateway.sandbox import Sandbox


class Toolbox:
    """Opened on first use; servers stay connected until the gateway stops."""

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        own: Mapping[str, str] | None = None,
        servers: Mapping[str, ToolServerConfig] | None = None,
    ) -> None:
        """Without a sandbox there is no tool `python`. `own`: name -> import path."""
        self._sandbox = sandbox
        self._own = own or {}
        self._servers = [ToolServer(name, config) for name, config in (servers or {}).items()]
        self._turn = asyncio.Lock()
        self._tools: Mapping[str, Tool] | None = None

    async def tools(self) -> Mapping[str, Tool]:
        """All tools by name. Raises ConfigError for a setting that can never work, Unavailable."""
        async with self._turn:
            if self._tools is None:
                self._tools = await self._opened()
            return self._tools

    async def stop(self) -> None:
        """End the servers."""
        await asyncio.gather(*(server.stop() for server in self._servers))

    async def _opened(self) -> Mapping[str, Tool]:
        found = [] if self._sandbox is None else [python(self._sandbox)]
        found += [own_tool(name, path) for name, path in self._own.items()]
        for server in self._servers:
            found += (await server.tools()).values()
        names = [tool.name for tool in found]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError("two tools have the same name", seen=", ".join(twice))
        return {tool.name: tool for tool in found}
