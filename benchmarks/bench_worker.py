"""Drives one engine worker's process batch by batch, for benches."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from paceline.local.forking import Forker
from paceline.local.patience import patient
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.worker import WorkerSpec
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, RowRing
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

READY_S, RUN_S = 180.0, 120.0


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request's last chunk and its arrival time."""

    chunk: pb.TokenChunk
    after_s: float  # since the bench sent the batch


class BenchWorker:
    """One engine worker; a `row_width` of 0 disables the capture of hidden rows."""

    def __init__(
        self, kind: str, folder: Path, engine: dict[str, Any], *, row_width: int = 0
    ) -> None:
        self.captures = row_width > 0
        self.start_s = 0.0
        ring = RowRing.create(1 << 14, row_width) if row_width else None
        path = str(ring.path) if ring else ""
        threads = int(engine.get("threads", 1))
        spec = WorkerSpec(worker_index=0, kind=kind, threads=threads, ring_path=path, engine=engine)
        self._forker = Forker(find_engine(kind).forked, None)
        self._make = partial(WorkerProcess, spec, self._forker, ring, folder)
        self._numbers = itertools.count()
        self._done: dict[int, EndedRequest] = {}
        self._wanted: set[int] = set()
        self._all_done = asyncio.Event()
        self._sent_s = 0.0

    async def start(self, context: zmq.Context[Any]) -> None:
        """Starts the worker's process. Raises the errors of WorkerProcess.start."""
        began = time.perf_counter()
        self._process = self._make(context, self._on_tokens)
        await self._process.start(patient(READY_S))
        self.start_s = time.perf_counter() - began

    async def stop(self) -> None:
        """Ends the worker's process."""
        await self._process.stop()
        await self._forker.close()

    @property
    def tflops(self) -> float:
        """Peak of the device, as the worker measured it at its start."""
        return self._process.ready.device_tflops

    async def generate(self, requests: Sequence[pb.EngineRequest], arm: str) -> list[EndedRequest]:
        """Generates for all requests at once, under new request numbers; an empty `arm` lets the
        bandit choose.

        Raises TimeoutError if the batch takes longer than RUN_S.
        """
        forced = pb.SetSpeculation(forced_arm=arm)
        await self._process.ask(pb.WorkerCommand(set_speculation=forced), RUN_S)
        for request in requests:
            request.request_id = next(self._numbers)
        self._wanted = {request.request_id for request in requests}
        self._all_done.clear()
        self._sent_s = time.perf_counter()
        self._process.send(pb.WorkerCommand(enqueue=pb.EnqueueRequests(requests=requests)))
        async with asyncio.timeout(patient(RUN_S)):
            await self._all_done.wait()
        return [self._done.pop(request.request_id) for request in requests]

    async def forget(self) -> None:
        """Drops all cached prefixes."""
        # SGLang holds an ended batch until its next round begins, and flushes nothing before. This
        # request is answered a round later.
        await self.prefixes()
        await self._process.ask(pb.WorkerCommand(flush_cache=pb.FlushCache()), RUN_S)

    async def prefixes(self) -> pb.PrefixStats:
        """Counters of the worker's prefix cache."""
        health = await self._process.ask(pb.WorkerCommand(get_health=pb.GetHealth()), RUN_S)
        return health.health.prefixes

    async def update(self, number: int, path: Path, profile: str) -> tuple[float, float]:
        """Prepares policy `number` from a directory under a profile, then commits it.

        Returns the seconds of both steps. Raises the worker's error if it rejects the version.
        """
        target, began = pb.WEIGHT_TARGET_POLICY, time.perf_counter()
        prepare = pb.PrepareWeights(target=target, version=number, path=str(path), profile=profile)
        await self._process.ask(pb.WorkerCommand(prepare_weights=prepare), RUN_S)
        prepared = time.perf_counter()
        versions = tpb.VersionSet(seq=number, policy=number, profile=profile)
        commit = pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_RETRACT)
        await self._process.ask(pb.WorkerCommand(commit_weights=commit), RUN_S)
        return prepared - began, time.perf_counter() - prepared

    def _on_tokens(self, tokens: pb.TokensEmitted, rows: RowArray | None) -> None:
        after_s = time.perf_counter() - self._sent_s
        for chunk in tokens.chunks:
            self._done[chunk.request_id] = EndedRequest(chunk, after_s)
        if self._wanted <= self._done.keys():
            self._all_done.set()
