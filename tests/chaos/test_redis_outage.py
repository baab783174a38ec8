"""Redis dies during appends and recovers from its log: no entry is lost or doubled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from stream_traffic import go_through
from watched_stream import WatchedStream

from paceline.streams import connect, run_key

if TYPE_CHECKING:
    from redis_servers import RedisServer

pytestmark = pytest.mark.chaos

KILLS_AT = (60, 150)
AWAY_S = 1.0


async def test_appends_and_reads_go_on_after_an_outage(
    durable_server: RedisServer, run_id: str
) -> None:
    def kill() -> None:
        durable_server.kill()
        threading.Timer(AWAY_S, durable_server.start_without_waiting).start()

    client = connect(durable_server.url)
    stream = WatchedStream(client, run_key(run_id, "s"))
    await go_through(stream, dict.fromkeys(KILLS_AT, kill))
    await stream.close()
    await client.aclose()
