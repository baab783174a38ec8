"""Fills the disk under a supervised Redis and frees it again: `python full_disk_run.py DIRECTORY`,
on a small disk of its own. Prints the lines that test_full_disk.py reads.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

from redis.asyncio import Redis
from watched_stream import WatchedStream

from paceline.config import RunConfig, ServiceConfig
from paceline.errors import Unavailable
from paceline.local.launch import ChildEvent, Launch, RestartPolicy
from paceline.local.patience import patient
from paceline.local.redis import resolved
from paceline.local.services import service
from paceline.local.supervisor import Supervisor, launch_of
from paceline.streams import connect

TIMES = 4
POLICY = RestartPolicy(tries=2, window_s=600.0, base_s=0.01)
LEFT_BYTES = 2 << 20
NEEDY = """
import sys, time, redis
client = redis.Redis.from_url(sys.argv[1])
client.rpush("needy", "connected")
while client.ping(): time.sleep(0.05)
"""


def fill(directory: Path) -> Path:
    """Fills the disk up to the last LEFT_BYTES."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        file.write(bytes(shutil.disk_usage(directory).free - LEFT_BYTES))
    return ballast


async def append_until_it_fails(stream: WatchedStream, acknowledged: list[str]) -> None:
    try:
        while True:
            entry = await stream.append({}, bytes(100_000))
            assert entry is not None
            acknowledged.append(entry)
    except Unavailable:
        return


async def needy_connected(client: Redis) -> None:
    """Waits until the process that needs Redis is connected again."""
    assert await client.blpop(["needy"], timeout=int(patient(20.0))) is not None


async def main(directory: Path) -> None:
    config = ServiceConfig(run=RunConfig(dir=str(directory)))
    url = resolved(config).redis.durable_url
    needy = Launch("needy", (sys.executable, "-c", NEEDY, url), depends_on=("redis",))
    launches = [launch_of(service("redis"), config, [f"run.dir={directory}"]), needy]
    events: asyncio.Queue[ChildEvent] = asyncio.Queue()

    async def heard(name: str, kind: str) -> ChildEvent:
        while (event := await events.get()).name != name or event.kind != kind:
            pass
        return event

    acknowledged: list[str] = []
    told: list[str] = []
    async with Supervisor(launches, directory, policy=POLICY, on_event=events.put_nowait) as one:
        await one.start(patient(20.0))
        for _ in range(TIMES):
            client = connect(url, outage_s=0.5)
            await needy_connected(client)  # so that it dies with Redis
            stream = WatchedStream(client, "s", outage_s=0.5)
            ballast = fill(directory)
            async with asyncio.timeout(patient(60.0)):
                await append_until_it_fails(stream, acknowledged)
                told.append((await heard("redis", "waits")).detail)
                ballast.unlink()
                await heard("redis", "healthy")
                assert await stream.append({}, b"there is room") is not None
            found = {entry.id for entry in await stream.history(count=100_000)}
            assert set(acknowledged) <= found
            await stream.close()
            await client.aclose()
        client = connect(url, outage_s=0.5)
        await needy_connected(client)
        await client.aclose()
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
