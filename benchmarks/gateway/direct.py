"""The scripted engine called without a gateway: the worker protocol from the bench's own process.
Owns that one worker.

What a stream takes here is what a front in front of the same engine cannot undercut.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq.asyncio

from benchmarks.gateway.connection import STREAM_DEADLINE_S
from benchmarks.gateway.load import Order, percentile_ms
from paceline.errors import DeadlineExceeded, InternalError
from paceline.local.patience import patient
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.chat.text import TextCodec
from rollout_gateway.engines.worker.ring import RowArray
from rollout_gateway.engines.worker.spec import WorkerSpec
from rollout_gateway.workers.process import WorkerProcess

READY_S = 60.0


class DirectWorker:
    """Closed loops of streamed requests on one worker."""

    def __init__(self, process: WorkerProcess, codec: TextCodec) -> None:
        self._process = process
        self._codec = codec
        self._numbers = itertools.count(1)
        self._live: dict[int, _Stream] = {}

    async def run(self, order: Order) -> Mapping[str, Any]:
        """`order.streams` loops for `order.seconds`; latencies in milliseconds.

        Raises InternalError for wrong text.
        """
        ended: list[_Stream] = []
        seeds, think = itertools.count(order.first_seed), random.Random(order.first_seed)
        until = time.perf_counter() + order.seconds

        async def loop() -> None:
            while time.perf_counter() < until:
                await asyncio.sleep(think.uniform(0, order.think_s))
                ended.append(await self._one(next(seeds), order))

        await asyncio.gather(*(loop() for _ in range(order.streams)))
        return {
            "first_p50_ms": percentile_ms([one.first_s for one in ended], 50),
            "first_p99_ms": percentile_ms([one.first_s for one in ended], 99),
            "late_p50_ms": percentile_ms([one.late_s for one in ended], 50),
            "late_p99_ms": percentile_ms([one.late_s for one in ended], 99),
        }

    async def _one(self, seed: int, order: Order) -> _Stream:
        stream = _Stream()
        number = next(self._numbers)
        self._live[number] = stream
        request = pb.EngineRequest(
            request_id=number,
            prompt_token_ids=self._codec.encode(f"bench {seed}"),
            sampling=tpb.SamplingParams(temperature=1.0, max_tokens=order.max_tokens, seed=seed),
            stream=True,
        )
        self._process.send(pb.WorkerCommand(enqueue=pb.EnqueueRequests(requests=[request])))
        try:
            async with asyncio.timeout(STREAM_DEADLINE_S):
                await stream.ended
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the engine worker does not end a stream", allowed=f"{STREAM_DEADLINE_S} s"
            ) from error
        finally:
            del self._live[number]
        which = seed % len(order.texts)
        stream.late_s = stream.whole_s - order.paces_s[which]
        if self._codec.decode(stream.token_ids) != order.texts[which]:
            raise InternalError("the engine said something else than its script", seen=seed)
        return stream

    def on_tokens(self, tokens: pb.TokensEmitted, rows: RowArray | None) -> None:
        """News of the worker."""
        for chunk in tokens.chunks:
            if (stream := self._live.get(chunk.request_id)) is not None:
                stream.take(chunk)


class _Stream:
    """One request: its times and tokens."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first_s = 0.0
        self.whole_s = 0.0
        self.late_s = 0.0
        self.token_ids: list[int] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, chunk: pb.TokenChunk) -> None:
        self.first_s = self.first_s or time.perf_counter() - self.began
        self.token_ids += chunk.token_ids
        if chunk.finish_reason:
            self.whole_s = time.perf_counter() - self.began
            self.ended.set_result(None)


@asynccontextmanager
async def direct_worker(
    folder: Path, model: Path, settings: Mapping[str, Any]
) -> AsyncIterator[DirectWorker]:
    """A worker of its own with the same script as the gateway's."""
    engine = {**settings, "tokenizer": str(model / "tokenizer.json")}
    found: list[DirectWorker] = []
    spec = WorkerSpec(worker_index=0, kind="scripted", engine=engine)
    process = WorkerProcess(
        spec, None, folder, lambda tokens, rows: found[0].on_tokens(tokens, rows)
    )
    found.append(DirectWorker(process, TextCodec(model)))
    context = zmq.asyncio.Context()
    try:
        await process.start(context, patient(READY_S))
        yield found[0]
    finally:
        await process.stop()
        context.destroy(linger=0)
