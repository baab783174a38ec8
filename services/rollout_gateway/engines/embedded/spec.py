"""Settings of the embedded engine. Imports no torch, so that the gateway can check them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_gateway.bandits import BanditSettings


class EmbeddedSpec(BaseModel):
    """What one engine serves and how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: str  # Hugging Face checkpoint directory
    # "off" | "ngram" | a trained kind, fresh from the seed: a name of SPECULATORS or
    # "package.module:KIND" | directory of a drafter's checkpoint
    drafter: str = "ngram"
    more_drafters: tuple[
        str, ...
    ] = ()  # kinds of which a version may be committed later; one kind serves at a time
    # Ascending layers whose input is kept and captured beside the last state; empty: what `drafter`
    # and `more_drafters` read. A kind by import path does not say what it reads before it is
    # loaded.
    capture_inner: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Of the layers' matrices, every version at its Prepare (models/int8.py). int8 needs the extra
    # `int8`. Draws follow the rounded weights: same seed, same tokens holds in float32 as without
    # it, in bfloat16 not between batch shapes.
    quantize: Literal["", "int8"] = ""
    # torch.compile of each layer after its attention (models/compiled.py): 10-30 s at the first
    # steps, a C++ compiler, and on the CPU measured no gain. Never the default.
    compile: bool = False
    threads: int = Field(1, ge=1)
    max_batch: int = Field(64, ge=1)  # requests decoding at once
    max_sequence_tokens: int = Field(512, ge=2)  # prompt and response; at most the model's context
    prefix_slots: int = Field(
        32, ge=0
    )  # ended requests kept for prompts that begin alike; 0: no reuse
    prefix_tokens: int = Field(64, ge=16)  # an ended request with fewer is not kept
    prefill_tokens: int = Field(2048, ge=1)  # prompt tokens of one round, padding included
    arms: tuple[str, ...] = ()  # empty: those of the kinds, engines/embedded/kinds.py
    speculate_rows: int = Field(
        0, ge=0
    )  # above so many rows nothing is drafted; 0: the bandit alone decides
    verify_budget: bool = (
        True  # verify only drafts likely enough to pay; false: every draft of the arm
    )
    # "same_draw": a seed's tokens do not depend on drafts. "rejection": chains drawn from the
    # drafter, accepted with min(1, p/q): more is accepted at high temperatures, and a seed's tokens
    # depend on the arm.
    verification: Literal["same_draw", "rejection"] = "same_draw"
    bandit: BanditSettings = Field(default_factory=BanditSettings)
    seed: int = 0
    features_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of captured hidden rows
    rejected_rows: bool = False  # rows of rejected drafts as well, a few per request and round
    seq: int = 0  # version set served from the start
    policy_version: int = 0
    drafter_version: int = 0
    policy_path: str = ""  # spooled weights of policy_version; empty: those of model_dir
    drafter_path: str = (
        ""  # spooled version drafter_version, of any kind; empty: what `drafter` says
    )
