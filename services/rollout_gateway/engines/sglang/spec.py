"""Names the settings of the SGLang engine.

Imports neither torch nor SGLang, so that the gateway can check them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.config import Config
from paceline.errors import ConfigError
from rollout_gateway.engines.settings import ModelSpec

OFF = "off"
WITHOUT_DIRECTORY = (OFF, "ngram", "eagle")
DEFAULT_ARMS = {
    OFF: (OFF,),
    "ngram": (OFF, "ngram:4_1_5"),
    "eagle": (OFF, "eagle:3_1_4", "eagle:5_1_6", "eagle:3_2_8"),
    "eagle3": (OFF, "eagle3:3_1_4", "eagle3:5_1_6", "eagle3:3_2_8"),
}
"""Arms served when none are named, by speculator."""
SHARED_WITH_TARGET = {
    "eagle": ("embed_tokens.weight", "lm_head.weight"),
    "eagle3": ("embed_tokens.weight",),
}
"""Tensors a drafter shares with the target by reference: loading them would overwrite the policy's
own.
"""


class SGLangConfig(Config):
    """What only the SGLang engine has."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA when there is one
    tensor_parallel_size: int = Field(default=1, ge=1)  # GPUs of one worker
    memory_fraction: float = Field(default=0.4, gt=0, lt=1)  # of each GPU, for weights and KV cache
    memory_saver: bool = False  # weights and KV cache can be released between steps (GPU)
    # What a new drafter does to running requests.
    drafter_swap: Literal["in_place", "retract"] = "in_place"
    # Further arguments of SGLang's server, by its own names; they come last.
    arguments: dict[str, str | int | float | bool] = Field(default={})


class SGLangSpec(SGLangConfig, ModelSpec):
    """What one SGLang engine serves and how. One engine serves one speculator."""

    prefill_tokens: int = Field(default=2048, ge=16)  # SGLang's chunks are no shorter

    @property
    def speculator(self) -> str:
        """off | ngram | eagle | eagle3.

        Raises ConfigError for a drafter that SGLang does not know or misreads.
        """
        if self.drafter in WITHOUT_DIRECTORY:
            return self.drafter
        config = Path(self.drafter) / "config.json"
        if not config.is_file():
            raise ConfigError(
                "not a drafter for SGLang",
                seen=self.drafter,
                allowed="off, ngram, eagle or a checkpoint directory",
            )
        raw = json.loads(config.read_text(encoding="utf-8"))
        name = (raw.get("architectures") or ["(none)"])[0]
        if raw.get("norm_before_residual"):  # SGLang would serve it as if it were not there
            raise ConfigError(
                "SGLang's EAGLE-3 does not know norm_before_residual", seen=True, allowed=False
            )
        for ending, speculator in (("Eagle3", "eagle3"), ("Eagle", "eagle")):
            if name.endswith(ending):
                return speculator
        raise ConfigError(
            "the drafter's architecture is not served", seen=name, allowed="...Eagle, ...Eagle3"
        )

    @property
    def drafter_dir(self) -> str:
        """Directory of the drafter's checkpoint; empty when there is none."""
        return "" if self.drafter in WITHOUT_DIRECTORY else self.drafter

    @property
    def shared_with_target(self) -> tuple[str, ...]:
        """Names that never travel with a drafter."""
        return SHARED_WITH_TARGET.get(self.speculator, ())

    @property
    def arm_names(self) -> tuple[str, ...]:
        """Arms served; `off` is always the first."""
        arms = self.arms or DEFAULT_ARMS[self.speculator]
        return (OFF, *(arm for arm in arms if arm != OFF))
