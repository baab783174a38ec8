"""Life of a server: its port, its health, its end."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from paceline.config import SecurityConfig
from paceline.errors import ConfigError, Unavailable
from paceline.local.patience import patient
from paceline.rpc import Server, channel, wait_healthy, wait_ready
from paceline.v1.weights_pb2 import (
    AbortRequest,
    AbortResponse,
    GetVersionsRequest,
    GetVersionsResponse,
    PullRequest,
)
from paceline.v1.weights_pb2_grpc import (
    WeightServiceServicer,
    WeightServiceStub,
    add_WeightServiceServicer_to_server,
)

OFF = SecurityConfig(token_env="")
NAME = "paceline.v1.WeightService"


class Slow(WeightServiceServicer):  # type: ignore[misc]
    """Abort waits for the test's signal."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    async def Abort(self, request: AbortRequest, context: Any) -> AbortResponse:
        self.entered.set()
        await self.go_on.wait()
        return AbortResponse()

    async def GetVersions(self, request: GetVersionsRequest, context: Any) -> GetVersionsResponse:
        return GetVersionsResponse()


def make(address: str = "127.0.0.1:0") -> tuple[Server, Slow]:
    server, slow = Server(address, OFF), Slow()
    server.add(add_WeightServiceServicer_to_server, slow, NAME)
    return server, slow


@pytest.fixture
async def running() -> AsyncIterator[tuple[Server, Slow, str]]:
    server, slow = make()
    address = f"127.0.0.1:{await server.start()}"
    yield server, slow, address
    await server.stop(0)


async def check(to: grpc.aio.Channel, name: str) -> str:
    response = await HealthStub(to).Check(HealthCheckRequest(service=name), timeout=patient(10))
    return str(HealthCheckResponse.ServingStatus.Name(response.status))


async def test_health_follows_the_flags_and_the_whole_follows_its_parts(
    running: tuple[Server, Slow, str],
) -> None:
    server, _, address = running
    async with channel(address, OFF) as to:
        assert (await check(to, NAME), await check(to, "")) == ("SERVING", "SERVING")
        server.set_serving(NAME, False)
        assert (await check(to, NAME), await check(to, "")) == ("NOT_SERVING", "NOT_SERVING")
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await check(to, "paceline.v1.Nobody")


async def test_a_flag_set_before_the_start_holds() -> None:
    server, _ = make()
    server.set_serving(NAME, False)
    async with channel(f"127.0.0.1:{await server.start()}", OFF) as to:
        assert await check(to, "") == "NOT_SERVING"
    await server.stop(0)


async def test_wait_healthy_returns_when_the_flag_turns(running: tuple[Server, Slow, str]) -> None:
    server, _, address = running
    server.set_serving(NAME, False)
    waiting = asyncio.ensure_future(wait_healthy(address, OFF, patient(10)))
    async with channel(address, OFF) as to:
        watch = HealthStub(to).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        assert not waiting.done()
        server.set_serving(NAME, True)
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        watch.cancel()
    await waiting


async def test_wait_healthy_waits_for_a_server_that_is_yet_to_start() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    waiting = asyncio.ensure_future(wait_healthy(f"127.0.0.1:{port}", OFF, patient(20)))
    await asyncio.sleep(0)
    server, _ = make(f"127.0.0.1:{port}")
    assert await server.start() == port
    await waiting
    await server.stop(0)


async def test_waiting_ends_with_unavailable_when_the_time_is_up(
    running: tuple[Server, Slow, str],
) -> None:
    server, _, address = running
    server.set_serving(NAME, False)
    with pytest.raises(Unavailable, match="seen: NOT_SERVING; allowed: SERVING"):
        await wait_healthy(address, OFF, 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match="no answer"):
            await wait_healthy(nowhere, OFF, 0.3)
        async with channel(nowhere, OFF) as to:
            with pytest.raises(Unavailable, match=f"no connection to {nowhere}"):
                await wait_ready(to, 0.3)


async def test_wait_ready_returns_once_connected(running: tuple[Server, Slow, str]) -> None:
    async with channel(running[2], OFF) as to:
        await wait_ready(to, 10)
        assert to.get_state() == grpc.ChannelConnectivity.READY


async def test_reflection_lists_the_services(running: tuple[Server, Slow, str]) -> None:
    async with channel(running[2], OFF) as to:
        call = ServerReflectionStub(to).ServerReflectionInfo()
        await call.write(ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        await call.write(ServerReflectionRequest(file_containing_symbol=NAME))
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert any(b"paceline/v1/weights.proto" in file for file in files)


async def test_a_graceful_stop_lets_a_running_call_finish_and_refuses_new_ones() -> None:
    server, slow = make()
    async with channel(f"127.0.0.1:{await server.start()}", OFF) as to:
        watch = HealthStub(to).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        call = WeightServiceStub(to).Abort(AbortRequest(), timeout=patient(30))
        await slow.entered.wait()
        stopping = asyncio.ensure_future(server.stop(20))
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await to.unary_unary(f"/{NAME}/Unretried")(b"", timeout=patient(5))
        assert not stopping.done()
        slow.go_on.set()
        assert await call == AbortResponse()
        await asyncio.wait_for(stopping, patient(10))


async def test_a_stop_cancels_what_outlasts_the_grace() -> None:
    server, slow = make()
    async with channel(f"127.0.0.1:{await server.start()}", OFF) as to:
        call = WeightServiceStub(to).Abort(AbortRequest(), timeout=patient(30))
        await slow.entered.wait()
        await asyncio.wait_for(server.stop(0.1), patient(10))
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_a_port_in_use_is_a_config_error(running: tuple[Server, Slow, str]) -> None:
    second, _ = make(running[2])
    with pytest.raises(ConfigError, match="in use") as caught:
        await second.start()
    assert caught.value.seen == running[2]
    await second.stop(0)


async def test_a_channel_finds_a_restarted_server_again() -> None:
    first, _ = make()
    port = await first.start()
    async with channel(f"127.0.0.1:{port}", OFF) as to:
        stub = WeightServiceStub(to)
        await stub.GetVersions(GetVersionsRequest(), timeout=patient(10))
        await first.stop(0)
        second, _ = make(f"127.0.0.1:{port}")
        await second.start()
        assert (
            await stub.GetVersions(GetVersionsRequest(), timeout=patient(10))
            == GetVersionsResponse()
        )
        await second.stop(0)


async def test_a_connection_that_waits_in_a_full_queue_for_a_second_serves_its_call(
    running: tuple[Server, Slow, str],
) -> None:
    """Simulates a busy machine that accepts a connection late: the kernel repeats a SYN in 1 s."""
    host, port = running[2].rsplit(":", 1)
    writers: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        writers.extend((writer, back))
        ways = ((reader, back), (there, writer))
        await asyncio.gather(*(copy(*way) for way in ways), return_exceptions=True)

    async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            to.write(data)
        to.close()

    with socket.create_server(("127.0.0.1", 0), backlog=0) as queue:
        address = queue.getsockname()
        waiting = [socket.create_connection(address)]
        async with channel(f"127.0.0.1:{address[1]}", OFF) as peer:
            call = asyncio.ensure_future(drained(WeightServiceStub(peer).Pull(PullRequest())))
            await asyncio.wait((call,), timeout=0.3)
            proxy = await asyncio.start_server(pass_on, sock=queue)
            with pytest.raises(grpc.aio.AioRpcError, match="this server does not have that method"):
                await asyncio.wait_for(call, patient(10))
        proxy.close()
        for one in (*waiting, *writers):
            one.close()
        closing = (one.wait_closed() for one in writers)
        await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), patient(10))


async def drained(call: AsyncIterator[Any]) -> None:
    async for _ in call:
        pass
