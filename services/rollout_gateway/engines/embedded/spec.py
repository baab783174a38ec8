"""Names the settings of the embedded engine.

Imports no torch, so that the gateway can check them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from paceline.config import Config
from paceline.errors import InvalidInput
from paceline.models.profiles import check_profile
from paceline.services.rollout_gateway.engines.settings import ModelSpec


def _checked(value: str) -> str:
    try:
        return check_profile(value)
    except InvalidInput as error:  # pydantic adds where the setting stands
        raise ValueError(str(error)) from error


class EmbeddedConfig(Config):
    """What only the embedded engine has."""

    more_drafters: tuple[str, ...] = ()
    """Trained kinds besides gateway.drafter of which a version may be committed; one serves at a
    time.
    """
    profile: Annotated[str, AfterValidator(_checked)] = ""
    """Round the layers' matrices to eight bits, every version at its Prepare: "int8" | "int8_w8a8"
    | "fp8_channel" | "fp8_tensor" (models/profiles.py); "": they stay in `dtype`. The first two
    need the extra `int8`. Draws follow the rounded weights: the same seed gives the same tokens in
    float32, unless int8_w8a8 rounds an activation between two numbers; in bfloat16 tokens may
    differ between batch shapes.
    """
    memory_saver: bool = False
    """Free keys, values and the policy's weights while a worker's slot is lent out; the weights are
    read again from their files. Else nothing is freed: fresh pages cost a small model's step more.
    """
    prefix_slots: int = Field(default=32, ge=0)
    """Ended requests kept for prompts that begin alike, each as large as a running one; 0: no
    reuse.
    """
    answer_versions: int = Field(default=128, ge=0)
    """Policy versions after which the n-gram drafter forgets an answer to a prompt: a prompt comes
    again an epoch later, some 30 to 100 versions in sets of 7,500 to 12,000 tasks; 0: only answers
    of the serving policy draft.
    """
    verify_budget: bool = True
    """Verify only drafts likely enough to pay; false: every draft of the arm."""
    verification: Literal["same_draw", "rejection"] = "same_draw"
    """How drafts are accepted. "same_draw": a seed's tokens do not depend on drafts. "rejection":
    chains drawn from the drafter, accepted with min(1, p/q): more is accepted at high temperatures,
    and a seed's tokens depend on the arm.
    """


class EmbeddedSpec(EmbeddedConfig, ModelSpec):
    """What one engine serves and how."""

    prefix_tokens: int = Field(default=64, ge=16)
    """An ended request with fewer tokens is not kept."""
    capture_inner: tuple[int, ...] = ()
    """Ascending layers whose input is kept and captured beside the last state; empty: what
    `drafter` and `more_drafters` read. A kind by import path does not say what it reads before it
    is loaded.
    """
    rejected_rows: bool = False
    """Rows of rejected drafts as well, a few per request and round."""
