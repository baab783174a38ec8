"""Declares the options of `paceline drafter train`. Imports no torch."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from paceline.config import Temperature
from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.speculators.kinds import SPECULATORS

TRAINED = " | ".join(kind.name for kind in SPECULATORS.values() if kind.trained)
FIXED = {
    *("speculator", "options", "batch_tokens", "row_tokens", "window", "heldout_share", "seed"),
    *("kind", "average"),
}
"""Options that must stay equal when a run is resumed."""


class OfflineConfig(DrafterOptimizerConfig):
    """Options of `paceline drafter train`, with those of the optimiser."""

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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the model: float32 | bfloat16."""
    temperature: Temperature = 1.0
    """Temperature of the model in evaluations; 0 is greedy."""
    heldout_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of sequences for evaluation."""
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
    """Seed of weights, order and windows."""
    resume: bool = True
    """Continue the run in OUT."""

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimiser step: `batch_tokens`, rounded up to as many whole rows for each
        rank.
        """
        return self.ranks * max(1, -(-self.batch_tokens // (self.row_tokens * self.ranks)))
