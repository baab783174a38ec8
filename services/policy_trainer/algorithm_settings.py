"""Declares the settings of every algorithm; `algorithm.name` selects the settings class."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from paceline.config import Config

Aggregation = Literal[
    "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"
]
"""Aggregation of token losses into one loss (algorithms/losses.py)."""


class KlConfig(Config):
    """Penalty on the divergence from the policy at the start of training
    (algorithms/losses.py).
    """

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence; 0: none, and no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of a token's divergence. In the loss, k1 has a gradient with mean zero while the
    policy is the sampler; k2 has the divergence's own gradient.
    """
    place: Literal["loss", "reward"] = "loss"
    """Place of the divergence: added to the loss of a token, or subtracted from its reward."""

    @property
    def in_loss(self) -> bool:
        """Whether the loss contains the divergence."""
        return self.coefficient > 0 and self.place == "loss"


class CorrectionConfig(Config):
    """Corrections for tokens drawn with other weights or another arithmetic than the start of the
    step (algorithms/losses.py).
    """

    weight: Literal["none", "token", "sequence"] = "none"
    """Weight of losses: none, or the truncated ratio of the token or of its whole sequence."""
    cap: float = Field(default=0.0, ge=0)
    """Maximum weight; 0: 2 for tokens, 5 for sequences."""
    keep: Literal["all", "band", "geometric"] = "all"
    """Trained tokens: all; band: ratio within the bounds; geometric: sequences with a geometric
    mean ratio within the bounds.
    """
    keep_low: float = Field(default=0.0, ge=0)
    """Lower bound; 0: 0.5 for band, 0.99 for geometric."""
    keep_high: float = Field(default=0.0, ge=0)
    """Upper bound; 0: 5 for band, 1.01 for geometric."""
    veto: float = Field(default=0.0, ge=0, lt=1)
    """Minimum ratio of every token of a sequence; other sequences are masked. 0: no veto."""
    bypass: bool = False
    """Whether the sampler replaces the proximal policy, so the algorithm's own ratio corrects."""
    required: bool = True
    """Whether a run is refused if its engine draws with coarser numbers than the trainer's and
    weight, keep and bypass are unset; false: permitted, for measurements.
    """

    @property
    def corrects(self) -> bool:
        """Whether tokens drawn with another number format are weighted, left out or clipped to
        correct for it.
        """
        return self.weight != "none" or self.keep != "all" or self.bypass


class AlgorithmConfig(Config):
    """Settings of every algorithm; `name` selects the algorithm."""

    mini_batches: int = Field(default=1, ge=1)
    """Number of parts of whole groups per batch, one optimiser update each."""
    passes: int = Field(default=1, ge=1)
    """Number of passes over the batch per step."""
    aggregation: Aggregation = "token_mean"
    """Aggregation of token losses."""
    aggregation_tokens: ClassVar[int] = 1024
    """Divisor of a sequence's loss with aggregation `constant`, tokens."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Lower clip of the ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip of the ratio: 1 + clip_high."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Maximum loss of a token with negative advantage, as a multiple of the advantage's size; above
    1, or 0 for no bound.
    """

    kl: KlConfig = KlConfig()
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="after")
    def _dual_clip_above_one(self) -> AlgorithmConfig:
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip is 0 or above 1, not {self.dual_clip:g}")
        return self


class GroupedConfig(AlgorithmConfig):
    """Settings of algorithms that compare rewards within their group."""

    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""


class GrpoConfig(GroupedConfig):
    """GRPO: rewards compared within their group."""

    name: Literal["grpo"] = "grpo"
    """Name of the algorithm."""


class DrGrpoConfig(AlgorithmConfig):
    """Dr. GRPO: GRPO without the divisions that prefer short wrong answers and easy tasks."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """Name of the algorithm."""
    normalize_std: ClassVar[bool] = False
    """Whether centred rewards are divided by their standard deviation."""
    aggregation: Aggregation = "constant"
    """Aggregation of token losses."""


class RlooConfig(AlgorithmConfig):
    """RLOO: each reward against the mean of its siblings'."""

    name: Literal["rloo"] = "rloo"
    """Name of the algorithm."""


class ReinforceConfig(AlgorithmConfig):
    """REINFORCE++: advantages normalised over the whole batch; `_baseline` first subtracts the
    group's mean reward.
    """

    name: Literal["reinforce_plus_plus", "reinforce_plus_plus_baseline"] = "reinforce_plus_plus"
    """Name of the algorithm."""


class PpoConfig(AlgorithmConfig):
    """PPO with a critic."""

    name: Literal["ppo"] = "ppo"
    """Name of the algorithm."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a token's reward."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation: 1 has no bias, 0 the least variance."""
    value_clip: float = Field(default=0.2, ge=0)
    """Maximum change of a value per step before its loss is clipped; 0: no limit."""
    critic_lr: float = Field(default=1e-4, gt=0)
    """Learning rate of the critic."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Number of first RL steps that train only the critic."""


class DapoConfig(AlgorithmConfig):
    """DAPO: a wider upper clip and a penalty near the length limit."""

    name: Literal["dapo"] = "dapo"
    """Name of the algorithm."""
    clip_high: float = Field(default=0.28, ge=0)
    """Upper clip of the ratio: 1 + clip_high."""
    overlong_tokens: int = Field(default=0, ge=0)
    """Generated tokens of a session with the full penalty, a reward of 1; 0: no penalty."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens below that limit over which the penalty grows."""

    @model_validator(mode="after")
    def _buffer_below_limit(self) -> DapoConfig:
        if self.overlong_buffer > self.overlong_tokens:
            raise ValueError("overlong_buffer is at most overlong_tokens")
        return self


class GspoConfig(GroupedConfig):
    """GSPO: one ratio per sequence."""

    name: Literal["gspo"] = "gspo"
    """Name of the algorithm."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """Lower clip of the ratio: 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """Upper clip of the ratio: 1 + clip_high."""
    aggregation: Aggregation = "sequence_mean_token_mean"
    """Aggregation of token losses."""


class CispoConfig(GroupedConfig):
    """CISPO: the weight of a token is clipped, not its update."""

    name: Literal["cispo"] = "cispo"
    """Name of the algorithm."""
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """Lower clip of the ratio: 1 - clip_low; 1: none."""


class DecoupledConfig(GroupedConfig):
    """Decoupled PPO: clipped around the step's start weights, and weighed by start over sampler,
    with `correction.weight` `token` and `correction.cap` 5.

    L_t = -min(rho_t, cap) min(u_t A_t, clip(u_t) A_t), rho_t = proximal / behavior (AReaL, arXiv
    2505.24298, eq. 5; PPO-EWMA, arXiv 2110.00641). The clip holds the policy near the step's start,
    for any age of the sampling weights.
    """

    name: Literal["decoupled"] = "decoupled"
    """Name of the algorithm."""
    correction: CorrectionConfig = CorrectionConfig(weight="token", cap=5.0)


class OwnConfig(GroupedConfig):
    """Settings of an algorithm without a class here."""

    name: str
    """Its name in algorithms/__init__.py, or your own class: `package.module:Class` or
    `path/to/file.py:Class`.
    """
    options: dict[str, float | int | bool | str] = Field(default={})
    """Settings of the algorithm."""


_TAGS = (
    *("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("ppo", "dapo", "gspo", "cispo", "decoupled"),
)


def _tag_of(given: Any) -> str:
    """The tag of a table or object of settings."""
    found = given.get("name", "grpo") if isinstance(given, dict) else getattr(given, "name", "grpo")
    return str(found) if found in _TAGS else "own"


AnyAlgorithm = Annotated[
    Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[DrGrpoConfig, Tag("dr_grpo")]
    | Annotated[RlooConfig, Tag("rloo")]
    | Annotated[ReinforceConfig, Tag("reinforce_plus_plus")]
    | Annotated[ReinforceConfig, Tag("reinforce_plus_plus_baseline")]
    | Annotated[PpoConfig, Tag("ppo")]
    | Annotated[DapoConfig, Tag("dapo")]
    | Annotated[GspoConfig, Tag("gspo")]
    | Annotated[CispoConfig, Tag("cispo")]
    | Annotated[DecoupledConfig, Tag("decoupled")]
    | Annotated[OwnConfig, Tag("own")],
    Discriminator(_tag_of),
]
