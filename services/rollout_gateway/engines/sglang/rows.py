"""What a captured hidden row of an SGLang engine holds. Imports no torch; the gateway cuts its rings by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from rollout_gateway.engines.base import RowLayout
from rollout_gateway.engines.sglang.spec import SGLangSpec

INNER_STATES = 3
"""States an EAGLE-3 drafter reads besides the last."""


def layout_of_settings(settings: dict[str, Any]) -> RowLayout:
    """See `row_layout`; from the values of SGLangSpec."""
    return row_layout(SGLangSpec(**settings))


def row_layout(spec: SGLangSpec) -> RowLayout:
    """What a row of this engine holds. Raises ConfigError for a model too shallow for EAGLE-3."""
    model = json.loads((Path(spec.model_dir) / "config.json").read_text(encoding="utf-8"))
    hidden_size, layers = int(model["hidden_size"]), int(model["num_hidden_layers"])
    if spec.speculator != "eagle3":
        return RowLayout.last(hidden_size)
    drafter = json.loads((Path(spec.drafter_dir) / "config.json").read_text(encoding="utf-8"))
    named = (drafter.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # The configuration names the layer a state leaves, a RowLayout the layer it enters.
    entered = [one + 1 for one in named] if named else [2, layers // 2, layers - 3]
    if len(entered) != INNER_STATES or entered != sorted(set(entered)) or not 0 < entered[0] <= entered[-1] < layers:
        raise ConfigError(
            "inner states of EAGLE-3", seen=entered, allowed=f"{INNER_STATES} ascending layers of {layers}"
        )
    return RowLayout((INNER_STATES + 1) * hidden_size, ",".join((*map(str, entered), "last")), "post_norm")


def inner_layers(rows: RowLayout) -> list[int]:
    """Layers whose input a row holds, without `last`."""
    return [int(name) for name in rows.layers.split(",") if name != "last"]
