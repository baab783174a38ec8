"""Settings of the embedded engine, and the layout of its hidden rows.

This module does not import torch: the gateway checks settings, and allocates its rings by the
layout, before engines start.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from paceline.config import Config
from paceline.errors import ConfigError, InvalidInput
from paceline.models import config, profiles
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.settings import ModelSpec
from paceline.speculators.kinds import check_inner_layers, inner_layers_read


def _checked(value: str) -> str:
    try:
        return profiles.check_profile(value)
    except InvalidInput as error:  # pydantic adds the setting's path
        raise ValueError(str(error)) from error


class EmbeddedConfig(Config):
    """Settings of the embedded engine."""

    more_drafters: tuple[str, ...] = ()
    """Trained kinds with committable versions besides gateway.drafter; one kind serves at a time.
    """
    profile: Annotated[str, AfterValidator(_checked)] = ""
    """Number format of the layers' matrices: "int8" | "int8_w8a8" | "fp8_channel" | "fp8_tensor"
    (models/profiles.py), or "" for `dtype`. Every version is rounded at its Prepare. The first two
    need the extra `int8`. A seed still gives the same tokens in float32, except where int8_w8a8
    rounds an activation between two numbers. In bfloat16 tokens may depend on batch shapes.
    """
    memory_saver: bool = False
    """Whether keys, values and the policy's weights are freed while a worker's slot is lent.
    Weights are then read again from their files. For small models, fresh memory pages cost more
    than this saves.
    """
    prefix_slots: int = Field(default=32, ge=0)
    """Maximum number of ended requests kept for prompts with the same beginning; 0: none."""
    prefix_bytes: int = Field(default=512 << 20, ge=0)
    """Maximum memory of the ended requests that are kept, bytes."""
    answer_versions: int = Field(default=128, ge=0)
    """Policy versions for which the n-gram drafter keeps an answer. A prompt returns after an
    epoch, 30 to 100 versions for 7,500 to 12,000 tasks. 0: only answers of the serving policy.
    """


class EmbeddedSpec(EmbeddedConfig, ModelSpec):
    """Inputs for building an embedded engine."""

    prefix_tokens: int = Field(default=64, ge=16)
    """An ended request with fewer tokens is not kept."""
    verify_budget: bool = True
    """Whether unlikely drafts are left out of the verification; false: every draft of the arm is
    verified.
    """
    capture_inner: tuple[int, ...] = ()
    """Ascending layers with their input kept and captured beside the last state; empty: the layers
    that `drafter` and `more_drafters` read. The layers of a kind by import path are unknown before
    it is loaded.
    """


def layout_of_settings(settings: dict[str, Any]) -> RowLayout:
    """The layout for the values of EmbeddedSpec; see `row_layout`."""
    drafters = (settings["drafter"], *settings["more_drafters"])
    return row_layout(Path(settings["model_dir"]), drafters, tuple(settings["capture_inner"]))


def row_layout(model_dir: Path, drafters: Sequence[str], asked: tuple[int, ...]) -> RowLayout:
    """Rows with the requested inner states; without a request, with the states that the drafters
    read.

    Raises ConfigError for an unknown drafter, for layers that the model does not have, and for
    requested layers that omit a layer read by a drafter.
    """
    model = config.read_config_json(model_dir)
    hidden_size = int(model.get("hidden_size", 0))
    num_layers = int(model.get("num_hidden_layers", 0))
    needed = inner_layers_read(drafters, num_layers)
    check_inner_layers(asked, num_layers)
    if asked and not set(needed) <= set(asked):
        message = "gateway.features.layers leaves out what a drafter reads"
        raise ConfigError(message, seen=asked, allowed=list(needed))
    return RowLayout.entering(hidden_size, asked or needed)
