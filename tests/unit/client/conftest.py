"""A scripted gateway, and both clients of it under the same awaitable names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from unit.client.in_thread import InThread
from unit.client.scripted_gateway import ScriptedGateway, listening, serving

from paceline.client import AsyncClient, Client

Connect = Callable[..., Any]


@pytest.fixture(scope="session")
def one_gateway() -> Iterator[ScriptedGateway]:
    with serving(ScriptedGateway(), listening()) as served:
        yield served


@pytest.fixture
def gateway(one_gateway: ScriptedGateway) -> ScriptedGateway:
    one_gateway.forget()
    return one_gateway


@pytest.fixture(params=["sync", "async"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """`connect(base_url, **options)`: a client of either kind, closed after the test."""
    async with AsyncExitStack() as clients:

        def make(base_url: str, **options: Any) -> Any:
            options = {"token": "gateway-token", "timeout_s": 10.0, **options}
            client: Any = (
                InThread(Client(base_url, **options))
                if request.param == "sync"
                else AsyncClient(base_url, **options)
            )
            clients.push_async_callback(client.close)
            return client

        yield make


@pytest.fixture
def client(gateway: ScriptedGateway, connect: Connect) -> Any:
    return connect(gateway.base_url)
