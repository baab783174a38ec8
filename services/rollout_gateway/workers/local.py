"""Runs engine workers on this host, each with a process, a socket and a ring."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from paceline.local.extras import require_extra
from paceline.local.forking import Forker
from paceline.local.process_directory import socket_directory
from paceline.local.processes import core_numbers
from paceline.services.rollout_gateway.engine_config import EngineConfig
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.services.rollout_gateway.engines.worker.spec import WorkerSpec
from paceline.services.rollout_gateway.workers.process import OnTokens, WorkerProcess


@dataclass(frozen=True, slots=True)
class RowShape:
    """Size of each worker's ring and the content of its rows."""

    rows: int
    layout: RowLayout
    value_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's hidden state."""
        return self.layout.width * self.value_bytes


def own_cores(index: int, count: int, threads: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Cores of one worker among a host's cores: one per thread. With `threads` 0, each of `count`
    workers gets an equal number. Workers share cores if there are too few.
    """
    each = min(threads or max(1, len(cores) // count), len(cores))
    return tuple(cores[(index * each + number) % len(cores)] for number in range(each))


class LocalWorkers:
    """Makes the workers of this host, each in its own place: make, close."""

    def __init__(
        self,
        config: EngineConfig,
        settings: dict[str, Any],
        rows: RowShape | None,
        heartbeat_s: float,
        count: int,
        forker: Forker | None = None,
    ) -> None:
        """`settings`: of the engine's own class. `rows`: None when no hidden states are needed.
        `count`: number of workers. `forker`: an already started forker of the engine's
        modules; `close` ends it.
        """
        self._config = config
        self._count = count
        self._settings = settings
        self._rows = rows
        self._heartbeat_s = heartbeat_s
        kind = find_engine(config.kind)
        if kind.extra:
            require_extra(kind.extra, f"gateway.engine.kind={config.kind}")
        self._forker = forker or Forker(kind.forked, None)
        self._directory: Path | None = None
        self._context: zmq.Context[Any] = zmq.Context()

    def make(self, index: int, on_tokens: OnTokens) -> WorkerProcess:
        """Make a worker that has not started. Its index selects its cores and GPU."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="w-", dir=socket_directory()))
        rows = self._rows
        ring = RowRing.create(rows.rows, rows.row_bytes) if rows is not None else None
        config = self._config
        pinned = config.threads == 0
        spec = WorkerSpec(
            worker_index=index,
            kind=config.kind,
            threads=config.threads,
            cores=own_cores(index, self._count, config.threads, core_numbers()) if pinned else (),
            ring_path=str(ring.path) if ring is not None else "",
            engine=self._settings,
        )
        directory, context = self._directory, self._context
        return WorkerProcess(
            spec, self._forker, ring, directory, context, on_tokens, self._heartbeat_s
        )

    async def close(self) -> None:
        """End the forker and its remaining processes."""
        await self._forker.close()
        self._context.destroy(linger=0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
