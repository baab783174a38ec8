"""A gateway that is killed with -9 leaves its open sessions to the next gateway."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from paceline.local.patience import patient
from paceline.streams import OpenSessions, connect

pytestmark = pytest.mark.chaos

DEADLINE_S = patient(30)
CHILD = """
import asyncio, sys
from paceline.streams import OpenSessions, connect

async def main() -> None:
    url, run_id = sys.argv[1:]
    sessions = OpenSessions(connect(url), run_id)
    sessions.start()
    for number in range(50):
        sessions.opened(f"s{number}", {"step": 1})
        assert await sessions.wait_written(20, f"s{number}")
        if number % 2:
            sessions.ended(f"s{number}")
    assert await sessions.wait_written(20)
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_sessions_of_a_killed_process_are_taken_over(redis_url: str, run_id: str) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD,
        redis_url,
        run_id,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ.copy(),
    )
    assert child.stdout is not None
    assert await asyncio.wait_for(child.stdout.readline(), DEADLINE_S) == b"ready\n"
    child.kill()
    await child.wait()
    client = connect(redis_url)
    taken = await OpenSessions(client, run_id).take_lost()
    assert {record["session_id"] for record in taken} == {
        f"s{number}" for number in range(0, 50, 2)
    }
    await client.aclose()
