"""Declares the settings of the drafter trainer, and the options of `paceline drafter train`.

Imports no torch.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from paceline.config import Config, OptimizerConfig, ServiceConfig, Temperature
from paceline.speculators.kinds import SPECULATORS


class DrafterOptimizerConfig(OptimizerConfig):
    """Muon, or AdamW, of the drafter."""

    kind: Literal["muon", "adamw"] = "muon"
    """Optimiser of the matrices between hidden states; embeddings, heads and norms always use
    AdamW. Muon's products cost as much as 3.7 tokens per hidden unit: use at least as many tokens
    per step, or choose adamw.
    """
    iterations: ClassVar[int] = 3
    """Newton-Schulz iterations of Muon; more iterations are more exact and slower."""
    average: float = Field(default=0.98, ge=0, lt=1)
    """Decay per step of the averaged weights, which are evaluated, served and kept; 0: the last
    weights.
    """
    lr: float = Field(default=3e-4, gt=0)
    """Learning rate after the warm-up."""
    clip_norm: float = Field(default=0.5, gt=0)
    """Maximum global gradient norm."""
    warmup_steps: int = Field(default=20, ge=0)
    """Updates of the linear warm-up, from lr / warmup_steps to lr."""


class BufferConfig(Config):
    """The buffer of training rows."""

    samples: int = Field(default=2_000, ge=1)
    """Maximum samples."""
    byte_budget: int = Field(default=256 << 20, ge=1 << 16)
    """Maximum size, bytes."""
    judged_every: int = Field(default=4, ge=1)
    """One group in this many is held out for the gate before training uses it."""
    judged_samples: ClassVar[int] = 64
    """Maximum held-out samples; older samples go to training."""
    recency: ClassVar[float] = 0.7
    """Weight of a head one version older than the newest."""
    window: ClassVar[int] = 512
    """Maximum positions of one sample per use."""
    long_share: ClassVar[float] = 0.5
    """Share of draws from the former step's long samples until the current step has long samples.
    """


class GateConfig(Config):
    """Evaluation and promotion of candidates."""

    interval_steps: int = Field(default=10, ge=1)
    """Optimiser steps between two evaluations."""
    min_positions: int = Field(default=200, ge=1)
    """Minimum positions per evaluation."""
    min_groups: int = Field(default=3, ge=2)
    """Minimum sibling groups per evaluation, for an estimate of the noise."""
    draft_steps: int = Field(default=5, ge=1)
    """Drafted tokens per position in an evaluation."""
    samples: int = Field(default=32, ge=1)
    """Maximum samples per evaluation."""
    drafts: Literal["drawn", "likeliest"] = "drawn"
    """The engine's drafts at a temperature above 0: drawn with the noise of the policy's draws, or
    the most likely tokens. A run with SGLang sets likeliest.
    """
    verify_cost: ClassVar[float] = 0.05
    """Cost of verifying a draft before measurements of the engine, in plain rounds."""
    draft_cost: ClassVar[float] = 0.1
    """Cost of a draft by kind before measurements of the engine, in plain rounds."""
    freeze_after: ClassVar[int] = 8
    """Number of evaluations without promotion and gain before training freezes; 0: never."""
    freeze_gain: ClassVar[float] = 0.02
    """Maximum relative speed gain that counts as no gain, by the evaluations' mean and
    its error.
    """


class DrafterTrainerConfig(ServiceConfig):
    """Settings of the drafter trainer."""

    model: str = ""
    """Checkpoint directory of the policy at version 0. A whole run without it takes gateway.model.
    """
    drafter: str = "eagle"
    """Trained speculator: a kind with fresh weights ('eagle', package.module:KIND) or a checkpoint
    directory.
    """
    options: dict[str, Any] = Field(default={})
    """Settings of a fresh speculator's shape and loss."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of ranks under a lease; with cuda, slot numbers are GPU numbers."""
    ranks: int = Field(default=1, ge=1)
    """Number of ready ranks, one per usable slot."""
    threads_per_rank: int = Field(default=1, ge=1)
    """Compute threads of a rank."""
    niceness: int = Field(default=10, ge=0, le=19)
    """Niceness of the ranks, below rollouts on the same CPU."""
    micro_batch_ms: ClassVar[float] = 40.0
    """Planned longest duration of a micro-batch, milliseconds of a rank's own time."""
    micro_batch_bytes: ClassVar[int] = 64 << 20
    """Maximum size of the hidden states and draft logits of a micro-batch, bytes."""
    micro_batches_per_step: int = Field(default=4, ge=1)
    """Micro-batches per optimiser step."""
    max_micro_batch_tokens: int = Field(default=1_024, ge=32)
    """Maximum tokens of a micro-batch."""
    max_epochs: float = Field(default=10, gt=0)
    """Maximum passes over the buffer per activation."""
    data_wait_s: ClassVar[float] = 2.0
    """Maximum wait of an activation for rows, seconds."""
    checkpoint_interval_s: float = Field(default=20.0, gt=0)
    """Time between two checkpoints, seconds."""
    optimizer: DrafterOptimizerConfig = DrafterOptimizerConfig()
    buffer: BufferConfig = BufferConfig()
    gate: GateConfig = GateConfig()


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
