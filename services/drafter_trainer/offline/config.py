"""Settings of one offline run.

Imports no torch: the parent process checks them before any rank is started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from paceline.config import Config

CONFIG_VARIABLE = "PACELINE_OFFLINE_CONFIG"
"""Environment variable that carries the settings to the ranks as JSON."""


class OfflineConfig(Config):
    """What `paceline train-drafter` was asked for."""

    data: Path
    model: Path
    speculator: str = "eagle"
    options: dict[str, Any] = Field(default={})
    out: Path
    start: Path | None = None
    steps: int | None = Field(default=None, ge=1)
    epochs: int = Field(default=1, ge=1)
    batch_tokens: int = Field(default=8_192, ge=16)
    row_tokens: int = Field(default=2_048, ge=16)
    window: int = Field(default=512, ge=8)
    lr: float = Field(default=3e-4, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    freeze_base_model: bool = True
    base_lr: float = Field(default=1e-5, gt=0)
    speculator_weight: float = Field(default=1.0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    regenerate: bool = False
    max_tokens: int = Field(default=256, ge=2)
    temperature: float = Field(default=1.0, ge=0)
    heldout_share: float = Field(default=0.05, ge=0, lt=1)
    draft_steps: int = Field(default=5, ge=1)
    eval_every: int = Field(default=200, ge=1)
    log_every: int = Field(default=10, ge=1)
    save_every: int = Field(default=200, ge=1)
    ranks: int = Field(default=1, ge=1)
    threads_per_rank: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)
    resume: bool = True

    @property
    def rows_per_rank(self) -> int:
        """Rows of one rank in one optimiser step: `batch_tokens` over all ranks, rounded up to
        whole rows.
        """
        return max(1, -(-self.batch_tokens // (self.row_tokens * self.ranks)))

    def settings(self, samples: str) -> dict[str, Any]:
        """What must not change between two processes of one run; `samples` is a hash of the
        data.
        """
        kept = (
            "speculator",
            "options",
            "batch_tokens",
            "row_tokens",
            "window",
            "freeze_base_model",
            "heldout_share",
        )
        return {**{key: getattr(self, key) for key in kept}, "seed": self.seed, "data": samples}
