"""Weights between a real sender and a real gRPC server, over the network and over files on one
host.

Push, refuse, resume, commit, roll back, restart.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from counted import counted
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from integration.weight_receivers import (
    CHUNK,
    CONTEXT,
    D,
    P,
    Start,
    cut_chunks,
    manifest_of,
    push_request,
    receivers,
    send,
    tensors,
    wanted,
)
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from safetensors.numpy import load_file

from paceline.errors import (
    DataLoss,
    InvalidInput,
    ResourceExhausted,
    StaleEpoch,
    Unavailable,
    WeightsError,
)
from paceline.local.patience import patient
from paceline.rpc import rpc_errors
from paceline.tensors import from_numpy
from paceline.trajectory import VersionSet
from paceline.v1 import weights_pb2 as pb
from paceline.v1.engine_pb2 import (
    PAUSE_MODE_IN_PLACE,
    WEIGHT_TARGET_POLICY_HEAD,
)
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights import (
    SERVICE_NAME,
    abort_version,
    pull_weights,
)
from paceline.weights.chunks import content_hash
from paceline.weights.push import DAMAGED_TRIES, encode_push


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with receivers(tmp_path) as start_one:
        yield start_one


async def test_pushed_version_is_spooled_as_a_safetensors_file_and_prepared(start: Start) -> None:
    receiver = await start()
    given = await receiver.push(P, 1)
    loaded = load_file(receiver.spool.path(P, 1) / "model.safetensors")
    assert list(loaded) == ["a", "b", "c"]
    for tensor in given:
        assert loaded[tensor.name].tobytes() == bytes(tensor.data)
    assert receiver.hooks.told == [("prepared", P, 1, "policy-1")]
    assert receiver.spool.sets.serving is None


async def test_generated_client_pushes_to_the_raw_method(start: Start) -> None:
    receiver = await start()
    given = tensors(4)
    manifest = manifest_of(given, P, 1)
    indices = list((await wanted(receiver.channel, manifest)).wanted_chunks)

    async def messages() -> AsyncIterator[pb.PushRequest]:
        for index, data in cut_chunks(manifest, given, indices):
            crc = zlib.crc32(data)
            context = None if index else CONTEXT
            yield pb.PushRequest(
                target=P, version=1, chunk_index=index, crc32=crc, data=bytes(data), context=context
            )

    response = await WeightServiceStub(receiver.channel).Push(messages(), timeout=patient(10))
    assert response.bytes_received == manifest.total_bytes
    assert receiver.spool.prepared == {(P, 1)}


async def test_repeated_push_sends_nothing(start: Start) -> None:
    receiver = await start()
    given = await receiver.push(P, 1)
    report = await receiver.deliver(manifest_of(given, P, 1), given)
    assert report.bytes == 0
    assert len(receiver.hooks.told) == 1


async def test_corrupt_chunk_is_refused_and_the_rest_resumes(start: Start) -> None:
    receiver = await start()
    given = tensors(1)
    manifest = manifest_of(given, P, 1)

    def spoil(chunk: pb.PushRequest) -> pb.PushRequest:
        if chunk.chunk_index == 5:
            chunk.data = chunk.data[:-1] + bytes([chunk.data[-1] ^ 1])
        return chunk

    count = -(-manifest.total_bytes // CHUNK)
    with pytest.raises(DataLoss, match="chunk 5 of policy version 1 is corrupt"):
        await send(receiver.channel, given, manifest, list(range(count)), spoil)
    assert receiver.spool.prepared == frozenset()
    assert list((await wanted(receiver.channel, manifest)).wanted_chunks) == list(range(5, count))
    report = await receiver.deliver(manifest, given)
    assert report.bytes == manifest.total_bytes - 5 * CHUNK
    assert receiver.spool.prepared == {(P, 1)}


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_what_is_damaged_on_its_way_is_sent_again_up_to_three_times(
    start: Start, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    receiver = await start()
    given = tensors(1)
    manifest = manifest_of(given, P, 1)
    damaged: list[int] = []

    def damage(chunk: pb.PushRequest, data: memoryview) -> bytes:
        message = bytearray(encode_push(chunk, data))
        if chunk.chunk_index == 5 and len(damaged) < times:
            damaged.append(chunk.chunk_index)
            message[-1] ^= 1
        return bytes(message)

    monkeypatch.setattr("paceline.weights.push.encode_push", damage)
    pushing = receiver.deliver(manifest, given)
    if times < DAMAGED_TRIES:
        assert (await pushing).bytes == manifest.total_bytes - 5 * CHUNK
        assert receiver.spool.prepared == {(P, 1)}
    else:
        with pytest.raises(DataLoss, match="chunk 5 of policy version 1 is corrupt"):
            await pushing
    assert damaged == [5] * times


async def test_a_request_that_no_longer_is_one_when_it_arrives_was_damaged(
    start: Start,
) -> None:
    receiver = await start()
    prepare = receiver.channel.unary_unary(f"/{SERVICE_NAME}/Prepare")
    with pytest.raises(DataLoss, match="not the message that this method takes"), rpc_errors():
        await prepare(b"\x0a\xff", timeout=patient(10))


async def test_a_sender_that_is_still_sending_hears_why_it_is_refused(start: Start) -> None:
    receiver = await start()
    given = [from_numpy("a", np.zeros(1 << 17, np.float32))]
    manifest = manifest_of(given, P, 1)
    count = -(-manifest.total_bytes // CHUNK)
    sent: list[int] = []

    def spoil(chunk: pb.PushRequest) -> pb.PushRequest:
        sent.append(chunk.chunk_index)
        if chunk.chunk_index == 3:
            chunk.crc32 ^= 1
        return chunk

    with pytest.raises(DataLoss, match="chunk 3 of policy version 1 is corrupt"):
        await send(receiver.channel, given, manifest, list(range(count)), spoil)
    assert sent == list(range(count))  # the status call broke no write


async def test_a_sender_that_falls_silent_hears_within_a_second_or_two_why_it_is_refused(
    start: Start,
) -> None:
    receiver = await start()
    given = tensors(1)
    manifest = manifest_of(given, P, 1)
    await wanted(receiver.channel, manifest)
    push = receiver.channel.stream_unary(
        f"/{SERVICE_NAME}/Push", response_deserializer=pb.PushResponse.FromString
    )

    async def one_chunk_and_no_end() -> AsyncIterator[bytes]:
        index, data = next(iter(cut_chunks(manifest, given, [0])))
        chunk = push_request(index, data, CONTEXT)
        chunk.crc32 ^= 1
        yield chunk.SerializeToString()
        await asyncio.Event().wait()

    with pytest.raises(DataLoss, match="chunk 0 of policy version 1 is corrupt"), rpc_errors():
        await push(one_chunk_and_no_end(), timeout=patient(10))


async def test_push_resumes_after_a_dropped_connection(start: Start) -> None:
    receiver = await start()
    given = tensors(1)
    manifest = manifest_of(given, P, 1)
    await wanted(receiver.channel, manifest)
    arrived, place = asyncio.Event(), receiver.servicer.reception.receiving((P, 1)).place

    def seen(chunk: pb.PushRequest) -> int:
        placed = place(chunk)
        if chunk.chunk_index == 2:
            arrived.set()
        return placed

    receiver.servicer.reception.receiving((P, 1)).place = seen  # type: ignore[method-assign]

    async def stall() -> AsyncIterator[bytes]:
        for index, data in cut_chunks(manifest, given, [0, 1, 2]):
            yield push_request(index, data, None if index else CONTEXT).SerializeToString()
        await asyncio.Event().wait()

    call = receiver.channel.stream_unary(f"/{SERVICE_NAME}/Push")(stall(), timeout=patient(10))
    await asyncio.wait_for(arrived.wait(), patient(10))
    call.cancel()
    report = await receiver.deliver(manifest, given)
    assert report.bytes == manifest.total_bytes - 3 * CHUNK
    assert load_file(receiver.spool.path(P, 1) / "model.safetensors")["c"].tobytes() == bytes(
        given[2].data
    )


async def test_sender_that_leaves_while_workers_load_does_not_leave_half_a_change(
    start: Start,
) -> None:
    receiver = await start()
    receiver.hooks.may_load.clear()
    push = asyncio.create_task(receiver.push(P, 1))
    await asyncio.wait_for(receiver.hooks.loading.wait(), patient(10))
    push.cancel()
    given = tensors(1)
    again = asyncio.create_task(wanted(receiver.channel, manifest_of(given, P, 1)))
    receiver.hooks.may_load.set()
    assert (await again).complete
    assert receiver.hooks.told == [("prepared", P, 1, "policy-1")]


async def test_half_pushed_version_is_never_served(start: Start) -> None:
    receiver = await start()
    given = tensors(1)
    assert (
        await send(receiver.channel, given, manifest_of(given, P, 1), [0, 1])
    ).missing_chunks > 0
    with pytest.raises(WeightsError, match="not prepared") as refusal:
        await receiver.commit(1, 1, 0)
    assert (refusal.value.seen, refusal.value.allowed) == ("1", "[0]")
    assert receiver.hooks.told == []
    assert receiver.spool.sets.serving is None


async def test_commit_tells_workers_first_and_a_failing_worker_flips_nothing(start: Start) -> None:
    receiver = await start()
    await receiver.push(P, 1)
    receiver.hooks.fail.add("commit")
    with pytest.raises(Unavailable):
        await receiver.commit(1, 1, 0)
    assert receiver.spool.sets.serving is None
    receiver.hooks.fail.clear()
    assert await receiver.commit(1, 1, 0) == VersionSet(1, 1, 0)
    assert receiver.hooks.told[-1] == ("commit", VersionSet(1, 1, 0), PAUSE_MODE_IN_PLACE)
    assert await receiver.commit(1, 1, 0) == VersionSet(1, 1, 0), (
        "the same commit again is answered"
    )
    assert len([note for note in receiver.hooks.told if note[0] == "commit"]) == 1
    with pytest.raises(WeightsError, match="seq of a commit must grow"):
        await receiver.commit(1, 0, 0)


async def test_drafter_rolls_back_to_the_spooled_one_under_a_new_seq(start: Start) -> None:
    receiver = await start()
    for version in (1, 2):
        await receiver.push(D, version)
        await receiver.commit(version, 0, version)
    assert await receiver.commit(3, 0, 1) == VersionSet(3, 0, 1)
    assert receiver.hooks.told[-2] == ("prepared", D, 1, "drafter-1"), (
        "workers load the old drafter again"
    )
    versions = await WeightServiceStub(receiver.channel).GetVersions(
        pb.GetVersionsRequest(), timeout=patient(10)
    )
    assert (versions.versions.drafter, versions.previous.drafter) == (1, 2)


async def test_policy_versions_only_grow(start: Start) -> None:
    receiver = await start()
    await receiver.push(P, 2)
    await receiver.commit(1, 2, 0)
    with pytest.raises(WeightsError, match="only grow"):
        await receiver.push(P, 1)
    given = tensors(2)
    assert (await wanted(receiver.channel, manifest_of(given, P, 2))).complete


async def test_other_content_of_a_version_that_does_not_serve_takes_its_place(
    start: Start, metric_reader: InMemoryMetricReader
) -> None:
    receiver = await start()
    await receiver.push(P, 1, seed=1)
    given = tensors(2)
    manifest = manifest_of(given, P, 1)
    report = await receiver.deliver(manifest, given)
    assert (report.replaced, report.bytes) == (True, manifest.total_bytes)
    assert [note[0] for note in receiver.hooks.told] == ["prepared", "abort", "prepared"]
    assert load_file(receiver.spool.path(P, 1) / "model.safetensors")["a"].tobytes() == bytes(
        given[0].data
    )
    assert not (await receiver.deliver(manifest, given)).replaced
    assert counted(metric_reader, "paceline.weights.versions_replaced", target="policy") == 1


async def test_other_content_of_a_half_pushed_version_takes_its_place(start: Start) -> None:
    receiver = await start()
    given, others = tensors(1), tensors(2)
    assert (
        await send(receiver.channel, given, manifest_of(given, P, 1), [0, 1])
    ).missing_chunks > 0
    manifest = manifest_of(others, P, 1)
    report = await receiver.deliver(manifest, others)
    assert (report.replaced, report.bytes) == (True, manifest.total_bytes)


async def test_a_sender_that_another_has_replaced_places_no_chunk(start: Start) -> None:
    receiver = await start()
    given, others = tensors(1), tensors(2)
    old, new = manifest_of(given, P, 1), manifest_of(others, P, 1)
    await wanted(receiver.channel, old)
    arrived, place = asyncio.Event(), receiver.servicer.reception.receiving((P, 1)).place

    def seen(chunk: pb.PushRequest) -> int:
        placed = place(chunk)
        arrived.set()
        return placed

    receiver.servicer.reception.receiving((P, 1)).place = seen  # type: ignore[method-assign]
    prepared = asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        for index, data in cut_chunks(old, given, [0, 1]):
            yield push_request(index, data, None if index else CONTEXT).SerializeToString()
            await prepared.wait()

    call = receiver.channel.stream_unary(f"/{SERVICE_NAME}/Push")(messages(), timeout=patient(10))
    await asyncio.wait_for(arrived.wait(), patient(10))
    assert (await wanted(receiver.channel, new)).replaced
    prepared.set()
    with pytest.raises(WeightsError, match="no Prepare announced"), rpc_errors():
        await call
    assert 1 in receiver.servicer.reception.receiving((P, 1)).missing()


@pytest.mark.parametrize("serving", [True, False], ids=["serving", "previous"])
async def test_other_content_of_a_version_that_has_served_is_refused(
    start: Start, serving: bool
) -> None:
    receiver = await start()
    await receiver.push(D, 1, seed=1)
    await receiver.commit(1, 0, 1)
    if not serving:
        await receiver.push(D, 2)
        await receiver.commit(2, 0, 2)
    with pytest.raises(WeightsError, match="drafter version 1 is kept with other content"):
        await receiver.push(D, 1, seed=2)


async def test_what_serves_can_be_pulled_bit_for_bit(start: Start, tmp_path: Path) -> None:
    receiver = await start()
    never = await pull_weights(
        receiver.channel, P, lambda one: bool(one.tensors), directory=tmp_path, deadline_s=10
    )
    assert never is None
    given = await receiver.push(P, 1)
    await receiver.commit(1, 1, 0)
    await receiver.push(P, 2)
    pulled = await pull_weights(
        receiver.channel,
        P,
        lambda manifest: manifest.version == 1,
        directory=tmp_path,
        deadline_s=patient(10),
    )
    assert pulled is not None
    assert [(one.layout, bytes(one.view)) for one in pulled] == [
        (one.layout, bytes(one.view)) for one in given
    ]
    other = await pull_weights(
        receiver.channel, P, lambda one: one.version == 2, directory=tmp_path, deadline_s=10
    )
    assert other is None


async def test_a_pull_of_bytes_that_rotted_on_disk_is_data_loss(
    start: Start, tmp_path: Path
) -> None:
    receiver = await start()
    await receiver.push(P, 1)
    await receiver.commit(1, 1, 0)
    path = receiver.spool.path(P, 1) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataLoss, match="not the manifest's content"):
        await pull_weights(
            receiver.channel, P, lambda _: True, directory=tmp_path, deadline_s=patient(10)
        )
    path.write_bytes(data[:-9])
    with pytest.raises(DataLoss, match="ends inside chunk"):
        await pull_weights(
            receiver.channel, P, lambda _: True, directory=tmp_path, deadline_s=patient(10)
        )


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
async def test_a_version_damaged_before_its_commit_is_not_served_and_pushed_again(
    start: Start, name: str
) -> None:
    first = await start()
    given = await first.push(P, 1)
    flip(first.spool.path(P, 1) / name)
    again = await start()  # the loaded version is gone, as after a kill
    with pytest.raises(DataLoss, match=name):
        await again.commit(1, 1, 0)
    assert again.hooks.told == []
    assert again.servicer.serving == VersionSet()
    await again.push(P, 1)
    assert [told[:3] for told in again.hooks.told] == [("prepared", P, 1)]
    await again.commit(1, 1, 0)
    pushed = load_file(again.spool.path(P, 1) / "model.safetensors")
    assert pushed["a"].tobytes() == bytes(given[0].view)


async def test_a_serving_version_damaged_on_disk_is_repaired_by_its_next_announcement(
    start: Start,
) -> None:
    receiver = await start()
    given = await receiver.push(P, 1)
    await receiver.commit(1, 1, 0)
    flip(receiver.spool.path(P, 1) / "model.safetensors")
    told = list(receiver.hooks.told)
    answer = await wanted(receiver.channel, manifest_of(given, P, 1))
    assert not answer.complete
    await receiver.push(P, 1)
    receiver.spool.check(P, 1)
    assert receiver.hooks.told == told, "what serves was loaded again"
    assert receiver.servicer.serving == VersionSet(1, 1, 0)


async def test_a_drafter_damaged_on_disk_is_not_rolled_back_to(start: Start) -> None:
    receiver = await start()
    await receiver.push(D, 1)
    await receiver.commit(1, 0, 1)
    await receiver.push(D, 2)
    await receiver.commit(2, 0, 2)
    flip(receiver.spool.path(D, 1) / "model.safetensors")
    with pytest.raises(DataLoss, match="drafter-1"):
        await receiver.commit(3, 0, 1)
    assert receiver.servicer.serving == VersionSet(2, 0, 2)


async def test_a_version_that_is_not_here_is_forgotten_already(start: Start) -> None:
    receiver = await start()
    await abort_version(receiver.channel, CONTEXT, P, 9)


async def test_serving_version_cannot_be_aborted(start: Start) -> None:
    receiver = await start()
    await receiver.push(P, 1)
    await receiver.commit(1, 1, 0)
    with pytest.raises(WeightsError, match="serving"):
        await abort_version(receiver.channel, CONTEXT, P, 1)


async def test_failed_fan_out_fails_the_push_and_the_next_prepare_loads(start: Start) -> None:
    receiver = await start()
    receiver.hooks.fail.add("prepared")
    with pytest.raises(Unavailable):
        await receiver.push(P, 1)
    receiver.hooks.fail.clear()
    given = tensors(1)
    report = await receiver.deliver(manifest_of(given, P, 1), given)
    assert report.bytes == 0
    assert receiver.hooks.told == [("prepared", P, 1, "policy-1")]


async def test_chunks_of_other_bytes_than_the_manifest_names_are_refused(start: Start) -> None:
    receiver = await start()
    given, others = tensors(1), tensors(2)
    manifest = manifest_of(given, P, 1)
    with pytest.raises(DataLoss, match="not the manifest's content"):
        await send(
            receiver.channel, others, manifest, list(range(-(-manifest.total_bytes // CHUNK)))
        )
    assert receiver.spool.prepared == frozenset()
    report = await receiver.deliver(manifest, given)
    assert report.bytes == manifest.total_bytes


@pytest.mark.parametrize("value", [np.nan, -np.inf])
async def test_a_version_with_a_number_that_is_not_finite_is_neither_sent_nor_taken(
    start: Start, value: float, metric_reader: InMemoryMetricReader
) -> None:
    receiver = await start()
    given = tensors(1)
    broken = [given[0], given[1], from_numpy("c", np.where(np.arange(9000) == 8999, value, 0.0))]
    with pytest.raises(WeightsError, match="tensor c holds numbers that are not finite"):
        manifest_of(broken, P, 1)
    manifest = manifest_of(given, P, 1)
    indices = range(-(-manifest.total_bytes // CHUNK))
    crcs = (zlib.crc32(data) for _, data in cut_chunks(manifest, broken, indices))
    manifest.content_hash = content_hash(crcs)  # as a sender without checks would write it
    with pytest.raises(WeightsError, match="tensor c holds numbers that are not finite"):
        await send(receiver.channel, broken, manifest, list(indices))
    assert (receiver.hooks.told, receiver.spool.prepared) == ([], frozenset())
    assert counted(metric_reader, "paceline.weights.versions_refused", target="policy") == 1
    await receiver.push(P, 1)


async def test_versions_in_flight_are_bounded(start: Start) -> None:
    receiver = await start()
    await receiver.push(P, 1)
    await receiver.push(P, 2)
    with pytest.raises(ResourceExhausted, match="in flight") as refusal:
        await receiver.push(P, 3)
    assert refusal.value.seen == "policy version 1, policy version 2"
    await receiver.push(D, 1)


async def test_foreign_target_and_stale_epoch_are_refused(start: Start) -> None:
    receiver = await start()
    small = tensors(1)[:1]
    with pytest.raises(InvalidInput, match="does not accept the target"):
        await wanted(receiver.channel, manifest_of(small, WEIGHT_TARGET_POLICY_HEAD, 1))
    await wanted(receiver.channel, manifest_of(small, P, 1))
    with pytest.raises(StaleEpoch):
        await receiver.deliver(
            manifest_of(small, P, 1), small, CommandContext(run_id="local", epoch=2)
        )


async def test_a_version_that_finds_no_room_on_the_disk_is_refused_before_it_is_sent(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = await start()
    manifest = manifest_of(tensors(1), P, 1)
    usage = shutil.disk_usage(".")._replace(free=manifest.total_bytes - 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ResourceExhausted, match="no room for a version") as refusal:
            await wanted(receiver.channel, manifest)
    assert refusal.value.reason == "DISK_FULL"
    assert refusal.value.allowed == f"{manifest.total_bytes - 1} bytes are free"
    await receiver.push(P, 1)


async def test_chunks_of_a_lease_that_a_newer_one_replaced_are_refused(start: Start) -> None:
    receiver = await start()
    given = tensors(1)
    manifest = manifest_of(given, P, 1)
    await wanted(receiver.channel, manifest)
    newer = CommandContext(run_id="local", step=1, epoch=CONTEXT.epoch + 1)
    await abort_version(receiver.channel, newer, P, 7)
    index, data = next(iter(cut_chunks(manifest, given, [0])))
    stale = push_request(index, data, CONTEXT).SerializeToString()

    async def messages() -> AsyncIterator[bytes]:
        yield stale

    push = receiver.channel.stream_unary(f"/{SERVICE_NAME}/Push")
    with pytest.raises(StaleEpoch), rpc_errors():
        await push(messages(), timeout=patient(10))
    assert 0 in receiver.servicer.reception.receiving((P, 1)).missing()


async def test_a_commit_with_the_number_of_the_serving_set_reaches_no_worker(start: Start) -> None:
    receiver = await start()
    await receiver.push(P, 1)
    await receiver.commit(1, 1, 0)
    await receiver.push(P, 2)
    told = list(receiver.hooks.told)
    with pytest.raises(WeightsError, match="seq of a commit must grow; seen: 1; allowed: > 1"):
        await receiver.commit(1, 2, 0)
    assert receiver.hooks.told == told


async def test_a_half_pushed_version_below_the_serving_one_takes_no_place(start: Start) -> None:
    receiver = await start()
    given = tensors(1)
    half = manifest_of(given, P, 1)
    assert (await send(receiver.channel, given, half, [0, 1])).missing_chunks > 0
    await receiver.push(P, 2)
    await receiver.commit(1, 2, 0)
    await receiver.push(P, 3)
    await receiver.push(P, 4)
    with pytest.raises(WeightsError, match="only grow"):
        await wanted(receiver.channel, half)


async def test_restarted_receiver_commits_what_was_spooled(start: Start) -> None:
    first = await start()
    await first.push(P, 1)
    second = await start()
    assert await second.commit(1, 1, 0) == VersionSet(1, 1, 0)
    assert [note[0] for note in second.hooks.told] == ["prepared", "commit"]


async def test_bytes_that_are_no_message_are_data_loss(start: Start) -> None:
    receiver = await start()

    async def messages() -> AsyncIterator[bytes]:
        yield b"\x7a\xff\xff\xff\xff\x0f"

    with pytest.raises(DataLoss, match="not the message that this method takes"), rpc_errors():
        await receiver.channel.stream_unary(f"/{SERVICE_NAME}/Push")(
            messages(), timeout=patient(10)
        )


async def test_reflection_shows_the_service(start: Start) -> None:
    receiver = await start()
    stub = reflection_pb2_grpc.ServerReflectionStub(receiver.channel)
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)
    call = stub.ServerReflectionInfo(iter([request]), timeout=patient(10))
    async for response in call:
        assert response.file_descriptor_response.file_descriptor_proto
        break


async def test_versions_file_names_the_committed_set(start: Start, tmp_path: Path) -> None:
    receiver = await start()
    await receiver.push(P, 1)
    await receiver.commit(1, 1, 0)
    sets = json.loads((tmp_path / "spool" / "versions.json").read_text())["sets"]
    assert sets == [{"seq": 1, "policy": 1, "drafter": 0, "profile": ""}]


async def test_a_version_that_arrives_is_progress_of_its_receiver_until_it_is_loaded(
    start: Start,
) -> None:
    receiver = await start()
    activity, began_s = receiver.servicer.reception.activity, time.monotonic()
    assert activity.doing == ""
    receiver.hooks.may_load.clear()
    pushing = asyncio.create_task(receiver.push(P, 1))
    await asyncio.wait_for(receiver.hooks.loading.wait(), patient(10))
    assert activity.doing == "receives weights"
    assert activity.began_s > began_s
    assert activity.moved_s > activity.began_s, "its chunks and the spool"
    receiver.hooks.may_load.set()
    await pushing
    assert activity.doing == "", "nothing arrives any more"
