"""Declares the settings of the drafter trainer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paceline.config import Config, OptimizerConfig, ServiceConfig


class DrafterOptimizerConfig(OptimizerConfig):
    """AdamW of the drafter."""

    lr: float = Field(default=3e-4, gt=0)
    """Learning rate after the warm-up."""
    clip_norm: float = Field(default=0.5, gt=0)
    """Largest global gradient norm."""
    warmup_steps: int = Field(default=20, ge=0)
    """Updates over which the rate rises linearly from lr / warmup_steps."""


class BufferConfig(Config):
    """What is kept for training."""

    samples: int = Field(default=2_000, ge=1, description="samples kept at most")
    byte_budget: int = Field(default=256 << 20, ge=1 << 16, description="bytes kept at most")
    heldout_every: int = Field(
        default=8, ge=2, description="one session in this many is held out for the gate"
    )
    heldout_samples: int = Field(default=64, ge=1, description="held-out samples kept at most")
    recency: float = Field(
        default=0.7, gt=0, le=1, description="weight of a head one version older than the newest"
    )
    window: int = Field(
        default=512, ge=8, description="positions of one sample used at a time, at most"
    )
    long_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of draws from the previous step's long samples until this step's come",
    )
    rejected: bool = Field(
        default=True, description="learn from rejected drafts where the engine captures them"
    )


class GateConfig(Config):
    """When a candidate is judged and promoted."""

    interval_steps: int = Field(
        default=10, ge=1, description="optimiser steps between two judgements"
    )
    min_positions: int = Field(
        default=200, ge=1, description="held-out positions a judgement needs"
    )
    draft_steps: int = Field(
        default=5, ge=1, description="tokens drafted per position when judging"
    )
    samples: int = Field(default=32, ge=1, description="held-out samples used at most")
    temperature: float = Field(
        default=1.0, gt=0, le=10, description="of the rollouts: acceptance depends on it"
    )
    verification: Literal["same_draw", "rejection"] = Field(
        default="same_draw",
        description="how the engine accepts: greedy drafts equal to its draw, or min(1, p/q)",
    )
    verify_cost: float = Field(
        default=0.05,
        ge=0,
        description="cost of verifying a draft, in plain rounds, until the engine measured it",
    )
    draft_cost: dict[str, float] = Field(
        default={},
        description="cost of a draft by kind, in plain rounds, until the engine measured it",
    )
    other_draft_cost: float = Field(
        default=0.1, ge=0, description="draft_cost of kinds without one"
    )
    freeze_after: int = Field(
        default=20,
        ge=0,
        description="judgements in a row without promotion and gain that freeze training; 0: never",
    )
    freeze_gain: float = Field(
        default=0.01, ge=0, description="share of projected speed that counts as no gain"
    )


class DrafterTrainerConfig(ServiceConfig):
    """Tree of the drafter trainer."""

    model: str = Field(default="", description="checkpoint directory of the policy at version 0")
    drafter: str = Field(
        default="eagle",
        description="speculator to train from fresh weights ('eagle', package.module:KIND), or a "
        "checkpoint directory",
    )
    options: dict[str, Any] = Field(
        default={}, description="settings of the fresh speculator's shape and loss"
    )
    shadows: list[str] = Field(
        default=[], description="speculators trained on the same rows beside it, as `drafter`"
    )
    shadow_share: float = Field(
        default=0.5, gt=0, lt=1, description="of the micro-batches, for all shadows together"
    )
    servable: list[str] = Field(
        default=[], description="kinds the engine can serve; empty: that of `drafter` alone"
    )
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description="where ranks compute while they hold a lease; with cuda a slot's number is a "
        "GPU's",
    )
    ranks: int = Field(
        default=1, ge=1, description="ranks kept ready; one per slot the trainer may use"
    )
    threads_per_rank: int = Field(default=1, ge=1)
    niceness: int = Field(
        default=10, ge=0, le=19, description="of the ranks: rollouts on the same CPU come first"
    )
    micro_batch_ms: float = Field(
        default=40.0, gt=0, le=50, description="longest micro-batch aimed at, milliseconds"
    )
    micro_batches_per_step: int = Field(
        default=4, ge=1, description="micro-batches of one optimiser step"
    )
    max_micro_batch_tokens: int = Field(default=1_024, ge=32)
    max_epochs: float = Field(
        default=10, gt=0, description="passes over the buffer in one activation at most"
    )
    activation_deadline_s: float = Field(
        default=30.0,
        gt=0,
        description="training has begun by then, unless the command says otherwise",
    )
    preempt_deadline_s: float = Field(
        default=2.0, gt=0, description="a rank that has not stopped by then is killed"
    )
    push_deadline_s: float = Field(default=30.0, gt=0)
    data_wait_s: float = Field(
        default=2.0, ge=0, description="an activation without rows ends after this long"
    )
    checkpoint_interval_s: float = Field(
        default=20.0, gt=0, description="seconds from one checkpoint to the next"
    )
    resume: bool = Field(default=True, description="continue from the newest checkpoint of the run")
    optimizer: DrafterOptimizerConfig = DrafterOptimizerConfig()
    buffer: BufferConfig = BufferConfig()
    gate: GateConfig = GateConfig()
