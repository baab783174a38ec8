"""Settings that engines share; the gateway's section and the engines' settings classes extend them.

This module does not import torch, so that the gateway can check settings.
"""

from typing import Literal

from pydantic import Field

from paceline.config import Config
from paceline.services.rollout_gateway.bandits.base import BanditSettings

Precision = Literal["float32", "bfloat16"]


class BatchSettings(Config):
    """Batch limits of one worker, for every engine."""

    max_batch: int = Field(default=64, ge=1)
    """Maximum concurrent requests per worker."""
    max_sequence_tokens: int = Field(default=512, ge=2)
    """Maximum tokens of prompt and response together, up to the model's context."""


class ModelSettings(BatchSettings):
    """Settings of a worker that runs a model."""

    dtype: Precision = "float32"
    """Element type of weights and computation."""
    threads: int = Field(default=1, ge=0)
    """Compute threads per worker. 0: all of the worker's share of the host's cores."""
    prefill_tokens: int = Field(default=2048, ge=1)
    """Maximum prompt tokens of one prefill."""


class RunValues(Config):
    """Values that an engine takes from other sections of the gateway's settings."""

    arms: tuple[str, ...] = ()
    """Arms to choose from; empty: the engine's default for its drafter."""
    bandit: BanditSettings = BanditSettings()
    seed: int = 0
    """Seed of fresh drafters and of the bandit."""
    features_dtype: Precision = "bfloat16"
    """Element type of captured hidden rows."""


class ModelSpec(ModelSettings, RunValues):
    """Inputs for building any engine with a model."""

    model_dir: str
    """Hugging Face checkpoint directory."""
    drafter: str = "ngram"
    """The drafter: "off" | "ngram" | a trained kind, initialised from the seed, if the engine
    supports it | "package.module:KIND" (embedded) | directory of a drafter checkpoint.
    """

    @property
    def number_format(self) -> str:
        """Number format of the policy's computation."""
        return self.dtype
