"""What the drafter of an embedded engine may be called, and what a captured hidden row of the
engine holds.

Beside the package `embedded`, which imports torch: the gateway cuts its rings by this before any
engine lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.models.config import read_config_json
from paceline.models.inner_layers import (
    check_inner_layers,
    default_inner_layers,
    drafter_inner_layers,
)
from rollout_gateway.engines.nouns import RowLayout

WITHOUT_WEIGHTS = ("off", "ngram")
NAMES = (*WITHOUT_WEIGHTS, "eagle", "eagle3", "mlp", "lstm")


def drafter_directory(drafter: str) -> Path | None:
    """The checkpoint directory that a drafter's setting means; None for a name or a kind of the
    user's.

    A path with a slash is a directory, whether it exists or not, unless it is "file.py:KIND"; a
    name of NAMES never is.
    """
    if ".py:" in drafter:
        return None
    if "/" in drafter or (drafter not in NAMES and Path(drafter).is_dir()):
        return Path(drafter)
    return None


def layout_of_settings(settings: dict[str, Any]) -> RowLayout:
    """See `row_layout`; from the values of EmbeddedSpec."""
    drafters = (settings["drafter"], *settings["more_drafters"])
    return row_layout(Path(settings["model_dir"]), drafters, tuple(settings["capture_inner"]))


def row_layout(model_dir: Path, drafters: Sequence[str], asked: tuple[int, ...]) -> RowLayout:
    """Rows with the inner states `asked` for; when none are, with those that the drafters read.

    A kind by import path says nothing here: what it reads must be asked for. Raises ConfigError for
    layers the model does not have, and for asked ones that leave out what a drafter reads.
    """
    model = read_config_json(model_dir)
    hidden_size, num_layers = (
        int(model.get("hidden_size", 0)),
        int(model.get("num_hidden_layers", 0)),
    )
    needed = sorted({layer for drafter in drafters for layer in _read_by(drafter, num_layers)})
    check_inner_layers(asked, num_layers)
    if asked and not set(needed) <= set(asked):
        raise ConfigError(
            "gateway.features.layers leaves out what a drafter reads", seen=asked, allowed=needed
        )
    return RowLayout.entering(hidden_size, asked or tuple(needed))


def _read_by(drafter: str, num_layers: int) -> tuple[int, ...]:
    if drafter == "eagle3":
        return default_inner_layers(num_layers)
    directory = drafter_directory(drafter)
    return drafter_inner_layers(read_config_json(directory), num_layers) if directory else ()
