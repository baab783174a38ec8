"""A loop over a model and the tools of an MCP server (this file with `serve`)."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.server import MCPServer
from warehouse import INSTRUCTIONS, QUESTION, connect, price, settle, stock, traced


async def answer(chat: Any) -> str:
    asked: list[Any] = [{"role": "user", "content": f"{INSTRUCTIONS} {QUESTION}"}]
    about = StdioServerParameters(command=sys.executable, args=[__file__, "serve"])
    async with Client(about) as server:
        found = [(one.name, one.input_schema) for one in (await server.list_tools()).tools]
        tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in found]
        while True:
            done = chat.create(model="", messages=asked, tools=tools, max_tokens=256)
            asked.append(said := done.choices[0].message)
            if not said.tool_calls:
                return said.content or ""
            for call in said.tool_calls:
                given = json.loads(call.function.arguments)
                text = (await server.call_tool(call.function.name, given)).content[0].text
                asked.append({"role": "tool", "tool_call_id": call.id, "content": text})


if sys.argv[1:] == ["serve"]:
    warehouse = MCPServer("warehouse", log_level="WARNING")
    warehouse.add_tool(stock)
    warehouse.add_tool(price)
    warehouse.run()
else:
    with traced(), connect() as client, client.session(task="bolts") as session:
        settle(session, asyncio.run(answer(session.openai.chat.completions)))
