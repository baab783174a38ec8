"""Measures weights over gRPC and hidden-state batches through Redis, each beside a raw TCP copy of
the same bytes.

The receivers are separate processes. Runs interleave (ours, raw, ours, raw), and the two runs of a
pair are neighbours in time. Both sides check the CRC-32 of every chunk of 1 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import grpc
import numpy as np
import numpy.typing as npt

from benchmarks.processes import Meter, child, redis_server
from benchmarks.receivers import CHUNK_HEAD, GROUP, TOTAL
from benchmarks.result import BenchResult, Goal, Ratio, Row, paired_ratio, ratio_goal
from paceline.config import SecurityConfig
from paceline.processor import keep_freed_memory
from paceline.rpc import channel
from paceline.streams import FeatureBatch, RedisStream, connect, encode_features
from paceline.tensors import NamedTensor, from_numpy
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weights import Parcel, PushReport, WeightSender, abort_version
from paceline.weights.manifest import unchecked_manifest
from paceline.weights.push import push_deadline_s
from paceline.weights.shares import Announced, check_share, held_whole

MIB = 1 << 20
PUSH_GOAL, REDIS_GOAL = 0.6, 0.15
CONTEXT = CommandContext(run_id="bench", epoch=1)
RECEIVERS = "benchmarks.receivers"
WARM_PAIRS = 1
READ_COUNT = 4
"""Entries a reader takes at a time."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """One transfer; seconds, and MiB for the peak of each process."""

    wall_s: float
    cpu_s: float
    sender_peak_mib: float
    far_peak_mib: float  # receiver, and the Redis server where there is one
    spool_s: float = 0.0
    fan_out_s: float = 0.0


Transfer = Callable[[], Awaitable[tuple[float, float, float]]]
"""Does one transfer; returns its wall seconds, spool seconds and fan-out seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--mib", type=int, default=128, help="MiB of one transfer")
    parser.add_argument(
        "--pairs", type=int, default=41, help="pairs between two looks at the interval"
    )
    parser.add_argument(
        "--looks",
        type=int,
        default=4,
        help="looks at most; the first that resolves the ratio ends it",
    )
    parser.add_argument("--quick", action="store_true", help="64 MiB, 3 pairs, one look")


async def run(options: argparse.Namespace) -> BenchResult:
    """Makes both comparisons."""
    keep_freed_memory()
    mib, pairs, looks = (64, 3, 1) if options.quick else (options.mib, options.pairs, options.looks)
    rows: list[Row] = []
    goals: list[Goal] = []
    # The gRPC comparison is last, since starting processes beside gRPC's threads is unsafe.
    for name, goal, compare in (
        ("redis", REDIS_GOAL, _compare_redis),
        ("weight push", PUSH_GOAL, _compare_push),
    ):
        ours, raw, ratio = await compare(mib, pairs, looks)
        rows += [_row(name, mib, ours, str(ratio)), _row(f"raw TCP ({name})", mib, raw, "")]
        goals.append(ratio_goal(f"{name} / raw TCP copy", goal, ratio))
    return BenchResult(f"transport, {mib} MiB", rows, goals)


async def _compare_push(
    mib: int, pairs: int, looks: int
) -> tuple[list[TransferCost], list[TransferCost], Ratio]:
    tensors = _weights(mib)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(child(RECEIVERS, "weights"))
        port = (await receiver.answer())["port"]
        raw = await raw_copy(stack, [tensor.view for tensor in tensors])
        to = await stack.enter_async_context(channel(f"127.0.0.1:{port}", SecurityConfig()))
        layouts = [tensor.layout for tensor in tensors]
        manifest = unchecked_manifest(WEIGHT_TARGET_POLICY, 1, layouts)
        whole = check_share(manifest, held_whole(tensors))
        sender = WeightSender("never")

        async def push() -> tuple[float, float, float]:
            report = await push_alone(sender, to, whole)
            return transfer_s(report), report.spool_s, report.fan_out_s

        async def forget() -> None:
            await abort_version(to, CONTEXT, WEIGHT_TARGET_POLICY, 1)

        return await _interleave(pairs, looks, (push, [receiver.pid], forget), raw)


async def _compare_redis(
    mib: int, pairs: int, looks: int
) -> tuple[list[TransferCost], list[TransferCost], Ratio]:
    fields, payload = _features()
    async with AsyncExitStack() as stack:
        url, server = await redis_server(stack, "features")
        receiver = await stack.enter_async_context(child(RECEIVERS, "redis", url))
        await receiver.answer()
        client = await stack.enter_async_context(connect(url))
        raw = await raw_copy(stack, [memoryview(payload)] * mib)
        stream = RedisStream(client, "paceline:{bench}:features")
        stack.push_async_callback(stream.close)
        await stream.create_group(GROUP)

        async def append() -> tuple[float, float, float]:
            started_s = time.monotonic()
            receiver.tell(key=stream.key, entries=mib, count=READ_COUNT)
            for _ in range(mib):
                header = {**fields, "crc32": str(zlib.crc32(payload))}
                await stream.append_all([(header, payload)])
            await receiver.answer()
            return time.monotonic() - started_s, 0.0, 0.0

        return await _interleave(pairs, looks, (append, [receiver.pid, server], None), raw)


async def _interleave(
    pairs: int,
    looks: int,
    ours: tuple[Transfer, list[int], Callable[[], Awaitable[None]] | None],
    raw: tuple[Transfer, list[int]],
) -> tuple[list[TransferCost], list[TransferCost], Ratio]:
    """Runs the pairs; throughput ratio = raw wall / our wall.

    Ending at the first resolved look makes the interval a little too narrow (optional stopping);
    the number of looks is small for that reason.
    """
    transfer, pids, forget = ours
    runs: tuple[list[TransferCost], list[TransferCost]] = ([], [])
    for look in range(looks):
        for _ in range(pairs + (0 if look else WARM_PAIRS)):
            runs[0].append(await measure(transfer, pids))
            if forget is not None:
                await forget()
            runs[1].append(await measure(*raw))
        kept = [side[WARM_PAIRS:] for side in runs]
        ratio = paired_ratio([one.wall_s for one in kept[1]], [one.wall_s for one in kept[0]])
        if ratio.resolved:
            break

    return kept[0], kept[1], ratio


async def push_alone(sender: WeightSender, to: grpc.aio.Channel, whole: Announced) -> PushReport:
    """Pushes a version that one sender holds as a whole."""
    started_s, deadline_s = time.monotonic(), push_deadline_s(whole.manifest.total_bytes)
    going: Parcel | PushReport = await asyncio.to_thread(sender.plan, whole)
    while isinstance(going, Parcel):
        going = sender.settle(going, [await sender.deliver(to, going, CONTEXT, deadline_s)])
    return replace(going, push_s=time.monotonic() - started_s)


def transfer_s(report: PushReport) -> float:
    """Seconds from Prepare until the bytes are checked in the receiver's memory."""
    return report.push_s - report.spool_s - report.fan_out_s


async def measure(transfer: Transfer, far: list[int]) -> TransferCost:
    """Measures one transfer between this process and the receiving processes."""
    meters = [Meter(pid) for pid in (os.getpid(), *far)]
    wall_s, spool_s, fan_out_s = await transfer()
    sender, *others = (meter.read() for meter in meters)
    peak_mib = sum(one.peak_rss_mib for one in others)
    cpu_s = sender.cpu_s + sum(one.cpu_s for one in others)
    return TransferCost(wall_s, cpu_s, sender.peak_rss_mib, peak_mib, spool_s, fan_out_s)


async def raw_copy(
    stack: AsyncExitStack, parts: Sequence[memoryview]
) -> tuple[Transfer, list[int]]:
    """Makes a blocking sender of the same bytes in chunks of 1 MiB.

    A transfer lasts from the announcement to the receiver's last check.
    """
    receiver = await stack.enter_async_context(child(RECEIVERS, "tcp"))
    port = (await receiver.answer())["port"]
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    chunks = [part[start : start + MIB] for part in parts for start in range(0, len(part), MIB)]

    def send() -> float:
        started_s = time.monotonic()
        connection.sendall(TOTAL.pack(sum(map(len, chunks))))
        offset = 0
        for chunk in chunks:
            connection.sendall(CHUNK_HEAD.pack(offset, len(chunk), zlib.crc32(chunk)))
            connection.sendall(chunk)
            offset += len(chunk)
        connection.recv(1)
        return time.monotonic() - started_s

    async def copy() -> tuple[float, float, float]:
        return await asyncio.to_thread(send), 0.0, 0.0

    return copy, [receiver.pid]


def _weights(mib: int) -> list[NamedTensor]:
    """Normal numbers in bfloat16, in four tensors."""
    rng = np.random.default_rng(0)
    parts = [
        _normal_bfloat16(rng, (part.size * MIB // 2,)) for part in np.array_split(range(mib), 4)
    ]
    return [from_numpy(f"layers.{index}.weight", part, "BF16") for index, part in enumerate(parts)]


def _normal_bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """Finite bfloat16 numbers, as weights must be: the upper half of each float32."""
    numbers = rng.standard_normal(shape, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _features() -> tuple[dict[str, str], bytes]:
    """One entry of about 1 MiB: 512 rows of 1024 in bfloat16."""
    rows, hidden = 512, 1024
    rng = np.random.default_rng(1)
    batch = FeatureBatch(
        run_id="bench",
        step=0,
        session_id="bench",
        policy_version=0,
        lm_head_hash="0" * 16,
        hidden=from_numpy("hidden", _normal_bfloat16(rng, (rows, hidden)), "BF16"),
        token_ids=rng.integers(0, 1000, rows + 1, dtype=np.int32),
        positions=np.arange(rows, dtype=np.int32),
        mask=np.ones(rows, dtype=np.uint8),
        versions=np.zeros(rows, dtype=np.int64),
    )
    return encode_features(batch)


def _row(name: str, mib: int, runs: Sequence[TransferCost], ratio: str) -> Row:
    def middle(pick: Callable[[TransferCost], float]) -> float:
        return statistics.median(map(pick, runs))

    wall_s = middle(lambda one: one.wall_s)
    return {
        "transfer": name,
        "GB/s": mib * MIB / wall_s / 1e9,
        "pairs": len(runs),
        "wall s": wall_s,
        "cpu s": middle(lambda one: one.cpu_s),
        "spool s": middle(lambda one: one.spool_s),
        "fan-out s": middle(lambda one: one.fan_out_s),
        "sender peak MiB": round(max(one.sender_peak_mib for one in runs)),
        "far peak MiB": round(max(one.far_peak_mib for one in runs)),
        "ratio [95 %]": ratio,
    }
