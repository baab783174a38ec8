"""Declares the settings of the Tinker front."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from paceline.config import ServiceConfig


class TinkerConfig(ServiceConfig):
    """Settings of the front of the Tinker API."""

    model: str = "examples/demo/policy_start"
    """Hugging Face directory of the start policy. `paceline serve tinker` takes gateway.model."""
    model_names: tuple[str, ...] = ()
    """Names of the model in requests, besides its path and the name of its directory."""
    max_body_bytes: int = Field(default=8 << 20, ge=1 << 16, le=8 << 20)
    """Maximum size of a request's body, bytes."""
    kept_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Maximum size of waiting calls and kept results, bytes. Further calls wait at the client."""
    kept_futures: int = Field(default=10_000, ge=1)
    """Maximum number of waiting calls and kept results."""
    sessions: int = Field(default=64, ge=1)
    """Maximum number of live sessions."""
    session_s: float = Field(default=120.0, gt=0)
    """Silence after which a session and its training clients end, seconds."""
    kept_samplers: int = Field(default=4, ge=1)
    """Number of newest unnamed samplers kept per training client."""
    gap_s: float = Field(default=60.0, gt=0)
    """Maximum wait of a call for an earlier call of its client, seconds."""
    drafter_workers: int = Field(default=0, ge=0)
    """Number of engine workers whose slots the drafter trainer gets while no sample runs; 0: no
    drafter is trained. `paceline serve tinker` sets 1 with a drafter that can be trained.
    """
    idle_s: ClassVar[float] = 0.2  # time without samples before the drafter gets slots, seconds
    poll_s: ClassVar[float] = 30.0  # longest answer to a request for a result, seconds
    parallel_samples: ClassVar[int] = 256  # requests to the gateway at a time

    @property
    def folder(self) -> Path:
        """Directory of saved states and samplers."""
        return Path(self.run.dir).absolute() / "tinker"
