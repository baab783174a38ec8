"""Deltas between a real sender and a real gRPC server: chained, interrupted, out of order, damaged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zstandard
from counted import counted
from integration.weight_receivers import CHUNK, CONTEXT, P, Receiver, Start, receivers, wanted
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from whole_versions import build_manifest, push_alone, push_weights

from paceline.errors import DataLoss, InvalidInput, PacelineError, WeightsError
from paceline.local.patience import patient
from paceline.tensors import NamedTensor, as_numpy, from_numpy
from paceline.trajectory import VersionSet
from paceline.v1 import weights_pb2 as pb
from paceline.weights import PushReport, WeightSender, abort_version, pull_weights
from paceline.weights.chunks import available_bytes, checked_range, mapped_file
from paceline.weights.delta import HEAD, MAGIC, RECORD, EncodedDelta, encode_delta
from paceline.weights.manifest import hash_of
from paceline.weights.push import push_stream
from paceline.weights.shares import Announced, check_share, cut_ranges, delta_manifest, held_whole

FAR = 1 << 60


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with receivers(tmp_path) as start_one:
        yield start_one


def version(number: int) -> list[NamedTensor]:
    """Version `number`: version 1 is random; each later version moves two values in a hundred by a
    unit.
    """
    rng = np.random.default_rng(7)
    given = [
        rng.standard_normal((600, 800), dtype=np.float32).view(np.uint32) >> 16,
        rng.standard_normal(70_001, dtype=np.float32).view(np.uint32) >> 16,
    ]
    words = [one.astype(np.uint16) for one in given]
    for later in range(2, number + 1):
        moves = np.random.default_rng(later)
        for one in words:
            one += (moves.random(one.shape) < 0.02).astype(np.uint16)
    frozen = from_numpy("frozen", np.arange(3000, dtype=np.float32))
    head, layer = (from_numpy(name, one, "BF16") for name, one in zip("hl", words, strict=True))
    return [head, frozen, layer]


def manifest_of(given: list[NamedTensor], number: int) -> pb.Manifest:
    return build_manifest(P, number, given, chunk_bytes=CHUNK, lm_head_hash=f"hash{number}")


async def push(sender: WeightSender, receiver: Receiver, number: int) -> PushReport:
    whole = announced(version(number), number)
    return await push_alone(sender, receiver.channel, whole, CONTEXT, patient(20))


def announced(given: list[NamedTensor], number: int) -> Announced:
    return check_share(manifest_of(given, number), held_whole(given))


def delta_of(number: int, base: int) -> tuple[pb.Manifest, bytes]:
    old, new = version(base), version(number)
    encoded = encode_delta(old, new, limit=FAR)
    assert encoded is not None
    whole, before = manifest_of(new, number), manifest_of(old, base)
    manifest, _ = delta_manifest(whole, before, encoded.stream)
    return manifest, encoded.stream


async def send(receiver: Receiver, manifest: pb.Manifest, stream: bytes) -> PushReport:
    """A handmade delta."""
    starts = range(0, len(stream), manifest.chunk_bytes)
    view = memoryview(stream)
    ranges = [checked_range(at, view[at : at + manifest.chunk_bytes]) for at in starts]
    cut = partial(cut_ranges, manifest, ranges)
    return await push_stream(receiver.channel, manifest, cut, CONTEXT, deadline_s=patient(20))


def restamp(manifest: pb.Manifest, stream: bytes) -> None:
    """Makes the manifest describe another stream."""
    described, _ = delta_manifest(
        pb.Manifest(chunk_bytes=CHUNK), pb.Manifest(content_hash="base"), stream
    )
    manifest.delta.nbytes, manifest.delta.stream_hash = len(stream), described.delta.stream_hash


async def pushed_whole(start: Start, directory: Path, number: int) -> dict[Path, bytes]:
    """Files that a full push of a version leaves in a separate spool."""
    async with receivers(directory) as start_one:
        receiver = await start_one()
        given = version(number)
        await push_weights(receiver.channel, manifest_of(given, number), given, CONTEXT)
        return files(receiver.spool.path(P, number))


def files(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*.*")}


def ends_after(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """The stream of a delta ends early."""

    def cut(manifest: pb.Manifest, ranges: object, wanted: list[int]) -> object:
        return cut_ranges(manifest, ranges, [one for one in wanted if one < chunks])

    monkeypatch.setattr("paceline.weights.sender.cut_ranges", cut)


async def test_versions_come_whole_then_as_deltas_resumed_and_whole_again_after_a_gap(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metric_reader: InMemoryMetricReader,
) -> None:
    receiver, sender = await start(), WeightSender()
    total = manifest_of(version(1), 1).total_bytes

    reports = [await push(sender, receiver, 1)]
    await receiver.commit(1, 1, 0)
    for number in (2, 3):
        reports.append(await push(sender, receiver, number))
        await receiver.commit(number, number, 0)
    assert [one.encoding for one in reports] == ["full", "sparse_delta", "sparse_delta"]
    assert reports[0].bytes == total
    assert all(0 < one.bytes < 0.04 * total and one.apply_s > 0 for one in reports[1:])

    with monkeypatch.context() as patch:
        ends_after(patch, chunks=1)
        with pytest.raises(WeightsError, match="policy version 4 misses"):
            await push(sender, receiver, 4)
    manifest, stream = delta_of(4, 3)
    missing = list((await wanted(receiver.channel, manifest)).wanted_chunks)
    assert missing == list(range(1, -(-len(stream) // CHUNK)))
    resumed = await push(sender, receiver, 4)
    assert (resumed.encoding, resumed.bytes) == ("sparse_delta", len(stream) - CHUNK)

    await abort_version(receiver.channel, CONTEXT, P, 4)
    out_of_order = await push(sender, receiver, 5)
    assert (out_of_order.encoding, out_of_order.bytes) == ("full", total)
    await receiver.commit(5, 5, 0)
    assert (await push(sender, receiver, 6)).encoding == "sparse_delta"

    assert files(receiver.spool.path(P, 6)) == await pushed_whole(start, tmp_path / "whole", 6)
    content = b"".join(bytes(one.view) for one in version(6))
    assert (receiver.spool.path(P, 6) / "model.safetensors").read_bytes().endswith(content)
    assert (
        counted(metric_reader, "paceline.weights.deltas_left", target="policy", reason="base") == 1
    )
    by_encoding = partial(
        counted, metric_reader, "paceline.weights.received_bytes", target="policy"
    )
    assert by_encoding(encoding="full") == 3 * total  # pushed_whole's spool received a third
    assert by_encoding(encoding="sparse_delta") >= sum(one.bytes for one in reports[1:])


async def test_versions_for_which_memory_is_short_are_assembled_on_the_disk(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def noted(nbytes: int, directory: Path) -> memoryview:
        made.append(nbytes)
        return mapped_file(nbytes, directory)

    receiver, sender = await start(), WeightSender()
    total = manifest_of(version(1), 1).total_bytes
    monkeypatch.setattr("paceline.weights.chunks.mapped_file", noted)
    monkeypatch.setattr("paceline.weights.chunks.available_bytes", lambda: 2 * total - 1)
    for number in (1, 2):
        await push(sender, receiver, number)
    assert made == [total, total]  # the whole version, and the version made from a delta
    monkeypatch.undo()
    assert files(receiver.spool.path(P, 2)) == await pushed_whole(start, tmp_path / "whole", 2)


def test_what_memory_is_available_is_known_here() -> None:
    assert 1 << 20 < available_bytes() < 1 << 60


async def test_a_late_joiner_pulls_what_came_as_a_delta(start: Start, tmp_path: Path) -> None:
    receiver, sender = await start(), WeightSender()
    for number in (1, 2):
        await push(sender, receiver, number)
        await receiver.commit(number, number, 0)
    pulled = await pull_weights(
        receiver.channel, P, lambda _: True, directory=tmp_path, deadline_s=patient(10)
    )
    assert pulled is not None
    assert [bytes(one.view) for one in pulled] == [bytes(one.view) for one in version(2)]


async def test_a_restarted_receiver_takes_deltas_to_what_it_has_spooled(start: Start) -> None:
    receiver, sender = await start(), WeightSender()
    await push(sender, receiver, 1)
    await receiver.commit(1, 1, 0)
    again = await start()
    assert (await push(sender, again, 2)).encoding == "sparse_delta"
    again.spool.check(P, 2)
    assert again.hooks.told == [("prepared", P, 2, "policy-2")]


async def test_a_restarted_sender_finishes_whole_what_it_began_as_a_delta(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, sender = await start(), WeightSender()
    await push(sender, receiver, 1)
    with monkeypatch.context() as patch:
        ends_after(patch, chunks=1)
        with pytest.raises(WeightsError, match="misses"):
            await push(sender, receiver, 2)
    report = await push(WeightSender(), receiver, 2)
    total = manifest_of(version(2), 2).total_bytes
    assert (report.encoding, report.bytes, report.replaced) == ("full", total, False)


async def test_a_version_that_came_as_a_delta_is_known_when_it_is_announced_whole(
    start: Start,
) -> None:
    receiver, sender = await start(), WeightSender()
    for number in (1, 2):
        await push(sender, receiver, number)
    report = await push(WeightSender(), receiver, 2)
    assert (report.bytes, report.replaced) == (0, False)


async def test_where_most_values_change_versions_go_whole(
    start: Start, metric_reader: InMemoryMetricReader
) -> None:
    receiver, sender = await start(), WeightSender()
    await push(sender, receiver, 1)
    rng = np.random.default_rng(5)
    moved = [as_numpy(one) for one in version(1)]
    moved = [one + rng.integers(0, 2000, one.shape).astype(one.dtype) for one in moved]
    given = [
        from_numpy(one.name, words, one.dtype) for one, words in zip(version(1), moved, strict=True)
    ]
    report = await push_alone(sender, receiver.channel, announced(given, 2), CONTEXT)
    assert (report.encoding, report.bytes) == ("full", manifest_of(given, 2).total_bytes)
    left = partial(counted, metric_reader, "paceline.weights.deltas_left", target="policy")
    assert (left(reason="changed"), left()) == (1, 1)


async def test_a_sender_without_deltas_keeps_nothing_and_pushes_whole(start: Start) -> None:
    receiver, sender = await start(), WeightSender("never")
    for number in (1, 2):
        assert (await push(sender, receiver, number)).encoding == "full"
    forgetful = WeightSender()
    await abort_version(receiver.channel, CONTEXT, P, 2)
    await push(forgetful, receiver, 1)
    forgetful.forget()
    assert (await push(forgetful, receiver, 2)).encoding == "full"


async def test_a_base_that_has_rotted_is_blamed_and_the_version_goes_whole(
    start: Start, metric_reader: InMemoryMetricReader
) -> None:
    receiver, sender = await start(), WeightSender()
    await push(sender, receiver, 1)
    await receiver.commit(1, 1, 0)
    path = receiver.spool.path(P, 1) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    manifest, stream = delta_of(2, 1)
    with pytest.raises(
        WeightsError, match=r"base of a delta to policy version 2 .* is damaged"
    ) as refusal:
        await send(receiver, manifest, stream)
    assert refusal.value.reason == "DELTA_BASE"
    assert receiver.spool.damaged == {(P, 1)}
    assert (await push(sender, receiver, 2)).encoding == "full"
    assert counted(metric_reader, "paceline.weights.deltas_left", reason="base") == 1
    receiver.spool.check(P, 2)


Change = Callable[[pb.Manifest, bytes], bytes]


def set_spec(name: str, value: object) -> Change:
    def change(manifest: pb.Manifest, stream: bytes) -> bytes:
        spec = manifest.tensors[0]
        if name == "shape":
            spec.shape[:] = value  # type: ignore[assignment]
        else:
            setattr(spec, name, value)
        return stream

    return change


def set_manifest(name: str, value: object) -> Change:
    def change(manifest: pb.Manifest, stream: bytes) -> bytes:
        setattr(manifest.delta if name == "base_hash" else manifest, name, value)
        return stream

    return change


def spoiled(spoil: Callable[[bytes], bytes]) -> Change:
    """Another stream, named by the manifest."""

    def change(manifest: pb.Manifest, stream: bytes) -> bytes:
        other = spoil(stream)
        restamp(manifest, other)
        return other

    return change


def with_record(count: int, frame: bytes) -> Callable[[bytes], bytes]:
    """A delta of one record."""
    return lambda _: HEAD.pack(MAGIC, 1) + RECORD.pack(0, 0, 480_000, count, len(frame)) + frame


def frame_of(*planes: int) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(planes))


def bomb() -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))


def nan_delta(manifest: pb.Manifest, stream: bytes) -> bytes:
    """A NaN from a sender that does not check values; all checksums are right."""
    old, new = version(1), version(1)
    words = as_numpy(new[2]).copy()
    words[11] = 0x7FC1
    new[2] = from_numpy("l", words, "BF16")
    encoded = encode_delta(old, new, limit=FAR)
    assert encoded is not None
    manifest.content_hash = hash_of(manifest, b"".join(one.view for one in new))
    restamp(manifest, encoded.stream)
    return encoded.stream


REFUSED: dict[str, tuple[Change, type[PacelineError], str, str]] = {
    "another base": (
        set_manifest("base_hash", "5" * 64),
        WeightsError,
        "DELTA_BASE",
        "cannot be used; seen: content [0-9a-f]{16}; allowed: version 1 with content 5555555555555555",
    ),
    "no base": (
        set_manifest("base_version", 9),
        WeightsError,
        "DELTA_BASE",
        "delta to policy version 2 cannot be used; seen: absent; allowed: version 9 with content",
    ),
    "another shape": (set_spec("shape", [800, 600]), WeightsError, "DELTA_BASE", "other tensors"),
    "another dtype": (set_spec("dtype", "F16"), WeightsError, "DELTA_BASE", "other tensors"),
    "another size": (
        set_spec("nbytes", 959_998),
        InvalidInput,
        "INVALID_INPUT",
        "nbytes of h does not fit its shape; seen: 959998; allowed: 960000",
    ),
    "another total": (
        set_manifest("total_bytes", 1_112_004),
        InvalidInput,
        "INVALID_INPUT",
        "sum of the tensors; seen: 1112004; allowed: 1112002",
    ),
    "another content": (
        set_manifest("content_hash", "6" * 64),
        DataLoss,
        "DELTA_DAMAGED",
        "gives other content; seen: [0-9a-f]{64}; allowed: 6{64}",
    ),
    "another stream": (
        lambda _, stream: stream[:-1] + bytes([stream[-1] ^ 1]),
        DataLoss,
        "DATA_LOSS",
        "chunks are not the manifest's delta; seen: [0-9a-f]{64}",
    ),
    "a truncated frame": (
        spoiled(with_record(1, frame_of(0, 0, 0, 0, 255, 0, 0)[:-2])),
        DataLoss,
        "DELTA_DAMAGED",
        "frame of h cannot be read",
    ),
    "a bomb": (
        spoiled(with_record(1, bomb())),
        DataLoss,
        "DELTA_DAMAGED",
        "frame of h has another size; seen: 67108864; allowed: 7",
    ),
    "another count": (
        spoiled(with_record(2, frame_of(0, 0, 0, 0, 255, 0, 0))),
        DataLoss,
        "DELTA_DAMAGED",
        "frame of h has another size; seen: 7; allowed: 13",
    ),
    "an index out of range": (
        spoiled(with_record(1, frame_of(0, 0x53, 7, 0, 255, 0, 0))),
        DataLoss,
        "DELTA_DAMAGED",
        "index in h is out of range; seen: 480000; allowed: < 480000",
    ),
    "a value that is not finite": (nan_delta, WeightsError, "NOT_FINITE", "tensor l holds numbers"),
}


@pytest.mark.parametrize(
    ("change", "kind", "reason", "words"), REFUSED.values(), ids=REFUSED.keys()
)
async def test_a_delta_that_lies_is_refused_with_what_was_seen_and_what_serves_goes_on(
    start: Start, change: Change, kind: type[PacelineError], reason: str, words: str
) -> None:
    receiver, sender = await start(), WeightSender()
    await push(sender, receiver, 1)
    await receiver.commit(1, 1, 0)
    served, told = files(receiver.spool.path(P, 1)), list(receiver.hooks.told)
    manifest, stream = delta_of(2, 1)
    stream = change(manifest, stream)

    with pytest.raises(kind, match=words) as refusal:
        await send(receiver, manifest, stream)
    assert refusal.value.reason == reason
    assert receiver.servicer.serving == VersionSet(1, 1, 0)
    assert (receiver.spool.prepared, receiver.hooks.told) == (frozenset(), told)
    assert files(receiver.spool.path(P, 1)) == served
    assert receiver.spool.damaged == frozenset()
    assert (await push(sender, receiver, 2)).encoding == "sparse_delta"
    receiver.spool.check(P, 2)


async def test_a_sender_whose_delta_is_refused_as_damaged_sends_the_version_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch, metric_reader: InMemoryMetricReader
) -> None:
    receiver, sender = await start(), WeightSender()
    await push(sender, receiver, 1)

    def wrong(*args: object, **options: object) -> EncodedDelta:
        return EncodedDelta(HEAD.pack(MAGIC, 0), 0, 0)

    monkeypatch.setattr("paceline.weights.sender.encode_delta", wrong)
    assert (await push(sender, receiver, 2)).encoding == "full"
    assert counted(metric_reader, "paceline.weights.deltas_left", reason="damaged") == 1
