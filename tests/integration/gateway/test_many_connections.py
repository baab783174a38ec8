"""A gateway serves more connections than the default limit of open files."""

from __future__ import annotations

import asyncio
import re
import resource
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from benchmarks.gateway.backends import ScriptPace, engine_settings, write_model
from benchmarks.gateway.fronts import Front, gateway
from paceline.local.patience import patient

pytestmark = pytest.mark.slow

FEW = 256
MANY = 400
ASK = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def served(stack: AsyncExitStack, folder: Path) -> Front:
    """A gateway under a soft limit of FEW open files."""
    files = write_model(folder, engine_settings(ScriptPace(16, 4, 0.0)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    try:
        return await stack.enter_async_context(gateway(folder, *files))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def healthy(connection: Streams) -> bool:
    reader, writer = connection
    writer.write(ASK)
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = re.findall(rb"content-length: *(\d+)", head)
    await reader.readexactly(int(length))
    return head.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
async def test_every_one_of_many_connections_is_answered_and_stays_open(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(patient(60)):
        front = await served(stack, tmp_path)
        connections: list[Streams] = []
        for _ in range(MANY):
            connection = await asyncio.open_connection("127.0.0.1", front.port)
            stack.callback(connection[1].close)
            assert await healthy(connection)
            connections.append(connection)
        assert all(await asyncio.gather(*map(healthy, connections)))
