"""Converts the gateway's settings to engine settings, and makes its workers. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.local.forking import Forker
from paceline.plugins import import_object
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines import ENGINES, find_engine
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.settings import ModelSettings
from paceline.services.rollout_gateway.features.publisher import ROW_DTYPES
from paceline.services.rollout_gateway.workers.local import LocalWorkers, RowShape

RING_ROWS = 16_384
"""Rows of each worker's ring: eight prefills of 2,048 tokens between two reads. A read occurs with
the tokens of every round.
"""


def engine_settings(config: GatewayConfig) -> dict[str, Any]:
    """Values of the engine's own settings class (see engines.EngineKind), as JSON types.

    Raises ConfigError; InvalidInput for an unusable script.
    """
    engine = config.engine
    kind = find_engine(engine.kind)
    spec: type[Config] = import_object(kind.settings)
    if config.features.layers and "capture_inner" not in spec.model_fields:
        raise ConfigError(
            "this engine cannot be told gateway.features.layers",
            seen=engine.kind,
            allowed="embedded",
        )

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
    own = set() if engine.kind in ENGINES else set(spec.model_fields) - set(known)
    if unknown := engine.options.keys() - own:
        raise ConfigError(
            "gateway.engine.options",
            seen=", ".join(sorted(unknown)),
            allowed=", ".join(sorted(own)),
        )

    return known | engine.options


def _script(config: GatewayConfig) -> dict[str, Any]:
    """The scripted engine's settings; its file overrides the gateway's settings."""
    from paceline.services.rollout_gateway.testing.scripted.script import read_script

    tokenizer = Path(config.tokenizer or config.model) / "tokenizer.json"
    script = read_script(Path(config.engine.script)) if config.engine.script else {}
    return {"tokenizer": str(tokenizer), **script}


def row_shape(config: GatewayConfig) -> RowShape | None:
    """Shape of the hidden rows that workers capture; None when no consumer reads rows."""
    if not config.trajectories:
        return None
    if path := find_engine(config.engine.kind).row_layout:
        layout: RowLayout = import_object(path)(engine_settings(config))
    else:
        model = json.loads((config.model_dir / "config.json").read_text(encoding="utf-8"))
        layout = RowLayout.last(int(model.get("hidden_size", 0)))
    return RowShape(RING_ROWS, layout, ROW_DTYPES[config.features.dtype][1])


def local_workers(config: GatewayConfig, forker: Forker | None = None) -> LocalWorkers:
    """Makes the workers of a gateway. `forker`: see LocalWorkers."""
    settings, rows = engine_settings(config), row_shape(config)
    heartbeat_s, count = config.run.heartbeat_s, config.worker_count
    return LocalWorkers(config.engine, settings, rows, heartbeat_s, count, forker)
