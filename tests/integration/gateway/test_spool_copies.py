"""A host without a path to the gateway's spool copies versions over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import SecurityConfig
from paceline.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from paceline.rpc import channel, rpc_errors
from paceline.rpc.server import Server
from paceline.services.rollout_gateway.workers import spool_copies
from paceline.services.rollout_gateway.workers.hosts import SERVICE, WorkerHosts
from paceline.services.rollout_gateway.workers.parts import PART_BYTES
from paceline.services.rollout_gateway.workers.spool_copies import KEPT, TRIES, SpoolCopies
from paceline.tensors import from_numpy
from paceline.v1 import engine_pb2
from paceline.v1 import workers_pb2 as pb
from paceline.v1.workers_pb2_grpc import (
    WorkerHostServiceStub,
    add_WorkerHostServiceServicer_to_server,
)
from paceline.weights import Spool, build_manifest

P = engine_pb2.WEIGHT_TARGET_POLICY
SIZE = 5 * PART_BYTES // 4
"""Numbers of a version: five parts."""


def spooled(spool: Spool, number: int, value: float, size: int = SIZE) -> None:
    array = np.full(size, value, dtype=np.float32)
    spool.write(build_manifest(P, number, [from_numpy("w", array)]), array.tobytes())


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Hosts(WorkerHosts):
    """Counts what it sends; some calls end after two parts."""

    def __init__(self, spool: Spool) -> None:
        super().__init__((1, 1), None, {}, spool)
        self.sent_bytes = 0
        self.breaks = 0

    async def ReadSpooled(
        self, request: pb.ReadSpooledRequest, context: Any
    ) -> AsyncIterator[pb.ReadSpooledResponse]:
        parts = 0
        async for response in super().ReadSpooled(request, context):
            if parts == 2 and self.breaks:
                self.breaks -= 1
                raise Unavailable("broken off")
            parts += 1
            self.sent_bytes += len(response.data)
            yield response


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", keep=8, initial={P: tmp_path})


@pytest.fixture
def hosts(spool: Spool) -> Hosts:
    return Hosts(spool)


@pytest.fixture
async def stub(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(spool_copies, "AGAIN_S", 0.01)
    server = Server("127.0.0.1:0", SecurityConfig())
    server.add(add_WorkerHostServiceServicer_to_server, hosts, SERVICE)
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", SecurityConfig()) as peer:
        yield WorkerHostServiceStub(peer)
    await server.stop(0)


@pytest.fixture
def copies(tmp_path: Path) -> SpoolCopies:
    return SpoolCopies(tmp_path / "spool", tmp_path / "copies", host=1)


async def test_a_copy_is_what_was_spooled_and_is_sent_once(
    spool: Spool, hosts: Hosts, stub: Any, copies: SpoolCopies
) -> None:
    spooled(spool, 1, 0.5)
    copy = await copies.copy(P, 1, stub)
    assert files(copy) == files(spool.path(P, 1))
    sent = hosts.sent_bytes
    assert await copies.copy(P, 1, stub) == copy
    assert hosts.sent_bytes - sent < 10_000, "only the manifest is asked for again"


async def test_a_copy_that_breaks_off_goes_on_where_it_ended(
    spool: Spool, hosts: Hosts, stub: Any, copies: SpoolCopies
) -> None:
    spooled(spool, 1, 0.5)
    hosts.breaks = 2
    copy = await copies.copy(P, 1, stub)
    assert files(copy) == files(spool.path(P, 1))
    assert hosts.sent_bytes == sum(map(len, files(copy).values()))


async def test_a_gateway_that_sends_nothing_is_given_up_and_what_has_come_is_kept(
    spool: Spool, hosts: Hosts, stub: Any, copies: SpoolCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooled(spool, 1, 0.5)
    hosts.breaks = 2
    calls = 0
    whole = WorkerHosts.ReadSpooled

    async def silent(self: WorkerHosts, request: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal calls
        if request.start:
            calls += 1
            raise Unavailable("away")
        async for response in whole(self, request, context):
            yield response

    with monkeypatch.context() as patched:
        patched.setattr(WorkerHosts, "ReadSpooled", silent)
        with pytest.raises(Unavailable, match="away"):
            await copies.copy(P, 1, stub)
    assert calls == TRIES - 1  # the first call had brought two parts
    sent, hosts.breaks = hosts.sent_bytes, 0
    copy = await copies.copy(P, 1, stub)
    assert files(copy) == files(spool.path(P, 1))
    size = sum(map(len, files(copy).values()))
    assert hosts.sent_bytes - sent < size - PART_BYTES


async def test_a_version_that_was_pushed_again_is_copied_again(
    spool: Spool, stub: Any, copies: SpoolCopies
) -> None:
    for value in (0.5, 0.25):
        spool.remove(P, 1)
        spooled(spool, 1, value)
        assert files(await copies.copy(P, 1, stub)) == files(spool.path(P, 1))


async def test_a_copy_of_a_damaged_version_counts_for_nothing(
    spool: Spool, tmp_path: Path, stub: Any, copies: SpoolCopies
) -> None:
    spooled(spool, 1, 0.5)
    path = spool.path(P, 1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataLoss, match="damaged"):
        await copies.copy(P, 1, stub)
    assert not [one for one in (tmp_path / "copies").iterdir() if one.is_dir()]


async def test_the_newest_copies_stay(
    spool: Spool, tmp_path: Path, stub: Any, copies: SpoolCopies
) -> None:
    for number in range(1, KEPT + 3):
        spooled(spool, number, number, size=8)
        await copies.copy(P, number, stub)
    kept = {path.name for path in (tmp_path / "copies").iterdir()}
    assert kept == {f"policy-{number}" for number in range(3, KEPT + 3)}


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        (pb.ReadSpooledRequest(target=P, version=7), NotFound, "no such version is spooled"),
        (pb.ReadSpooledRequest(target=P, version=0), NotFound, "no such version is spooled"),
        (
            pb.ReadSpooledRequest(target=P, version=1, name="../versions.json"),
            NotFound,
            "no such file .* seen: ../versions.json; allowed: .*model.safetensors",
        ),
        (
            pb.ReadSpooledRequest(target=P, version=1, name="manifest.json", start=1 << 40),
            InvalidInput,
            "the file ends before",
        ),
    ],
)
async def test_nothing_but_files_of_spooled_versions_is_read(
    spool: Spool, stub: Any, asked: pb.ReadSpooledRequest, error: type[Exception], said: str
) -> None:
    spooled(spool, 1, 0.5, size=8)
    with pytest.raises(error, match=said), rpc_errors():
        async for _ in stub.ReadSpooled(asked, timeout=20):
            pass


async def test_only_what_lies_in_the_spool_is_copied(
    spool: Spool, tmp_path: Path, stub: Any, copies: SpoolCopies
) -> None:
    spooled(spool, 1, 0.5, size=8)
    elsewhere = str(tmp_path / "model")
    own = engine_pb2.PrepareWeights(target=P, path=elsewhere)
    assert await copies.path_of(own, stub) == elsewhere
    told = engine_pb2.PrepareWeights(target=P, version=1, path=str(spool.path(P, 1)))
    assert await copies.path_of(told, stub) == str(tmp_path / "copies" / "policy-1")


async def test_a_gateway_that_sends_no_more_is_given_up(
    spool: Spool, stub: Any, copies: SpoolCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooled(spool, 1, 0.5)

    async def silent(self: WorkerHosts, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.name:
            await asyncio.Event().wait()
        async for response in whole(self, request, context):
            yield response

    whole = WorkerHosts.ReadSpooled
    monkeypatch.setattr(WorkerHosts, "ReadSpooled", silent)
    monkeypatch.setattr(spool_copies, "STALLED_S", 0.5)
    monkeypatch.setattr(spool_copies, "TRIES", 2)
    with pytest.raises(DeadlineExceeded, match=r"no more of manifest.json is sent"):
        await copies.copy(P, 1, stub)


async def test_a_host_that_cannot_write_says_so(
    spool: Spool, tmp_path: Path, stub: Any, copies: SpoolCopies
) -> None:
    spooled(spool, 1, 0.5, size=8)
    (tmp_path / "copies").write_text("a file")
    with pytest.raises(ResourceExhausted, match="policy-1 cannot be written"):
        await copies.copy(P, 1, stub)


async def test_files_beside_a_version_are_not_written(
    spool: Spool, stub: Any, copies: SpoolCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def strange(self: WorkerHosts, request: Any, context: Any) -> AsyncIterator[Any]:
        yield pb.ReadSpooledResponse(files={"../versions.json": 3})

    monkeypatch.setattr(WorkerHosts, "ReadSpooled", strange)
    with pytest.raises(DataLoss, match=r"lies beside it; seen: \.\./versions.json"):
        await copies.copy(P, 1, stub)
