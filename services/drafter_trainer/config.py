"""Declares the settings of the drafter trainer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from paceline.config import Config, OptimizerConfig, ServiceConfig


class DrafterOptimizerConfig(OptimizerConfig):
    """Muon, or AdamW, of the drafter."""

    kind: Literal["muon", "adamw"] = "muon"
    """What moves the matrices between states; embeddings, heads and norms are AdamW's always.
    Muon's products cost as much as those of a step of some 3.7 tokens for each column of the
    policy's states: give it as many, or choose adamw.
    """
    iterations: int = Field(default=3, ge=1, le=10)
    """Newton-Schulz iterations of Muon: with more its steps are truer and longer."""
    average: float = Field(default=0.98, ge=0, lt=1)
    """Decay per step of the averaged weights that are judged, served and kept; 0: the last ones."""
    lr: float = Field(default=3e-4, gt=0)
    """Learning rate after the warm-up."""
    clip_norm: float = Field(default=0.5, gt=0)
    """Largest global gradient norm."""
    warmup_steps: int = Field(default=20, ge=0)
    """Updates over which the rate rises linearly from lr / warmup_steps."""


class BufferConfig(Config):
    """What is kept for training."""

    samples: int = Field(default=2_000, ge=1)
    """Samples kept at most."""
    byte_budget: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes kept at most."""
    judged_every: int = Field(default=4, ge=1)
    """One group in this many waits to be judged by before it is trained on."""
    judged_samples: ClassVar[int] = 64
    """Samples that wait so, at most; older ones are trained on."""
    recency: ClassVar[float] = 0.7
    """Weight of a head one version older than the newest."""
    window: int = Field(default=512, ge=8)
    """Positions of one sample used at a time, at most."""
    long_share: ClassVar[float] = 0.5
    """Share of draws from the previous step's long samples until this step's come."""
    rejected: bool = True
    """Learn from rejected drafts where the engine captures them."""


class GateConfig(Config):
    """When a candidate is judged and promoted."""

    interval_steps: int = Field(default=10, ge=1)
    """Optimiser steps between two judgements."""
    min_positions: int = Field(default=200, ge=1)
    """Positions a judgement needs."""
    min_groups: int = Field(default=3, ge=2)
    """Groups of siblings a judgement needs: its noise is how these differ."""
    draft_steps: int = Field(default=5, ge=1)
    """Tokens drafted per position when judging."""
    samples: int = Field(default=32, ge=1)
    """Samples used at most."""
    verification: Literal["same_draw", "rejection"] = "same_draw"
    """How the engine accepts: greedy drafts equal to its draw, or min(1, p/q)."""
    verify_cost: ClassVar[float] = 0.05
    """Cost of verifying a draft, in plain rounds, until the engine measured it."""
    draft_cost: ClassVar[float] = 0.1
    """Cost of a draft, in plain rounds, until the engine measured it."""
    freeze_after: ClassVar[int] = 8
    """Judgements without a promotion that freeze training where they show no gain; 0: never."""
    freeze_gain: ClassVar[float] = 0.02
    """Share of a drafter's speed that counts as no gain, by the mean of those judgements and its
    error.
    """


class DrafterTrainerConfig(ServiceConfig):
    """Tree of the drafter trainer."""

    model: str = ""
    """Checkpoint directory of the policy at version 0."""
    drafter: str = "eagle"
    """Speculator to train from fresh weights ('eagle', package.module:KIND), or a checkpoint
    directory.
    """
    options: dict[str, Any] = Field(default={})
    """Settings of the fresh speculator's shape and loss."""
    shadows: list[str] = Field(default=[])
    """Speculators trained on the same rows beside it, as `drafter`."""
    shadow_share: ClassVar[float] = 0.5
    """Share of the micro-batches, of all shadows together."""
    servable: list[str] = Field(default=[])
    """Kinds the engine can serve; empty: that of `drafter` alone."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where ranks compute while they hold a lease; with cuda a slot's number is a GPU's."""
    ranks: int = Field(default=1, ge=1)
    """Ranks kept ready; one per slot the trainer may use."""
    threads_per_rank: int = Field(default=1, ge=1)
    """Compute threads of a rank."""
    niceness: int = Field(default=10, ge=0, le=19)
    """Niceness of the ranks: rollouts on the same CPU come first."""
    micro_batch_ms: ClassVar[float] = 40.0
    """Longest micro-batch aimed at, milliseconds of a rank's own time."""
    micro_batch_bytes: ClassVar[int] = 64 << 20
    """Bytes of captured states of a micro-batch at most."""
    micro_batches_per_step: int = Field(default=4, ge=1)
    """Micro-batches of one optimiser step."""
    max_micro_batch_tokens: int = Field(default=1_024, ge=32)
    """Tokens of a micro-batch at most."""
    max_epochs: float = Field(default=10, gt=0)
    """Passes over the buffer in one activation at most."""
    push_deadline_s: float = Field(default=30.0, gt=0)
    """Seconds that a push of a drafter may take."""
    data_wait_s: ClassVar[float] = 2.0
    """Seconds after which an activation without rows ends."""
    checkpoint_interval_s: float = Field(default=20.0, gt=0)
    """Seconds from one checkpoint to the next."""
    resume: bool = True
    """Continue from the newest checkpoint of the run."""
    optimizer: DrafterOptimizerConfig = DrafterOptimizerConfig()
    buffer: BufferConfig = BufferConfig()
    gate: GateConfig = GateConfig()
