"""The layout of captured hidden rows of the embedded engine.

This module does not import torch: the gateway allocates its rings by the layout before engines
start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.models.config import read_config_json
from paceline.models.inner_layers import check_inner_layers
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.speculators.kinds import inner_layers_read


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
    model = read_config_json(model_dir)
    hidden_size = int(model.get("hidden_size", 0))
    num_layers = int(model.get("num_hidden_layers", 0))
    needed = inner_layers_read(drafters, num_layers)
    check_inner_layers(asked, num_layers)
    if asked and not set(needed) <= set(asked):
        raise ConfigError(
            "gateway.features.layers leaves out what a drafter reads",
            seen=asked,
            allowed=list(needed),
        )
    return RowLayout.entering(hidden_size, asked or needed)
