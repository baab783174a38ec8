"""Hosts without a path to the gateway's spool copy versions from each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.test_spool_copies import SIZE, P, files, spooled

from paceline.config import SecurityConfig
from paceline.errors import InvalidInput, NotFound, Unavailable
from paceline.rpc import channel, rpc_errors
from paceline.rpc.server import Server
from paceline.services.rollout_gateway.workers import spool_copies, spool_reading
from paceline.services.rollout_gateway.workers.hosts import SERVICE
from paceline.services.rollout_gateway.workers.spool_copies import SpoolCopies
from paceline.services.rollout_gateway.workers.spool_reading import Copy, read_spooled, source_of
from paceline.v1 import workers_pb2 as pb
from paceline.v1.workers_pb2_grpc import (
    WorkerHostServiceServicer,
    WorkerHostServiceStub,
    add_WorkerHostServiceServicer_to_server,
)
from paceline.weights import Spool

LOOPBACK = "127.0.0.1:1"
BYTES = 4 * SIZE
FEW = 100_000
"""Bytes of manifests and headers, at most."""


class Tree(WorkerHostServiceServicer):
    """A gateway and hosts that copy from it."""

    def __init__(self, spool: Spool, directory: Path, stack: AsyncExitStack) -> None:
        self.spool = spool
        self.fan_out = 1
        self.sent_bytes = 0
        self.addresses: dict[int, str] = {}
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self._directory = directory
        self._stack = stack
        self.stub: Any = None

    async def ReadSpooled(
        self, request: pb.ReadSpooledRequest, context: Any
    ) -> AsyncIterator[pb.ReadSpooledResponse]:
        source = source_of(request.host, self.addresses, self.fan_out)
        parts = 0
        async for response in read_spooled(self.spool, request, source):
            if (parts := parts + 1) > 2:
                await self.goes_on.wait()
            self.sent_bytes += len(response.data)
            yield response

    async def host(self, number: int) -> SpoolCopies:
        """Another host, from which others may copy."""
        directory = self._directory / f"host-{number}"
        copies = SpoolCopies(self._directory / "spool", directory, number, SecurityConfig())
        self.addresses[number] = await copies.serve(LOOPBACK)
        self._stack.push_async_callback(copies.close)
        return copies


@pytest.fixture
async def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tree]:
    monkeypatch.setattr(spool_copies, "AGAIN_S", 0.01)
    spool = Spool(tmp_path / "spool", keep=8, initial={P: tmp_path})
    async with AsyncExitStack() as stack:
        tree = Tree(spool, tmp_path, stack)
        server = Server("127.0.0.1:0", SecurityConfig())
        server.add(add_WorkerHostServiceServicer_to_server, tree, SERVICE)
        port = await server.start()
        stack.push_async_callback(server.stop, 0)
        peer = await stack.enter_async_context(channel(f"127.0.0.1:{port}", SecurityConfig()))
        tree.stub = WorkerHostServiceStub(peer)
        yield tree


@pytest.mark.parametrize("fan_out", [1, 2])
async def test_the_gateway_sends_a_version_to_as_many_hosts_as_it_is_told(
    tree: Tree, fan_out: int
) -> None:
    tree.fan_out = fan_out
    hosts = [await tree.host(number) for number in range(1, 6)]
    spooled(tree.spool, 1, 0.5)
    copies = await asyncio.gather(*(host.copy(P, 1, tree.stub) for host in hosts))
    assert all(files(copy) == files(tree.spool.path(P, 1)) for copy in copies)
    assert 0 <= tree.sent_bytes - fan_out * BYTES < FEW


def something_comes(monkeypatch: pytest.MonkeyPatch, host: str) -> asyncio.Event:
    """Set once that host has some of a version's tensors."""
    begun, tell = asyncio.Event(), Copy.tell

    def noted(copy: Copy) -> None:
        tell(copy)
        if (copy.directory / "model.safetensors").exists() and copy.directory.parent.name == host:
            begun.set()

    monkeypatch.setattr(Copy, "tell", noted)
    return begun


async def test_a_host_sends_on_what_comes_before_it_has_all(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await tree.host(1), await tree.host(2)
    spooled(tree.spool, 1, 0.5)
    begun = something_comes(monkeypatch, "host-2")
    tree.goes_on.clear()
    copies = asyncio.gather(first.copy(P, 1, tree.stub), second.copy(P, 1, tree.stub))
    await asyncio.wait_for(begun.wait(), 30)
    assert tree.sent_bytes < BYTES
    tree.goes_on.set()
    await copies
    assert tree.sent_bytes < BYTES + FEW


async def test_the_gateway_sends_the_rest_when_a_host_is_gone(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await tree.host(1), await tree.host(2)
    spooled(tree.spool, 1, 0.5)
    begun = something_comes(monkeypatch, "host-2")
    tree.goes_on.clear()
    ending = asyncio.create_task(first.copy(P, 1, tree.stub))
    copying = asyncio.create_task(second.copy(P, 1, tree.stub))
    await asyncio.wait_for(begun.wait(), 30)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    tree.goes_on.set()
    assert files(await copying) == files(tree.spool.path(P, 1))
    assert tree.sent_bytes < 2 * BYTES, "what the other had sent is kept"


async def test_what_a_host_has_damaged_is_copied_from_the_gateway(tree: Tree) -> None:
    first, second = await tree.host(1), await tree.host(2)
    spooled(tree.spool, 1, 0.5)
    path = await first.copy(P, 1, tree.stub) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert files(await second.copy(P, 1, tree.stub)) == files(tree.spool.path(P, 1))


async def stop(tree: Tree, first: SpoolCopies) -> None:
    await first.close()


async def copy_another(tree: Tree, first: SpoolCopies) -> None:
    await first.copy(P, 1, tree.stub)
    tree.spool.remove(P, 1)
    spooled(tree.spool, 1, 0.25)


@pytest.mark.parametrize("before", [None, stop, copy_another])
async def test_a_host_that_has_nothing_of_a_version_is_left(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, before: Callable[..., Any] | None
) -> None:
    monkeypatch.setattr(spool_reading, "BEGINS_S", 0.05)
    monkeypatch.setattr(spool_copies, "CONNECT_S", 0.5)
    first, second = await tree.host(1), await tree.host(2)
    spooled(tree.spool, 1, 0.5)
    if before is not None:
        await before(tree, first)
    assert files(await second.copy(P, 1, tree.stub)) == files(tree.spool.path(P, 1))


@pytest.mark.parametrize(
    ("name", "start", "manifest", "error", "said"),
    [
        ("../versions.json", 0, "", NotFound, "no such file of a spooled version"),
        ("", 0, "", NotFound, "no such file of a spooled version"),
        ("manifest.json", 1 << 40, "", InvalidInput, "the file ends before"),
        ("manifest.json", 0, "00", Unavailable, "no copy of policy-1 is made here"),
    ],
)
async def test_nothing_but_files_of_copies_is_read_from_a_host(
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    start: int,
    manifest: str,
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.setattr(spool_reading, "BEGINS_S", 0.05)
    first = await tree.host(1)
    spooled(tree.spool, 1, 0.5, size=8)
    copy = await first.copy(P, 1, tree.stub)
    asked = pb.ReadSpooledRequest(target=P, version=1, name=name, start=start)
    asked.manifest = manifest or spool_reading.hash_of_manifest(copy / "manifest.json")
    async with channel(tree.addresses[1], SecurityConfig()) as peer:
        with pytest.raises(error, match=said), rpc_errors():
            async for _ in WorkerHostServiceStub(peer).ReadSpooled(asked, timeout=20):
                pass
