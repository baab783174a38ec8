"""The health check as a probe runs it: a process with an exit status for the health."""

from __future__ import annotations

import asyncio
import sys

import pytest
from ipv6 import LOOPBACK_HOSTS

from paceline.config import SecurityConfig
from paceline.rpc import Server


async def _probe(address: str) -> int:
    words = (
        sys.executable,
        "-m",
        "paceline.local.healthcheck",
        "--address",
        address,
        "--timeout",
        "1",
    )
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
    await process.communicate()
    assert process.returncode is not None
    return process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_the_exit_status_follows_the_serving_flag(host: str) -> None:
    server = Server(f"{host}:0", SecurityConfig())
    address = f"{host}:{await server.start()}"
    server.set_serving("stub", True)
    assert await _probe(address) == 0
    server.set_serving("stub", False)
    assert await _probe(address) == 1
    await server.stop(0.1)
    assert await _probe(address) == 1
