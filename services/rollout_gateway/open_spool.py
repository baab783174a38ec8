"""Opens a gateway's spool at the versions that its configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.v1 import engine_pb2 as pb
from paceline.weights import Spool

S = TypeVar("S", bound=Spool)


def open_spool(kind: type[S], directory: Path, config: GatewayConfig) -> S:
    """What serves before the first commit is the configured policy, drafter and profile. Raises
    ConfigError for a profile that is none.
    """
    initial = {int(pb.WEIGHT_TARGET_POLICY): config.model_dir}
    drafter = Path(config.drafter)
    if drafter.is_dir() and (drafter / "config.json").is_file():
        initial[int(pb.WEIGHT_TARGET_DRAFTER)] = drafter
    return kind(directory, initial=initial, profile=config.engine.profile)
