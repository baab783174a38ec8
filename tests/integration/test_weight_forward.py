"""A receiver forwards each version to the next receiver, over real gRPC servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from integration.weight_receivers import (
    CONTEXT,
    P,
    Receiver,
    cut_chunks,
    manifest_of,
    push_request,
    receivers,
    tensors,
    wanted,
)

from paceline.config import SecurityConfig
from paceline.errors import PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.rpc import channel, rpc_errors
from paceline.v1 import weights_pb2 as pb
from paceline.weights import SERVICE_NAME, abort_version
from paceline.weights import push as weights_push
from paceline.weights.chunks import chunk_count


@asynccontextmanager
async def chain(directory: Path, count: int = 2) -> AsyncIterator[list[Receiver]]:
    """Receivers that each forward to the next receiver."""
    async with AsyncExitStack() as stack:
        found: list[Receiver] = []
        for number in reversed(range(count)):
            start = await stack.enter_async_context(receivers(directory / str(number)))
            following = found[0].channel if found else None
            found.insert(0, await start(following=following))
        yield found


def content(receiver: Receiver, version: int) -> bytes:
    return (receiver.spool.path(P, version) / "model.safetensors").read_bytes()


async def test_a_version_reaches_all_receivers_of_a_chain_once(
    tmp_path: Path,
) -> None:
    async with chain(tmp_path, 3) as found:
        await found[0].push(P, 1)
        assert [one.hooks.told for one in found] == [[("prepared", P, 1, "policy-1")]] * 3
        assert len({content(one, 1) for one in found}) == 1
        await found[0].push(P, 1)
        assert [len(one.hooks.told) for one in found] == [1, 1, 1]


async def test_chunks_reach_the_next_receiver_before_the_push_ends(tmp_path: Path) -> None:
    async with chain(tmp_path) as (first, second):
        given = tensors(1)
        manifest = manifest_of(given, P, 1)
        half = chunk_count(manifest) // 2
        await wanted(second.channel, manifest)
        await wanted(first.channel, manifest)
        there = second.servicer.reception.receiving((P, 1))

        async def messages() -> AsyncIterator[bytes]:
            for index, data in cut_chunks(manifest, given, range(chunk_count(manifest))):
                context = None if index else CONTEXT
                yield push_request(index, data, context).SerializeToString()
                while index == half and len(there.arrived) <= half:
                    there.news.clear()
                    await there.news.wait()

        push = first.channel.stream_unary(
            f"/{SERVICE_NAME}/Push", response_deserializer=pb.PushResponse.FromString
        )
        async with asyncio.timeout(patient(10)):
            with rpc_errors():
                response = await push(messages(), timeout=patient(10))
        assert not response.missing_chunks
        assert content(second, 1) == content(first, 1)


async def test_a_version_that_the_next_receiver_refuses_fails_the_push_until_repeated(
    tmp_path: Path,
) -> None:
    async with chain(tmp_path) as (first, second):
        second.hooks.fail.add("prepared")
        with pytest.raises(Unavailable, match="prepared fails"):
            await first.push(P, 1)
        assert first.hooks.told
        second.hooks.fail.clear()
        await first.push(P, 1)
        assert second.hooks.told == [("prepared", P, 1, "policy-1")]


async def test_a_receiver_that_starts_again_without_its_files_gets_the_version_by_a_repeat(
    tmp_path: Path,
) -> None:
    port = free_port()
    following = channel(f"127.0.0.1:{port}", SecurityConfig())
    async with receivers(tmp_path / "first") as start:
        first = await start(following=following)
        async with receivers(tmp_path / "second") as start_second:
            await start_second(port=port)
            await first.push(P, 1)
        with pytest.raises(PacelineError):
            await first.push(P, 2)
        async with receivers(tmp_path / "third") as start_third:
            third = await start_third(port=port)
            await first.push(P, 2)
            await first.push(P, 1)
            assert third.hooks.told == [
                ("prepared", P, 2, "policy-2"),
                ("prepared", P, 1, "policy-1"),
            ]
    await following.close()


async def test_an_aborted_version_is_dropped_by_all(tmp_path: Path) -> None:
    async with chain(tmp_path) as (first, second):
        await first.push(P, 1)
        await abort_version(first.channel, CONTEXT, P, 1)
        assert second.hooks.told[-1] == ("abort", P, 1)
        assert not second.spool.has(P, 1)


async def test_a_version_that_stops_arriving_is_not_kept_by_its_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sending() -> bool:
        return any("_consume_request_iterator" in repr(one) for one in asyncio.all_tasks())

    async with chain(tmp_path) as (first, _), asyncio.timeout(patient(20)):
        monkeypatch.setattr(weights_push, "BASE_DEADLINE_S", patient(1))
        await wanted(first.channel, manifest_of(tensors(1), P, 1))
        while not sending():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        while sending():  # noqa: ASYNC110  it holds the buffer
            await asyncio.sleep(0.02)
