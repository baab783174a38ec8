"""Measures full pushes and deltas of weights beside a copy in memory and a raw TCP copy of the same
bytes. Sizes are from 2 million weights to two layers of a 7B model. It also measures the update of
an engine under each profile.

Updates are AdamW's at the learning rates of RL, over white gradients, with moments as after many
steps. The receiver is a separate process with a spool on the disk of temporary files. Runs
interleave, and each ratio compares neighbours in time. "In memory" ends when the content is checked
in the receiver's memory; `wire` is Prepare and the stream alone.
"""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack

import grpc
import numpy as np

from benchmarks.processes import child
from benchmarks.result import BenchResult, Goal, Row, say
from benchmarks.transport import (
    CONTEXT,
    RECEIVERS,
    measure,
    push_alone,
    raw_copy,
    transfer_s,
)
from benchmarks.weights.costs import FAR, by_share, by_size, timed
from benchmarks.weights.in_place import served_in_place
from benchmarks.weights.tables import (
    DELTA,
    FULL,
    LOOKED,
    RAW,
    RAW_DELTA,
    WeightRuns,
    goals_of,
    rows_of,
)
from benchmarks.weights.updates import all_moved, stepped
from paceline.config import SecurityConfig
from paceline.processor import keep_freed_memory
from paceline.rpc import channel
from paceline.tensors import NamedTensor, from_numpy
from paceline.trajectory import VersionSet
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY
from paceline.weights import PushReport, WeightSender, commit_versions
from paceline.weights.delta import EncodedDelta, apply_delta, encode_delta
from paceline.weights.manifest import hash_of, unchecked_manifest, views
from paceline.weights.shares import check_share, held_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--millions", default="2,50,404", help="weights of each size, in millions")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved runs of each size")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of AdamW")
    parser.add_argument("--quick", action="store_true", help="1 million weights, 2 repeats")


async def run(options: argparse.Namespace) -> BenchResult:
    """Measures all sizes, then costs by share and by size; the goals are the largest size's."""
    keep_freed_memory()
    if options.quick:
        options.millions, options.repeats = "1", 2
    sizes = [float(one) for one in options.millions.split(",")]
    rows: list[Row] = []
    goals: list[Goal] = []
    for millions in sizes:
        say(f"{millions:g} million weights")
        old, new = stepped(int(millions * 1e6), options.lr)
        encoded = encode_delta(old, new, limit=FAR)
        assert encoded is not None
        measured = await _measured(old, new, encoded, options.repeats)
        rows += rows_of(f"{millions:g}M", encoded, measured)
        goals = goals_of(encoded, measured)
        del old, new
        rows += served_in_place(millions, options.repeats)
    middle = min(sizes[-1], 100)
    say("costs by share and by size")
    rows += by_share(stepped(int(middle * 1e6), 0.0)[0])
    more, constant = by_size(middle)
    return BenchResult(
        f"weights, bf16, AdamW at {options.lr:g}", [*rows, *more], [*goals, constant]
    )


async def _measured(
    old: list[NamedTensor], new: list[NamedTensor], encoded: EncodedDelta, repeats: int
) -> WeightRuns:
    measured = WeightRuns()
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(child(RECEIVERS, "weights"))
        port = (await receiver.answer())["port"]
        raw = {
            RAW: await raw_copy(stack, [one.view for one in new]),
            RAW_DELTA: await raw_copy(stack, [memoryview(encoded.stream)]),
        }
        to = await stack.enter_async_context(channel(f"127.0.0.1:{port}", SecurityConfig()))
        pushes = Pushes(to, receiver.pid, old, new)
        for repeat in range(repeats + 1):
            if repeat == 1:
                measured = WeightRuns()  # the first was warm-up
            _in_memory(old, new, encoded, measured)
            await pushes.run(measured)
            for name, transfer in raw.items():
                measured.costs.setdefault(name, []).append(await measure(*transfer))
    return measured


class Pushes:
    """Pushes the versions in turns, each time under the next number."""

    def __init__(
        self,
        to: grpc.aio.Channel,
        receiver: int,
        old: list[NamedTensor],
        new: list[NamedTensor],
    ) -> None:
        self._to, self._receiver = to, receiver
        changed = [from_numpy(one.name, all_moved(one), "BF16") for one in new]
        self._turns = {FULL: old, DELTA: new, LOOKED: changed}
        self._version = 0

    async def run(self, measured: WeightRuns) -> None:
        """Pushes a full version, a delta to it, and a version with all values changed, which is
        sent whole.
        """
        sender = WeightSender()
        for name, tensors in self._turns.items():
            await self._push(name, sender, tensors, measured)

    async def _push(
        self,
        name: str,
        sender: WeightSender,
        tensors: list[NamedTensor],
        measured: WeightRuns,
    ) -> None:
        self._version += 1
        layouts = [one.layout for one in tensors]
        manifest = unchecked_manifest(WEIGHT_TARGET_POLICY, self._version, layouts)
        whole = check_share(manifest, held_whole(tensors))
        reports: list[PushReport] = []

        async def push() -> tuple[float, float, float]:
            report = await push_alone(sender, self._to, whole)
            reports.append(report)
            return transfer_s(report), report.spool_s, report.fan_out_s

        cost = await measure(push, [self._receiver])
        assert (reports[0].encoding == "full") == (name != DELTA)
        measured.costs.setdefault(name, []).append(cost)
        measured.pushes.setdefault(name, []).extend(reports)
        versions = VersionSet(self._version, self._version, 0)
        await commit_versions(self._to, CONTEXT, versions)


def _in_memory(
    old: list[NamedTensor], new: list[NamedTensor], encoded: EncodedDelta, measured: WeightRuns
) -> None:
    """Times a copy of all weights by one thread, the encoding, a copy with the delta applied, and
    its checksums.
    """
    manifest = unchecked_manifest(WEIGHT_TARGET_POLICY, 1, [one.layout for one in new])
    check_share(manifest, held_whole(new))
    content = np.zeros(manifest.total_bytes, dtype=np.uint8)
    content.fill(1)  # touches its pages
    into = views(manifest, content.data)
    pairs = [
        (np.frombuffer(one.view, np.uint8), np.frombuffer(copied.view, np.uint8))
        for one, copied in zip(old, into, strict=True)
    ]

    def copy() -> None:
        for one, copied in pairs:
            np.copyto(copied, one)

    def apply() -> None:
        copy()
        for _ in apply_delta(encoded.stream, into):
            pass

    measured.copy.append(timed(copy))
    measured.encode.append(timed(lambda: encode_delta(old, new, limit=FAR)))
    measured.apply.append(timed(apply))
    measured.check.append(timed(lambda: hash_of(manifest, content.data)))
    assert hash_of(manifest, content.data) == manifest.content_hash
