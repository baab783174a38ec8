"""Sends hidden rows from the workers' rings to the features stream.

No request waits for this. Rows without room, and batches during an outage of Redis, are dropped and
counted.
"""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from redis.asyncio import Redis

from paceline.errors import PacelineError
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.config import FeaturesConfig
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.worker.ring import RowArray
from paceline.streams import FeatureBatch, RedisStream, encode_features, run_key
from paceline.telemetry import Attributes, get_logger, inject, names, span
from paceline.tensors import NamedTensor

Indices = npt.NDArray[np.int64]


def longest_run(rows: RowArray, token_ids: Sequence[int]) -> Indices:
    """Indices [T] of the longest run of adjacent positions, with the newest row of each, without
    the last token's row.

    Rows with another token than their position's (from an earlier attempt) are left out.
    """
    tokens = np.asarray(token_ids)
    found: Indices = np.flatnonzero(rows["position"] < len(tokens) - 1)
    found = found[rows["token_id"][found] == tokens[rows["position"][found]]]
    if not len(found):
        return found
    written = rows["position"][found].astype(np.int64)
    if (np.diff(written) == 1).all():
        return found  # the usual case: no row computed twice or lost
    positions, from_end = np.unique(written[::-1], return_index=True)
    newest = found[len(found) - 1 - from_end]
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    stretches: list[Indices] = np.split(newest, edges)
    return max(stretches, key=len)


STREAMS_KEPT = 16
ROW_DTYPES = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}
log = get_logger(__name__)


LINGER_S = 0.2
"""Seconds that a batch waits for further batches, so that one exchange with Redis and one read of
the trainer take all of them together. Each exchange costs as much as a batch, in time that rollouts
need.
"""
QUEUE_BATCHES = 64
"""Batches waiting for Redis. More are dropped and counted, since a trainer wants the
newest rows.
"""
GATHER_BYTES = 128 << 20
"""Bytes of rows held for running requests; further rows are dropped and counted."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The request and run of the rows."""

    run_id: str
    step: int
    session_id: str
    group_id: str
    temperature: float
    prompt_tokens: int
    token_ids: Sequence[int] = field(repr=False)  # prompt and response


class FeaturePublisher:
    """Gathers rows per request and appends one FeatureBatch at the request's end.

    `client` None: rows are discarded.
    """

    def __init__(
        self, client: Redis | None, config: FeaturesConfig, head_hash: Callable[[int], str]
    ) -> None:
        """`head_hash`: hash of the head of a policy version."""
        self._client: Any = client
        self._config = config
        self._head_hash = head_hash
        self._layout = RowLayout.last(0)
        self._gathered: dict[int, list[RowArray]] = {}
        self._gathered_bytes = 0
        self._queue: deque[FeatureBatch] = deque()
        self._wake = asyncio.Event()
        self._stream = functools.lru_cache(STREAMS_KEPT)(self._stream_of)
        self._task: asyncio.Task[None] | None = None
        self.batches = 0
        self.rows_dropped = 0

    def start(self, layout: RowLayout) -> None:
        """Starts sending rows with the engine's declared `layout`."""
        self._layout = layout
        if self._client is not None:
            self._task = background(self._run(), "features publisher")

    async def stop(self) -> None:
        """Stops at once and drops waiting batches."""
        await cancel(self._task)

    def expect(self, request_id: int) -> None:
        """Gathers this request's rows from now on."""
        if self._client is not None:
            self._gathered[request_id] = []

    def add_rows(self, rows: RowArray) -> None:
        """Gathers rows of any requests, in the ring's order."""
        # One stable sort instead of a mask per request: a drain has rows of a whole batch.
        rows = rows[np.argsort(rows["request_id"], kind="stable")]
        owners = rows["request_id"]
        starts = [0, *(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist()]
        for start, end in pairwise([*starts, len(rows)] if len(rows) else ()):
            part = rows[start:end]
            gathered = self._gathered.get(int(owners[start]))
            if gathered is None:
                continue
            if self._gathered_bytes + part.nbytes > GATHER_BYTES:
                self._drop(len(part))
                continue
            gathered.append(part)
            self._gathered_bytes += part.nbytes

    def discard(self, request_id: int) -> None:
        """Drops the rows of a restarted request; later rows are gathered."""
        if request_id in self._gathered:
            self.forget(request_id)
            self._gathered[request_id] = []

    def publish(self, request_id: int, origin: Origin) -> None:
        """Queues the rows of a finished request. With a full queue, the oldest waiting batch is
        dropped.
        """
        parts = self.forget(request_id)
        if not parts:
            return
        # As bytes: with records, numpy would determine the common type for each part.
        joined = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts])
        batch = self._batch(joined.view(parts[0].dtype), origin)
        if batch is None:
            return
        if len(self._queue) >= QUEUE_BATCHES:
            self._drop(self._queue.popleft().rows)
        self._queue.append(batch)
        self._wake.set()

    def _batch(self, rows: RowArray, origin: Origin) -> FeatureBatch | None:
        path = longest_run(rows, origin.token_ids)
        self._drop(len(rows) - len(path))
        if not len(path):
            return None
        kept = rows[path]
        positions = kept["position"].astype(np.int32)
        start, end = int(positions[0]), int(positions[-1]) + 1
        version = int(kept["policy_version"][-1])
        dtype, size = ROW_DTYPES[self._config.dtype]
        states = np.ascontiguousarray(kept["hidden"])  # [n, H] elements of `size` bytes
        shape = len(kept), states.shape[1] // size
        return FeatureBatch(
            run_id=origin.run_id,
            step=origin.step,
            session_id=origin.session_id,
            group_id=origin.group_id,
            temperature=origin.temperature,
            policy_version=version,
            lm_head_hash=self._head_hash(version),
            hidden=NamedTensor("hidden", dtype, shape, states.tobytes()),
            token_ids=np.asarray(origin.token_ids[start : end + 1], dtype=np.int32),
            positions=positions,
            mask=(positions >= origin.prompt_tokens).astype(np.uint8),
            versions=kept["policy_version"].astype(np.int64),
            layers=self._layout.layers,
            convention=self._layout.convention,
            traceparent=inject().get("traceparent", ""),
        )

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(LINGER_S)
            self._wake.clear()
            waiting, self._queue = self._queue, deque()
            for run_id, batches in groupby(waiting, key=lambda batch: batch.run_id):
                await self._send(run_id, list(batches))

    async def _send(self, run_id: str, batches: Sequence[FeatureBatch]) -> None:
        rows = sum(batch.rows for batch in batches)
        try:
            counts = {names.ROWS: rows, names.BATCHES: len(batches)}
            about: Attributes = {names.MESSAGING_SYSTEM: "redis", **counts}
            links = [batch.traceparent for batch in batches]
            with span(names.FEATURES_PUBLISH, about, kind="producer", links=links):
                await self._stream(run_id).append_all([encode_features(one) for one in batches])
        except PacelineError as error:
            self._drop(rows)
            log.warning("hidden rows dropped", rows=rows, error=str(error))
        else:
            self.batches += len(batches)
            metrics.FEATURE_BATCHES.record(len(batches))

    def _stream_of(self, run_id: str) -> RedisStream:
        return RedisStream(self._client, run_key(run_id, "features"), self._config.byte_budget)

    def forget(self, request_id: int) -> list[RowArray]:
        """Stops gathering a request; returns its rows so far."""
        parts = self._gathered.pop(request_id, [])
        self._gathered_bytes -= sum(part.nbytes for part in parts)
        return parts

    def _drop(self, rows: int) -> None:
        if rows:
            self.rows_dropped += rows
            metrics.FEATURE_ROWS_DROPPED.record(rows)
