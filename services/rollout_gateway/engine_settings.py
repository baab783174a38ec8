"""Picks of the gateway's settings those that an engine gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.plugins import import_object
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines import ENGINES, find_engine
from paceline.services.rollout_gateway.engines.settings import ModelSettings


def engine_settings(config: GatewayConfig) -> dict[str, Any]:
    """Values of the engine's own settings class (see engines.EngineKind), as JSON types.

    Raises ConfigError; InvalidInput for a script that cannot be used.
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
        "rejected_rows": config.features.rejected,
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
    """What the scripted engine replays; its file may overrule the settings."""
    from paceline.services.rollout_gateway.testing.scripted.script import read_script

    tokenizer = Path(config.tokenizer or config.model) / "tokenizer.json"
    script = read_script(Path(config.engine.script)) if config.engine.script else {}
    return {"tokenizer": str(tokenizer), **script}
