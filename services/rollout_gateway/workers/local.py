"""Runs engine workers on this host, each with a process, a socket and a ring: starts a worker for
each place, and replaces workers that are lost or fail to start.
"""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Protocol

import zmq

from paceline.config import Config
from paceline.errors import ConfigError, DataLoss, InternalError, PacelineError, Unavailable
from paceline.local import checks, forking, launch, news, processes, user_directory
from paceline.plugins import import_object
from paceline.services.rollout_gateway import engines, features, metrics
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines import nouns, worker
from paceline.services.rollout_gateway.engines.settings import ModelSettings
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, RowRing
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.telemetry import get_logger
from paceline.v1 import engine_pb2 as pb


def own_cores(index: int, count: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Cores of one worker: each of `count` workers gets an equal number of a host's cores. Workers
    share cores if there are too few.
    """
    each = max(1, len(cores) // count)
    return tuple(cores[(index * each + number) % len(cores)] for number in range(each))


STARTS_BEFORE_GIVING_UP = 3
"""Failed starts in a row after which the requests of that worker fail; restarts continue."""

log = get_logger(__name__)


class Routing(Protocol):
    """Callbacks for the requests as workers start and end."""

    ready: pb.WorkerReady
    """The engine's properties, from the worker that became ready last."""

    async def equip_worker(self, seat: Seat, process: WorkerProcess) -> None:
        """Prepare a ready worker before its first request; an exception ends the worker."""

    def flush_requests(self) -> None:
        """A place has a new worker that accepts requests."""

    def deliver_tokens(self, seat: Seat, tokens: pb.TokensEmitted, rows: RowArray | None) -> None:
        """The worker in this place has sent tokens."""

    def lose_worker(self, seat: Seat) -> None:
        """The worker in this place is lost."""

    def fail_requests(self, seat: Seat, message: str, kind: type[PacelineError]) -> None:
        """End the requests of this place with an error after repeated failed starts."""


class LocalWorkers:
    """Keeps a worker in each place. Use on one event loop: start, stop."""

    def __init__(
        self,
        config: GatewayConfig,
        seats: Sequence[Seat],
        routing: Routing,
        forker: forking.Forker | None = None,
    ) -> None:
        """`forker`: an already started forker of the engine's modules; `stop` ends it."""
        self._config, self._seats, self._routing = config.engine, seats, routing
        self._keepers: list[asyncio.Task[None]] = []
        self._settings = engine_settings(config)
        self._layout = row_layout(config)
        self._value_bytes = features.ROW_DTYPES[config.features.dtype][1]
        self._heartbeat_s = config.run.heartbeat_s
        kind = engines.find_engine(self._config.kind)
        if kind.extra:
            checks.require_extra(kind.extra, f"gateway.engine.kind={self._config.kind}")
        self._forker = forker or forking.Forker(kind.forked, None)
        self._directory: Path | None = None
        self._context: zmq.Context[Any] = zmq.Context()

    async def start(self) -> None:
        """Start a worker in each place; returns when all serve.

        A worker that finds the serving set damaged may start later, after the next push. Raises the
        first start's error; the caller then calls `stop`.
        """
        found = await asyncio.gather(*(self._start_first(seat) for seat in self._seats))
        late = [error for error in found if error is not None]
        if late and not self._routing.ready.ListFields():  # no worker became ready
            raise late[0]
        for seat in self._seats:
            self._keepers.append(background(self._keep(seat), f"keeper of worker {seat.index}"))

    async def stop_keeping(self) -> None:
        """Stop replacing workers."""
        await cancel(*self._keepers)

    async def stop(self) -> None:
        """Shut the workers down, and end the forker with its remaining processes."""
        there = [seat.process for seat in self._seats if seat.process is not None]
        await asyncio.gather(*(process.stop() for process in there))
        for seat in self._seats:
            seat.process = None
        await self._forker.close()
        self._context.destroy(linger=0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _start_first(self, seat: Seat) -> PacelineError | None:
        """A start error that a push can repair while other workers serve; None after a successful
        start.
        """
        try:
            await self._start_worker(seat)
        except DataLoss as error:
            self._report_failed_start(seat, error)
            return error
        return None

    async def _start_worker(self, seat: Seat) -> None:
        """Start a worker that serves the committed versions.

        Raises ConfigError when the engine's row layout differs from the ring's.
        """
        process = self._make_worker(seat)
        try:
            await process.start(self._config.ready_deadline_s)
            declared, layout = wire.rows_from(process.ready), self._layout
            if layout is not None and declared != layout:
                message = "the engine's rows do not fit their ring"
                raise ConfigError(message, seen=declared, allowed=layout)
            self._routing.ready = process.ready
            await self._routing.equip_worker(seat, process)
        except BaseException:
            await process.close()
            raise

        seat.process = process
        self._routing.flush_requests()

    async def _keep(self, seat: Seat) -> None:
        """Replace the worker whenever it is lost or fails to start."""
        while True:
            process = seat.process
            reason = await asyncio.shield(process.lost) if process is not None else ""
            seat.process = None
            lost_s = time.monotonic()
            if process is not None:
                log.warning("engine worker lost", worker=seat.index, reason=reason)
                news.tell_supervisor("impaired", f"engine worker {seat.index} {reason}")
                await process.close()
                metrics.WORKER_RESTARTS.record()
                self._routing.lose_worker(seat)
            await self._replace(seat)
            took_s = time.monotonic() - lost_s
            news.tell_supervisor("recovered", f"engine worker {seat.index} after {took_s:.1f} s")

    async def _replace(self, seat: Seat) -> None:
        policy = launch.RestartPolicy(window_s=inf, base_s=0.2, cap_s=5.0)
        while seat.process is None:
            policy.note_end()
            await policy.pause()
            try:
                await self._start_worker(seat)
            except (PacelineError, OSError) as error:
                message = self._report_failed_start(seat, error)
                if len(policy.ends) >= STARTS_BEFORE_GIVING_UP:
                    kind = Unavailable if isinstance(error, DataLoss) else InternalError
                    self._routing.fail_requests(seat, message, kind)

    def _report_failed_start(self, seat: Seat, error: PacelineError | OSError) -> str:
        message = f"engine worker {seat.index} does not start: {error}"
        log.error("engine worker does not start", worker=seat.index, error=str(error))
        news.tell_supervisor("impaired", message)
        return message

    def _make_worker(self, seat: Seat) -> WorkerProcess:
        """Make a worker that has not started. Its index selects its cores and GPU."""
        if self._directory is None:
            parent = user_directory.socket_directory()
            self._directory = Path(tempfile.mkdtemp(prefix="w-", dir=parent))
        ring, config = None, self._config
        spec = worker.WorkerSpec(
            worker_index=seat.index, kind=config.kind, threads=config.threads, engine=self._settings
        )
        if self._layout is not None:
            ring = RowRing.create(RING_ROWS, self._layout.width * self._value_bytes)
            spec = spec.model_copy(update={"ring_path": str(ring.path)})
        if config.threads == 0:
            cores = own_cores(seat.index, len(self._seats), processes.core_numbers())
            spec = spec.model_copy(update={"cores": cores})
        forker, directory, context = self._forker, self._directory, self._context
        on_tokens = partial(self._routing.deliver_tokens, seat)
        return WorkerProcess(spec, forker, ring, directory, context, on_tokens, self._heartbeat_s)


RING_ROWS = 16_384
"""Rows of each worker's ring: eight prefills of 2,048 tokens between two reads. A read occurs with
the tokens of every round.
"""


def engine_settings(config: GatewayConfig) -> dict[str, Any]:
    """Values of the engine's own settings class (see engines.EngineKind), as JSON types.

    Raises ConfigError.
    """
    engine = config.engine
    kind = engines.find_engine(engine.kind)
    spec: type[Config] = import_object(kind.settings)
    if config.features.layers and "capture_inner" not in spec.model_fields:
        message = "this engine does not support gateway.features.layers"
        raise ConfigError(message, seen=engine.kind, allowed="embedded")
    section = getattr(engine, engine.kind, None)
    values = {
        **engine.model_dump(mode="json", include=set(ModelSettings.model_fields)),
        **(section.model_dump(mode="json") if section is not None else {}),
        "drafter": config.drafter,
        "bandit": config.speculation.bandit.model_dump(mode="json"),
        "seed": config.run.seed,
        "features_dtype": config.features.dtype,
        "capture_inner": list(config.features.layers),
        "model_dir": str(config.model_dir),
    }
    if config.speculation.arms:
        values["arms"] = list(config.speculation.arms)
    known = {name: values[name] for name in spec.model_fields if name in values}
    own = set() if engine.kind in engines.ENGINES else set(spec.model_fields) - set(known)
    if unknown := engine.options.keys() - own:
        seen, allowed = ", ".join(sorted(unknown)), ", ".join(sorted(own))
        raise ConfigError("gateway.engine.options", seen=seen, allowed=allowed)

    return known | engine.options


def row_layout(config: GatewayConfig) -> nouns.RowLayout | None:
    """Content of the hidden rows that workers capture; None when no consumer reads rows."""
    if not config.trajectories:
        return None
    if path := engines.find_engine(config.engine.kind).row_layout:
        layout: nouns.RowLayout = import_object(path)(engine_settings(config))
        return layout
    model = json.loads((config.model_dir / "config.json").read_text(encoding="utf-8"))
    return nouns.RowLayout.last(int(model.get("hidden_size", 0)))
