"""Opens a gateway's spool with the configured versions."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.v1 import engine_pb2 as pb
from paceline.weights import Spool

S = TypeVar("S", bound=Spool)


def open_spool(kind: type[S], directory: Path, config: GatewayConfig) -> S:
    """Open a spool. Before the first commit it serves the configured policy, drafter and profile.
    Raises ConfigError for an invalid profile.
    """
    initial = {int(pb.WEIGHT_TARGET_POLICY): config.model_dir}
    drafter = Path(config.drafter)
    if drafter.is_dir() and (drafter / "config.json").is_file():
        initial[int(pb.WEIGHT_TARGET_DRAFTER)] = drafter
    return kind(directory, initial=initial, profile=config.engine.profile)
