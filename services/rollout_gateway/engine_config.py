"""Declares the settings of the engine and of its workers, with defaults and ranges."""

from typing import Any

from pydantic import Field

from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedConfig
from paceline.services.rollout_gateway.engines.settings import ModelSettings
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangConfig


class EngineConfig(ModelSettings):
    """The engine and its worker processes."""

    kind: str = "embedded"
    """Engine: embedded, sglang, or your own EngineKind as package.module:KIND."""
    workers: int = Field(default=0, ge=0)
    """Number of worker processes; 0: one per core, in a run with a large model one for all cores.
    """
    options: dict[str, Any] = Field(default={})
    """Settings of your own engine."""
    ready_deadline_s: float = Field(default=180, gt=0)
    """Maximum time to load the model, seconds: CPU time while the worker works, else wall time."""
    embedded: EmbeddedConfig = EmbeddedConfig()
    sglang: SGLangConfig = SGLangConfig()

    @property
    def profile(self) -> str:
        """The number format of the first policy's rounding; "": not rounded."""
        own = {"embedded": self.embedded.profile, "sglang": self.sglang.profile}
        return own.get(self.kind, "")
