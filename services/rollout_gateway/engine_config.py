"""Names the settings of the engine and of its workers, with defaults and ranges."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedConfig
from paceline.services.rollout_gateway.engines.settings import ModelSettings
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangConfig


class EngineConfig(ModelSettings):
    """The engine and its worker processes."""

    kind: str = "embedded"
    """What runs the model: embedded, sglang, scripted (from a file, for tests), or your own as
    package.module:KIND, an EngineKind.
    """
    workers: int = Field(default=0, ge=0)
    """Worker processes; 0: one per core."""
    most_workers: int = Field(default=0, ge=0)
    """Places for workers, each with its slots from the start on: so many there may be when some are
    added to a run that goes on. 0: as many as `workers`.
    """
    hosts: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Places for workers on each host, the gateway's own first; empty: all on that. The others run
    `python -m paceline.services.rollout_gateway.worker_host`, each with its number.
    """
    shared_spool: bool = True
    """Whether `spool_dir` is one directory on all hosts. Where not, the others copy each version by
    the gateway's address, to `<spool_dir>-host-N`.
    """
    copies_fan_out: int = Field(default=2, ge=0)
    """Hosts that copy a version from the gateway, and from each that copies it; the gateway says
    who from whom. 0: all from the gateway.
    """
    script: str = ""
    """JSON file of the scripted engine."""
    options: dict[str, Any] = Field(default={})
    """Settings of an engine of your own."""
    ready_deadline_s: float = Field(default=180, gt=0)
    """Seconds until a worker has loaded its model: of its processor while it works, else of the
    clock.
    """
    command_deadline_s: float = Field(default=60, gt=0)
    """Seconds until a worker has answered a command, counted likewise."""
    embedded: EmbeddedConfig = EmbeddedConfig()
    sglang: SGLangConfig = SGLangConfig()

    @property
    def profile(self) -> str:
        """Setting of what the policy of the start is rounded to; "": not rounded."""
        own = {"embedded": self.embedded.profile, "sglang": self.sglang.profile}
        return own.get(self.kind, "")
