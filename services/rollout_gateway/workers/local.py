"""Runs engine workers on this host, each with a process, a socket and a ring."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.local import checks, forking, processes, user_directory
from paceline.plugins import import_object
from paceline.services.rollout_gateway import engines, features
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines import nouns, worker
from paceline.services.rollout_gateway.engines.settings import ModelSettings
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.services.rollout_gateway.workers.process import OnTokens, WorkerProcess


def own_cores(index: int, count: int, threads: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Cores of one worker among a host's cores: one per thread. With `threads` 0, each of `count`
    workers gets an equal number. Workers share cores if there are too few.
    """
    each = min(threads or max(1, len(cores) // count), len(cores))
    return tuple(cores[(index * each + number) % len(cores)] for number in range(each))


class LocalWorkers:
    """Makes the workers of this host, each in its own place: make, close."""

    def __init__(self, config: GatewayConfig, forker: forking.Forker | None = None) -> None:
        """`forker`: an already started forker of the engine's modules; `close` ends it."""
        self._config, self._count = config.engine, config.worker_count
        self._settings = engine_settings(config)
        self.layout = row_layout(config)
        """Content of the hidden rows that workers capture; None when no consumer reads rows."""
        self._value_bytes = features.ROW_DTYPES[config.features.dtype][1]
        self._heartbeat_s = config.run.heartbeat_s
        kind = engines.find_engine(self._config.kind)
        if kind.extra:
            checks.require_extra(kind.extra, f"gateway.engine.kind={self._config.kind}")
        self._forker = forker or forking.Forker(kind.forked, None)
        self._directory: Path | None = None
        self._context: zmq.Context[Any] = zmq.Context()

    def make(self, index: int, on_tokens: OnTokens) -> WorkerProcess:
        """Make a worker that has not started. Its index selects its cores and GPU."""
        if self._directory is None:
            self._directory = Path(
                tempfile.mkdtemp(prefix="w-", dir=user_directory.socket_directory())
            )
        ring, config = None, self._config
        if self.layout is not None:
            ring = RowRing.create(RING_ROWS, self.layout.width * self._value_bytes)
        cores: tuple[int, ...] = ()
        if config.threads == 0:
            cores = own_cores(index, self._count, config.threads, processes.core_numbers())
        spec = worker.WorkerSpec(
            worker_index=index,
            kind=config.kind,
            threads=config.threads,
            cores=cores,
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


RING_ROWS = 16_384
"""Rows of each worker's ring: eight prefills of 2,048 tokens between two reads. A read occurs with
the tokens of every round.
"""


def engine_settings(config: GatewayConfig) -> dict[str, Any]:
    """Values of the engine's own settings class (see engines.EngineKind), as JSON types.

    Raises ConfigError; InvalidInput for an unusable script.
    """
    engine = config.engine
    kind = engines.find_engine(engine.kind)
    spec: type[Config] = import_object(kind.settings)
    if config.features.layers and "capture_inner" not in spec.model_fields:
        message = "gateway.features.layers is unavailable with this engine"
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
    }
    if config.speculation.arms:
        values["arms"] = list(config.speculation.arms)
    values |= _script(config) if engine.kind == "scripted" else {"model_dir": str(config.model_dir)}
    known = {name: values[name] for name in spec.model_fields if name in values}
    own = set() if engine.kind in engines.ENGINES else set(spec.model_fields) - set(known)
    if unknown := engine.options.keys() - own:
        seen, allowed = ", ".join(sorted(unknown)), ", ".join(sorted(own))
        raise ConfigError("gateway.engine.options", seen=seen, allowed=allowed)

    return known | engine.options


def _script(config: GatewayConfig) -> dict[str, Any]:
    """The scripted engine's settings; its file overrides the gateway's settings."""
    from paceline.services.rollout_gateway.testing.script import read_script

    tokenizer = Path(config.tokenizer or config.model) / "tokenizer.json"
    script = read_script(Path(config.engine.script)) if config.engine.script else {}
    return {"tokenizer": str(tokenizer), **script}


def row_layout(config: GatewayConfig) -> nouns.RowLayout | None:
    """Content of the hidden rows that workers capture; None when no consumer reads rows."""
    if not config.trajectories:
        return None
    if path := engines.find_engine(config.engine.kind).row_layout:
        layout: nouns.RowLayout = import_object(path)(engine_settings(config))
        return layout
    model = json.loads((config.model_dir / "config.json").read_text(encoding="utf-8"))
    return nouns.RowLayout.last(int(model.get("hidden_size", 0)))
