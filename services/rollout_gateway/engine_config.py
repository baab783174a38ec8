"""Names the settings of the engine and of its workers, with defaults and ranges."""

from __future__ import annotations

from typing import Any

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
    script: str = ""
    """JSON file of the scripted engine."""
    options: dict[str, Any] = Field(default={})
    """Settings of an engine of your own."""
    pin_cores: bool = False
    """A worker runs on cores of its own, one for each thread, as far as there are enough."""
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
