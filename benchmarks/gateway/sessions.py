"""Many sessions held open at once: what one costs while it is idle, and whether all still answer.

Owns that section.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import psutil

from benchmarks.gateway.fronts import Front
from benchmarks.gateway.measure import Level, Measurement, Run
from paceline.errors import InternalError

AT_ONCE = 16
MORE_TIMEOUT_S = 600.0
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Held:
    """What was found."""

    sessions: int
    hold_s: float
    open_kib: float  # memory of the gateway for one session that has said nothing
    used_kib: float  # after one turn of each
    turns: Run


async def hold_sessions(front: Front, measurement: Measurement, count: int, hold_s: float) -> Held:
    """Open sessions, hold them, then one turn under each key.

    Raises InternalError when one cannot be opened.
    """
    process = psutil.Process(front.pid)
    await open_sessions(
        front, AT_ONCE, hold_s + MORE_TIMEOUT_S
    )  # what the first sessions load is not theirs
    await measurement.under_load(front, measurement.order(Level(AT_ONCE), 1.0))
    before = process.memory_info().rss
    keys = await open_sessions(front, count, hold_s + MORE_TIMEOUT_S)
    await asyncio.sleep(hold_s)
    opened = process.memory_info().rss
    turns = await measurement.under_load(front, measurement.order(Level(AT_ONCE), 0.0, keys))
    used = process.memory_info().rss
    return Held(
        count, hold_s, (opened - before) / count / 1024, (used - before) / count / 1024, turns
    )


async def open_sessions(front: Front, count: int, timeout_s: float) -> Sequence[str]:
    """Keys of new sessions that may be silent so long.

    Raises InternalError when one cannot be opened.
    """
    numbers = iter(range(count))
    keys: list[str] = []

    async def some(client: httpx.AsyncClient) -> None:
        for number in numbers:
            body = {"task_id": f"bench-{number}", "trainable": False, "timeout_s": timeout_s}
            answer = await client.post("/v1/sessions", json=body)
            if answer.status_code != 201:
                raise InternalError(
                    "a session cannot be opened", seen=f"{answer.status_code}: {answer.text[:300]}"
                )
            keys.append(answer.json()["api_key"])

    async with (
        httpx.AsyncClient(base_url=front.url, timeout=DEADLINE_S) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(AT_ONCE):
            group.create_task(some(client))
    return keys
