"""Loads the settings of all services of a run.

The table of services is in another module, so that the command line's help does not import these
settings.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config.load import load_config
from paceline.local.services import SERVICES
from paceline.plugins import import_object


def settings_of_run(files: Sequence[Path], overrides: Sequence[str]) -> dict[str, Any]:
    """Settings by service name, of all services with settings. Raises ConfigError."""
    return {
        spec.name: load_config(import_object(spec.settings), spec.name, files, overrides)
        for spec in SERVICES
        if spec.settings
    }


def gpu_settings(found: Mapping[str, Any]) -> list[str]:
    """Keys of the settings that request a GPU."""
    gateway, policy, drafter = (
        found[name] for name in ("gateway", "policy_trainer", "drafter_trainer")
    )
    named = {"policy_trainer.device": policy.device, "drafter_trainer.device": drafter.device}
    if gateway.engine.kind == "sglang":
        named["gateway.engine.sglang.device"] = gateway.engine.sglang.device
    return [key for key, device in named.items() if device == "cuda"]
