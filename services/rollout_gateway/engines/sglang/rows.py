"""Describes the contents of a captured hidden row of an SGLang engine.

The gateway sizes its row rings by this layout. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.arm_names import OFF
from paceline.errors import ConfigError
from paceline.models.config import read_config_json
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec
from paceline.speculators.kinds import SPECULATORS

SHALLOWEST = 7
"""Fewest layers L at which SGLang's default layers 2, L // 2 and L - 3 ascend. For a shallower
model the drafter's config.json must name the layers.
"""


def layout_of_settings(settings: dict[str, Any]) -> RowLayout:
    """Row layout from the values of SGLangSpec; see `row_layout`."""
    return row_layout(SGLangSpec(**settings))


def row_layout(spec: SGLangSpec) -> RowLayout:
    """Layout of one hidden row of this engine.

    Raises ConfigError for a model that is too shallow for EAGLE-3.
    """
    model = read_config_json(Path(spec.model_dir))
    hidden_size, layers = int(model["hidden_size"]), int(model["num_hidden_layers"])
    if spec.speculator == OFF:
        return RowLayout.last(hidden_size)
    drafter = read_config_json(Path(spec.drafter_dir)) if spec.drafter_dir else {}
    inner = SPECULATORS[spec.speculator].inner_layers(drafter, layers)
    if (
        inner
        and spec.drafter_dir  # a newly initialized drafter names its layers
        and layers < SHALLOWEST
        and not (drafter.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ):
        raise ConfigError(
            "EAGLE-3 in SGLang: the model is too shallow",
            seen=layers,
            allowed=f">= {SHALLOWEST} layers",
        )

    return RowLayout.entering(hidden_size, inner)
