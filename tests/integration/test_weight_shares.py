"""Versions that several senders push together, each with its own share, to a real gRPC server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counted import counted
from integration.test_weight_deltas import files, manifest_of, pushed_whole, version
from integration.weight_receivers import CONTEXT, P, Receiver, Start, receivers, wanted
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.errors import PacelineError, WeightsError
from paceline.local.patience import patient
from paceline.tensors import NUMPY_CODES, NamedTensor
from paceline.trajectory import VersionSet
from paceline.v1 import weights_pb2 as pb
from paceline.weights import Parcel, PushReport, WeightSender, abort_version
from paceline.weights.chunks import CheckedRange
from paceline.weights.manifest import layouts, unchecked_manifest
from paceline.weights.push import DAMAGED_TRIES, push_stream
from paceline.weights.shares import Announced, HeldTensor, Senders, check_share, cut_ranges


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with receivers(tmp_path) as start_one:
        yield start_one


@pytest.fixture
def together() -> Callable[[int], Together]:
    """Number of senders."""
    return Together.of


class Meeting:
    """Threads that exchange JSON values, as ranks do."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=patient(20))
        self._told: list[str] = [""] * count

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = json.dumps(value)
        self._barrier.wait()
        told = [json.loads(one) for one in self._told]
        self._barrier.wait()
        return told


def rows_of(tensor: NamedTensor, count: int, rank: int) -> tuple[int, NamedTensor]:
    """First element and row count of a rank's share, cut as FSDP2 does."""
    rows = tensor.shape[0]
    step = -(-rows // count)
    first, last = min(rank * step, rows), min((rank + 1) * step, rows)
    itemsize = np.dtype(NUMPY_CODES[tensor.dtype]).itemsize
    row = int(np.prod(tensor.shape[1:], dtype=np.int64))
    data = tensor.view[first * row * itemsize : last * row * itemsize]
    shape = (last - first, *tensor.shape[1:])
    return first * row, NamedTensor(tensor.name, tensor.dtype, shape, data)


@dataclass
class Together:
    """So many senders of one model, each with its own rows."""

    senders: list[WeightSender]
    views: list[Senders]

    @classmethod
    def of(cls, count: int) -> Together:
        meeting = Meeting(count)

        def view(rank: int) -> Senders:
            return Senders(rank, lambda value: meeting.exchange(rank, value))

        views = [view(rank) for rank in range(count)]
        return cls([WeightSender("auto", one) for one in views], views)

    async def each(self, work: Callable[[int], Any]) -> list[Any]:
        """Runs the work for every sender in a separate thread."""
        count, loop = len(self.senders), asyncio.get_running_loop()
        with ThreadPoolExecutor(count) as pool:
            return await asyncio.gather(
                *(loop.run_in_executor(pool, work, rank) for rank in range(count))
            )

    def announced(self, rank: int, given: Sequence[NamedTensor], number: int) -> Announced:
        whole = manifest_of([*given], number)
        manifest = unchecked_manifest(
            P,
            number,
            layouts(whole),
            chunk_bytes=whole.chunk_bytes,
            lm_head_hash=whole.lm_head_hash,
        )
        parts = [rows_of(one, len(self.senders), rank) for one in given]
        held = [HeldTensor(index, first, one) for index, (first, one) in enumerate(parts)]
        return check_share(manifest, held, self.views[rank])

    async def plan(self, number: int) -> list[Parcel]:
        given = version(number)
        return await self.each(
            lambda rank: self.senders[rank].plan(self.announced(rank, given, number))
        )

    async def push(self, receiver: Receiver, number: int) -> PushReport:
        """Plans, delivers at the same time and settles, until the version is settled."""
        going: list[Parcel | PushReport] = [*await self.plan(number)]
        while all(isinstance(one, Parcel) for one in going):
            delivered = await self.deliver(receiver, going)
            going = [
                sender.settle(parcel, delivered)
                for sender, parcel in zip(self.senders, going, strict=True)
            ]
        assert all(one == going[0] or isinstance(one, PushReport) for one in going)
        return going[0]

    async def deliver(self, receiver: Receiver, parcels: Sequence[Any]) -> list[Any]:
        return await asyncio.gather(
            *(
                sender.deliver(receiver.channel, parcel, CONTEXT, patient(20))
                for sender, parcel in zip(self.senders, parcels, strict=True)
            )
        )


@pytest.mark.few(4)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
async def test_what_several_senders_bring_is_spooled_as_what_one_has_pushed(
    start: Start, together: Callable[[int], Together], tmp_path: Path, count: int
) -> None:
    receiver, ours = await start(), together(count)
    total = manifest_of(version(1), 1).total_bytes
    first = await ours.push(receiver, 1)
    assert (first.encoding, first.bytes) == ("full", total)
    second = await ours.push(receiver, 2)
    assert second.encoding == "sparse_delta"
    assert 0 < second.bytes < 0.05 * total
    assert [told[:3] for told in receiver.hooks.told] == [("prepared", P, 1), ("prepared", P, 2)]
    await receiver.commit(1, 2, 0)
    for number in (1, 2):
        if receiver.spool.has(P, number):
            alone = await pushed_whole(start, tmp_path / f"whole-{number}", number)
            assert files(receiver.spool.path(P, number)) == alone
    restarted = await start()
    restarted.spool.check(P, 2)
    assert restarted.servicer.serving == VersionSet(1, 2, 0)


async def test_a_version_is_complete_when_the_last_share_is_in_whoever_brings_it(
    start: Start, together: Callable[[int], Together]
) -> None:
    receiver, ours = await start(), together(3)
    parcels = await ours.plan(1)
    for rank in (2, 0):
        delivery = await ours.senders[rank].deliver(
            receiver.channel, parcels[rank], CONTEXT, patient(20)
        )
        assert isinstance(delivery, PushReport)
        assert delivery.missing > 0
        assert receiver.spool.prepared == frozenset()
    with pytest.raises(WeightsError, match="not prepared"):
        await receiver.commit(1, 1, 0)
    last: Any = await ours.senders[1].deliver(receiver.channel, parcels[1], CONTEXT, patient(20))
    assert last.missing == 0
    assert receiver.spool.prepared == {(P, 1)}
    again = await ours.deliver(receiver, parcels)
    assert [(one.bytes, one.missing) for one in again] == [(0, 0)] * 3


async def test_a_broken_stream_of_one_sender_resumes_at_what_is_missing(
    start: Start, together: Callable[[int], Together]
) -> None:
    receiver, ours = await start(), together(2)
    parcels = await ours.plan(1)
    manifest, ranges = parcels[1].manifest, parcels[1].ranges
    own = sum(len(one.data) for one in ranges)

    def breaks(indices: Sequence[int]) -> list[CheckedRange]:
        return [*cut_ranges(manifest, ranges, indices)][:20]

    broken = await push_stream(receiver.channel, manifest, breaks, CONTEXT, deadline_s=patient(20))
    other = await ours.senders[0].deliver(receiver.channel, parcels[0], CONTEXT, patient(20))
    missing = list((await wanted(receiver.channel, manifest)).wanted_chunks)
    assert other.missing == len(missing) > 0
    rest = await ours.senders[1].deliver(receiver.channel, parcels[1], CONTEXT, patient(20))
    assert rest.missing == 0
    assert rest.bytes < own  # no more than its missing chunks
    assert broken.bytes + rest.bytes < own + manifest.chunk_bytes
    receiver.spool.check(P, 1)


async def test_a_receiver_that_restarts_between_two_shares_gets_the_first_again(
    start: Start, together: Callable[[int], Together]
) -> None:
    first, ours = await start(), together(2)
    parcels = await ours.plan(1)
    early = await ours.senders[0].deliver(first.channel, parcels[0], CONTEXT, patient(20))
    again = await start()
    late = await ours.senders[1].deliver(again.channel, parcels[1], CONTEXT, patient(20))
    assert early.missing > 0 < late.missing
    going = [
        sender.settle(parcel, [early, late])
        for sender, parcel in zip(ours.senders, parcels, strict=True)
    ]
    deliveries = await ours.deliver(again, going)
    assert isinstance(ours.senders[0].settle(going[0], deliveries), PushReport)
    again.spool.check(P, 1)


async def test_a_version_that_never_becomes_complete_is_given_up(
    start: Start, together: Callable[[int], Together]
) -> None:
    receiver, ours = await start(), together(2)
    parcel: Any = (await ours.plan(1))[0]
    sender = ours.senders[0]
    for _ in range(DAMAGED_TRIES - 1):
        own = await sender.deliver(receiver.channel, parcel, CONTEXT, patient(20))
        parcel = sender.settle(parcel, [own])
    with pytest.raises(WeightsError, match="policy version 1 misses chunks"):
        sender.settle(parcel, [own])


async def test_what_one_sender_meets_is_raised_at_all_of_them(
    start: Start, together: Callable[[int], Together]
) -> None:
    receiver, ours = await start(), together(2)
    parcels = await ours.plan(1)
    met = WeightsError("the gateway is elsewhere")
    fine = await ours.senders[0].deliver(receiver.channel, parcels[0], CONTEXT, patient(20))
    for sender, parcel in zip(ours.senders, parcels, strict=True):
        with pytest.raises(PacelineError, match="elsewhere"):
            sender.settle(parcel, [fine, met])


async def test_a_delta_whose_base_is_gone_goes_whole_from_all_senders(
    start: Start, together: Callable[[int], Together], metric_reader: InMemoryMetricReader
) -> None:
    receiver, ours = await start(), together(3)
    await ours.push(receiver, 1)
    await abort_version(receiver.channel, CONTEXT, P, 1)
    report = await ours.push(receiver, 2)
    assert report.encoding == "full"
    assert report.bytes == manifest_of(version(2), 2).total_bytes
    assert counted(metric_reader, "paceline.weights.deltas_left", reason="base") == 1
    receiver.spool.check(P, 2)


async def test_a_sender_that_has_lost_its_base_has_all_go_whole(
    start: Start, together: Callable[[int], Together]
) -> None:
    receiver, ours = await start(), together(2)
    await ours.push(receiver, 1)
    ours.senders[1].forget()
    assert (await ours.push(receiver, 2)).encoding == "full"
    await receiver.commit(1, 2, 0)
    assert (await ours.push(receiver, 3)).encoding == "sparse_delta"


async def test_a_number_that_is_not_finite_at_one_sender_is_told_to_all(
    start: Start, together: Callable[[int], Together]
) -> None:
    ours, given = together(2), version(1)
    words = bytearray(given[2].view)
    words[-2:] = b"\xc1\x7f"
    given[2] = NamedTensor(given[2].name, given[2].dtype, given[2].shape, bytes(words))

    def announce(rank: int) -> str:
        with pytest.raises(WeightsError, match="tensor l holds numbers") as refusal:
            ours.announced(rank, given, 1)
        return refusal.value.reason

    assert await ours.each(announce) == ["NOT_FINITE"] * 2


async def test_the_manifest_is_the_same_at_every_sender_as_one_would_announce_it(
    together: Callable[[int], Together],
) -> None:
    ours, given = together(3), version(1)
    of_all = await ours.each(lambda rank: ours.announced(rank, given, 1).manifest)
    assert of_all == [manifest_of(given, 1)] * 3
    assert isinstance(of_all[0], pb.Manifest)
