"""Declares the settings of one offline run, which are the options of `paceline drafter train`.

Imports no torch: the parent process checks the settings before any rank starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from paceline.config import Config, Temperature
from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.speculators.kinds import SPECULATORS

TRAINED = " | ".join(kind.name for kind in SPECULATORS.values() if kind.trained)


class OfflineConfig(Config):
    """Options of `paceline drafter train`."""

    data: Path
    """A file, or a directory of files."""
    model: Path
    """Checkpoint directory of the policy."""
    speculator: str = Field(
        default="eagle", description=f"{TRAINED}, or package.module:KIND of your own"
    )
    options: dict[str, Any] = Field(default={})
    """Option of the speculator."""
    out: Path = Path("runs/drafter")
    """Directory of the run."""
    start: Path | None = None
    """Drafter to start from; default: fresh weights."""
    steps: int | None = Field(default=None, ge=1)
    """Number of optimiser steps; default: from --epochs."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data."""
    batch_tokens: int = Field(default=8_192, ge=16)
    """Tokens per optimiser step over all ranks."""
    row_tokens: int = Field(default=2_048, ge=16)
    """Maximum tokens of a forward; longer sequences are cut."""
    window: int = Field(default=512, ge=8)
    """Trained positions per sequence, at a random place."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Optimiser of the speculator's matrices: muon | adamw."""
    iterations: int = Field(default=3, ge=1, le=10)
    """Newton-Schulz iterations of Muon."""
    average: float = Field(default=0.98, ge=0, lt=1)
    """Decay per step of the averaged weights, which are evaluated and kept; 0: the last weights."""
    lr: float = Field(default=3e-4, gt=0)
    """Learning rate of the speculator."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up."""
    clip_norm: float = Field(default=0.5, gt=0)
    """Maximum gradient norm."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the model: float32 | bfloat16."""
    regenerate: bool = False
    """Train on the model's own answers to the prompts."""
    max_tokens: int = Field(default=256, ge=2)
    """Maximum tokens of such an answer."""
    temperature: Temperature = 1.0
    """Temperature of such an answer; 0 is greedy."""
    heldout_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of sequences for evaluation."""
    draft_steps: int = Field(default=5, ge=1)
    """Evaluated drafts per position."""
    eval_every: int = Field(default=200, ge=1)
    """Steps between two evaluations."""
    log_every: int = Field(default=10, ge=1)
    """Steps between two lines on the terminal."""
    save_every: int = Field(default=200, ge=1)
    """Steps between two checkpoints."""
    ranks: int = Field(default=1, ge=1)
    """Number of processes that share model, drafter and rows (FSDP2)."""
    threads_per_rank: int = Field(default=1, ge=1)
    """Compute threads per rank."""
    seed: int = Field(default=0, ge=0)
    """Seed of weights, order, windows and answers."""
    resume: bool = True
    """Continue the run in OUT."""

    @property
    def optimizer_config(self) -> DrafterOptimizerConfig:
        """The speculator's optimiser, in the form of a run's settings."""
        return DrafterOptimizerConfig(
            kind=self.optimizer,
            iterations=self.iterations,
            average=self.average,
            lr=self.lr,
            clip_norm=self.clip_norm,
            warmup_steps=self.warmup_steps,
        )

    @property
    def rows_per_rank(self) -> int:
        """Rows of one rank in one optimiser step: `batch_tokens` over all ranks, rounded up to
        whole rows.
        """
        return max(1, -(-self.batch_tokens // (self.row_tokens * self.ranks)))

    def settings(self, samples: str) -> dict[str, Any]:
        """Settings that must stay equal between two processes of one run; `samples` is a hash of
        the data.
        """
        kept = (
            "speculator",
            "options",
            "batch_tokens",
            "row_tokens",
            "window",
            "heldout_share",
            "optimizer",
            "average",
        )
        return {**{key: getattr(self, key) for key in kept}, "seed": self.seed, "data": samples}
