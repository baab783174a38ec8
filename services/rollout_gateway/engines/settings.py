"""Names the settings that engines share, each once: the gateway's section and the engine's own
settings class are built from these.

Imports no torch, so that the gateway can check them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config import Config
from paceline.services.rollout_gateway.bandits.base import BanditSettings

Precision = Literal["float32", "bfloat16"]


class BatchSettings(Config):
    """How much one worker takes at once; every engine has these."""

    max_batch: int = Field(default=64, ge=1)
    """Maximum concurrent requests per worker."""
    max_sequence_tokens: int = Field(default=512, ge=2)
    """Maximum tokens of prompt and response together, up to the model's context."""


class ModelSettings(BatchSettings):
    """How one worker runs a model."""

    dtype: Precision = "float32"
    """Element type of weights and computation."""
    threads: int = Field(default=1, ge=0)
    """Compute threads per worker. 0: the fastest number, measured at the start on the worker's
    share of the host's cores (embedded engine); other engines use the whole share.
    """
    prefill_tokens: int = Field(default=2048, ge=1)
    """Maximum prompt tokens of one prefill."""


class RunValues(Config):
    """What an engine takes from the gateway's other sections."""

    arms: tuple[str, ...] = ()
    """Arms to choose among; empty: the engine's default for its drafter."""
    bandit: BanditSettings = BanditSettings()
    seed: int = 0
    """Seed of fresh drafters and of the bandit."""
    features_dtype: Precision = "bfloat16"
    """Element type of captured hidden rows."""


class ModelSpec(ModelSettings, RunValues):
    """What every engine with a model is built from."""

    model_dir: str
    """Hugging Face checkpoint directory."""
    drafter: str = "ngram"
    """What drafts: "off" | "ngram" | a trained kind, fresh from the seed, as far as the engine has
    it | "package.module:KIND" (embedded) | directory of a drafter's checkpoint.
    """

    @property
    def number_format(self) -> str:
        """What the policy computes with."""
        return self.dtype
