"""A call over a broken connection fails as Unavailable, whatever gRPC's error text, so callers
retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from benchmarks.chaos.proxy import Proxy
from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.local.ports import free_ports
from paceline.rpc import rpc_errors

CHUNKS, CHUNK_BYTES = 400, 1 << 16
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""Without this option, a new channel would reuse the broken connection of an earlier channel."""


async def take(requests: AsyncIterator[bytes], context: object) -> bytes:
    async for _ in requests:
        pass
    return b"all"


async def chunks(begun: asyncio.Event) -> AsyncIterator[bytes]:
    for _ in range(CHUNKS):
        yield bytes(CHUNK_BYTES)
        begun.set()


@pytest.mark.parametrize("fault", ["reset", "half_close"])
async def test_a_push_whose_connection_breaks_is_unavailable(fault: str) -> None:
    here, there = (f"127.0.0.1:{port}" for port in free_ports(2))
    server = grpc.aio.server()
    handler = grpc.stream_unary_rpc_method_handler(take)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"Push": handler}),))
    server.add_insecure_port(there)
    await server.start()
    proxy = Proxy(here, there)
    await proxy.start()
    try:
        for _ in range(5):
            async with (
                grpc.aio.insecure_channel(here, OWN_CONNECTION) as channel,
                asyncio.timeout(patient(20.0)),
            ):
                begun = asyncio.Event()
                push = channel.stream_unary("/s/Push")(chunks(begun))
                await begun.wait()
                getattr(proxy, fault)()
                with pytest.raises(Unavailable), rpc_errors():
                    await push
    finally:
        await proxy.close()
        await server.stop(0)
