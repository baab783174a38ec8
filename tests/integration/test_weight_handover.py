"""What a receiver takes of files that are handed over, and what it refuses, over real gRPC."""

from __future__ import annotations

import gc
import os
import secrets
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from counted import counted
from integration.test_weight_deltas import manifest_of, version
from integration.weight_receivers import (
    CHUNK,
    CONTEXT,
    P,
    Receiver,
    Start,
    in_file,
    receivers,
    wanted,
)
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.errors import (
    ConfigError,
    DataLoss,
    InvalidInput,
    PacelineError,
    ResourceExhausted,
    StaleEpoch,
    WeightsError,
)
from paceline.local.patience import patient
from paceline.rpc import rpc_errors
from paceline.v1 import weights_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights import PushReport, WeightSender, abort_version
from paceline.weights.handover import HandoverDirectory, remove_scratch
from paceline.weights.shares import Announced

MEMORY = Path("/dev/shm")
NAME = "0123456789abcdef" * 2
CONTENT = b"".join(bytes(one.view) for one in version(1))


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with receivers(tmp_path) as start_one:
        yield start_one


@pytest.fixture
async def receiver(start: Start, tmp_path: Path) -> Receiver:
    """One that takes files, to which a version is announced."""
    one = await start(handover=tmp_path / "handover")
    await wanted(one.channel, manifest_of(version(1), 1))
    return one


def announced(scratch: Path, number: int = 1) -> Announced:
    """All of a version in a file."""
    return in_file(manifest_of(version(number), number), version(number), scratch)


async def push(receiver: Receiver, whole: Announced) -> PushReport:
    sender = WeightSender("never")
    return await sender.push(receiver.channel, whole, CONTEXT, deadline_s=patient(20))


def range_of(start: int = 0, nbytes: int = CHUNK, **other: int) -> pb.FileRange:
    given = {"position": start, "crc32": zlib.crc32(CONTENT[start : start + nbytes]), **other}
    return pb.FileRange(start=start, nbytes=nbytes, **given)


async def take(receiver: Receiver, *ranges: pb.FileRange, **other: object) -> pb.PushResponse:
    given = {"context": CONTEXT, "target": P, "version": 1, "file": NAME, **other}
    with rpc_errors():
        response = await WeightServiceStub(receiver.channel).Take(
            pb.TakeRequest(ranges=ranges, **given), timeout=patient(10)
        )
    taken: pb.PushResponse = response.taken
    return taken


async def test_a_version_in_a_file_is_handed_over_and_leaves_no_name(
    start: Start, tmp_path: Path, metric_reader: InMemoryMetricReader
) -> None:
    receiver = await start(handover=tmp_path / "handover")
    report = await push(receiver, announced(tmp_path))
    assert (report.by_file, report.bytes, report.missing) == (True, len(CONTENT), 0)
    assert os.listdir(tmp_path / "handover") == []
    receiver.spool.check(P, 1)
    assert counted(metric_reader, "paceline.weights.received_bytes", way="file") == len(CONTENT)
    assert counted(metric_reader, "paceline.weights.received_bytes", way="network") == 0


@pytest.mark.slow
async def test_a_file_is_handed_over_again_and_goes_with_its_owner(
    start: Start, tmp_path: Path
) -> None:
    receiver = await start(handover=tmp_path / "handover")
    scratch = tmp_path / "scratch"
    whole = announced(scratch)
    assert os.listdir(scratch) == []
    for _ in range(3):
        assert (await push(receiver, whole)).by_file
        await abort_version(receiver.channel, CONTEXT, P, 1)
    assert len(os.listdir(scratch)) == 1
    del whole
    gc.collect()
    assert os.listdir(scratch) == []


def test_what_a_killed_sender_has_left_is_removed(tmp_path: Path) -> None:
    for name in (".scratch-1", "checkpoint-1"):
        (tmp_path / name).touch()
    remove_scratch(tmp_path)
    remove_scratch(tmp_path / "nowhere")
    assert os.listdir(tmp_path) == ["checkpoint-1"]


async def test_a_large_version_is_handed_over_in_several_calls(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.weights.push.RANGES_A_CALL", 50)
    receiver = await start(handover=tmp_path / "handover")
    report = await push(receiver, announced(tmp_path))
    assert (report.by_file, report.bytes, report.missing) == (True, len(CONTENT), 0)
    receiver.spool.check(P, 1)


@pytest.mark.parametrize("field", ["boot_id", "inode", "device", "directory"])
async def test_a_receiver_on_another_host_is_sent_the_version(
    start: Start, tmp_path: Path, field: str
) -> None:
    receiver = await start(handover=tmp_path / "handover")
    told = receiver.servicer.reception.handover
    assert told is not None
    elsewhere = {"boot_id": "another", "directory": str(tmp_path / "not-here")}.get(field, 7)
    setattr(told.described, field, elsewhere)
    report = await push(receiver, announced(tmp_path))
    assert (report.by_file, report.bytes) == (False, len(CONTENT))


@pytest.mark.skipif(not MEMORY.is_dir(), reason="there is no file system in memory")
async def test_a_file_on_another_file_system_is_sent(start: Start, tmp_path: Path) -> None:
    receiver = await start(handover=tmp_path / "handover")
    report = await push(receiver, announced(MEMORY))
    assert (report.by_file, report.bytes) == (False, len(CONTENT))


async def test_a_receiver_that_refuses_the_file_is_sent_the_version(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = await start(handover=tmp_path / "handover")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "not-a-name-that-is-taken")
    report = await push(receiver, announced(tmp_path))
    assert (report.by_file, report.bytes) == (False, len(CONTENT))


def link(folder: Path) -> None:
    (folder.parent / "secret").write_bytes(CONTENT)
    (folder / NAME).symlink_to(folder.parent / "secret")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / NAME)


def of_somebody_else(folder: Path) -> None:
    (folder / NAME).write_bytes(CONTENT)
    os.chown(folder / NAME, 65534, 65534)


FILES: dict[str, Callable[[Path], object]] = {
    "a link": link,
    "a pipe": pipe,
    "a directory": lambda folder: (folder / NAME).mkdir(),
    "nothing": lambda folder: None,
    "too short": lambda folder: (folder / NAME).write_bytes(CONTENT[: CHUNK - 1]),
    "somebody else's": of_somebody_else,
}


@pytest.mark.parametrize("make", FILES.values(), ids=FILES.keys())
async def test_what_is_no_file_of_the_receivers_user_is_refused(
    receiver: Receiver, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    try:
        make(tmp_path / "handover")
    except PermissionError:
        pytest.skip("only root gives files away")
    with pytest.raises(InvalidInput, match="is not taken; seen: ") as refusal:
        await take(receiver, range_of())
    assert refusal.value.reason == "HANDOVER"
    assert 0 in receiver.servicer.reception.receiving((P, 1)).missing()


@pytest.mark.parametrize(
    "name", ["", ".", "../secret", "/etc/passwd", "a" * 33, NAME.upper(), NAME + "\n"]
)
async def test_a_name_that_leads_out_of_the_directory_is_refused(
    receiver: Receiver, tmp_path: Path, name: str
) -> None:
    (tmp_path / "secret").write_bytes(CONTENT)
    with pytest.raises(InvalidInput, match="name of a file") as refusal:
        await take(receiver, range_of(), file=name)
    assert refusal.value.reason == "HANDOVER"


WRONG: dict[str, tuple[pb.FileRange, type[PacelineError], str]] = {
    "other bytes": (range_of(position=1), DataLoss, "chunk 0 of policy version 1 is corrupt"),
    "longer than a chunk": (range_of(nbytes=CHUNK + 1), InvalidInput, "longer than a chunk"),
    "across two chunks": (range_of(start=9), InvalidInput, "wrong length"),
    "of nothing": (range_of(nbytes=0), InvalidInput, "wrong length"),
    "beyond the version": (
        range_of(start=1 << 40, position=0, crc32=zlib.crc32(CONTENT[:CHUNK])),
        InvalidInput,
        "chunk index is out of range",
    ),
    "beyond the file": (range_of(position=1 << 62), InvalidInput, "not taken"),
    "beyond any file": (range_of(position=(1 << 64) - 1), InvalidInput, "not taken"),
}


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG.values(), ids=WRONG.keys())
async def test_a_range_that_is_not_the_versions_is_refused_and_the_rest_is_taken(
    receiver: Receiver,
    tmp_path: Path,
    wrong: pb.FileRange,
    error: type[PacelineError],
    words: str,
) -> None:
    (tmp_path / "handover" / NAME).write_bytes(CONTENT)
    with pytest.raises(error, match=words):
        await take(receiver, wrong)
    spans = range(0, len(CONTENT), CHUNK)
    rest = [range_of(at, min(CHUNK, len(CONTENT) - at)) for at in spans]
    response = await take(receiver, *rest)
    assert response.missing_chunks == 0
    receiver.spool.check(P, 1)


async def test_a_file_is_taken_for_an_announced_version_of_the_newest_lease_alone(
    receiver: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "handover" / NAME).write_bytes(CONTENT)
    with pytest.raises(WeightsError, match="no Prepare announced"):
        await take(receiver, range_of(), version=2)
    with pytest.raises(StaleEpoch):
        await take(receiver, range_of(), context=CommandContext(run_id="local", epoch=2))


async def test_a_receiver_that_takes_no_files_refuses_them(start: Start) -> None:
    receiver = await start()
    answer = await wanted(receiver.channel, manifest_of(version(1), 1))
    assert not answer.HasField("handover")
    with pytest.raises(InvalidInput, match="files are not taken here"):
        await take(receiver, range_of())


def test_a_directory_that_others_can_write_to_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match="not a directory for handing weights over"):
            HandoverDirectory(tmp_path / name)
    (tmp_path / "plain").write_text("")
    with pytest.raises(ResourceExhausted, match="plain"):
        HandoverDirectory(tmp_path / "plain")


def test_names_that_a_killed_sender_has_left_go_at_the_start_and_no_others(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    (tmp_path / "notes").touch()
    tmp_path.chmod(0o700)
    HandoverDirectory(tmp_path)
    assert os.listdir(tmp_path) == ["notes"]
