"""Settings of the policy trainer. Owns their names, defaults and bounds; not the shared sections."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.config import Config, ServiceConfig


class AlgorithmConfig(Config):
    """Policy-gradient variant."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.2, ge=0)
    normalize_std: bool = True
    behavior_cap: float = Field(default=0.0, ge=0)  # cap of the proximal/behavior ratio; 0 leaves the correction out
    updates_per_step: int = Field(default=1, ge=1)  # passes over the batch, one optimiser update each


class OptimizerConfig(Config):
    """AdamW."""

    lr: float = Field(default=1.5e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)  # updates over which the rate rises linearly from lr / warmup_steps


class PolicyTrainerConfig(ServiceConfig):
    """The policy trainer's tree."""

    model: Path = Path("examples/demo/policy_start")  # Hugging Face directory of the start policy
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: int = Field(default=0, ge=0)  # 0: min(2, cores), or all GPUs
    threads_per_rank: int = Field(default=1, ge=1)
    reshard_after_forward: bool = False  # True frees a layer's gathered weights between forward and backward
    tokens_per_micro_batch: int = Field(default=4096, ge=1)
    row_tokens: int = Field(default=256, ge=1)
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    max_staleness: int = Field(default=0, ge=0)  # policy versions between the oldest token and the weights trained
    group_deadline_s: float = Field(default=120.0, gt=0)  # used when the call names none
    max_pending: int = Field(default=65536, ge=1)  # trajectories held for later groups
    checkpoint_interval_steps: int = Field(default=10, ge=1)
    checkpoint_keep: int = Field(default=2, ge=1)  # newest checkpoints kept
    checkpoint_keep_every: int = Field(default=0, ge=0)  # also keep every checkpoint whose version this divides; 0: none
    save_final: bool = True  # write a checkpoint at a clean stop
    resume: bool = True  # continue from the run's directory when it holds a checkpoint or batch records
    start_deadline_s: float = Field(default=120.0, gt=0)
    step_deadline_s: float = Field(default=3600.0, gt=0)  # after the groups are closed
    stop_grace_s: float = Field(default=20.0, gt=0)

    @property
    def checkpoints_dir(self) -> Path:
        """Where checkpoints and batch records of the run lie."""
        return Path(self.run.dir) / "checkpoints" / "policy"
