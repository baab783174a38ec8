"""Selects the decoder layers that provide a drafter's input states, without torch.

It covers EAGLE-3's rule, which is also the default of DFlash drafters here, and the layers in both
kinds of checkpoint. A layer is named by the residual stream that enters it (speculators/base.py,
CaptureSpec). A checkpoint's config.json names the layer before, one less.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from paceline.errors import ConfigError

INNER_STATES = 3
"""States that an EAGLE-3 drafter reads besides the last."""
SHALLOWEST = INNER_STATES + 1
"""Least number of target layers, since nothing is read before the first one."""


def default_inner_layers(num_layers: int, drafter: str = "EAGLE-3") -> tuple[int, int, int]:
    """Layers 2, L // 2 and L - 3 (Li et al. 2025, arXiv 2503.01840, as released: low, middle and
    high).

    Below seven layers these do not ascend, and the nearest three ascending layers of 1 .. L - 1 are
    used. Raises ConfigError naming the drafter for fewer than four layers.
    """
    if num_layers < SHALLOWEST:
        raise ConfigError(
            f"the target is too shallow for {drafter}",
            seen=num_layers,
            allowed=f">= {SHALLOWEST} layers",
        )

    low, middle, high = 2, num_layers // 2, num_layers - 3
    if low < middle < high:
        return low, middle, high
    triples = combinations(range(1, num_layers), 3)
    return min(
        triples, key=lambda one: abs(one[0] - low) + abs(one[1] - middle) + abs(one[2] - high)
    )


def inner_layers(num_layers: int, chosen: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Layers that an EAGLE-3 drafter reads, ascending: the chosen layers, else the rule's.

    Raises ConfigError below four layers, and unless the choice is three ascending layers of the
    target.
    """
    if not chosen:
        return default_inner_layers(num_layers)
    if len(chosen) != INNER_STATES:
        raise ConfigError("inner states of EAGLE-3", seen=chosen, allowed=f"{INNER_STATES} layers")
    check_inner_layers(chosen, num_layers)
    return chosen


def eagle3_inner_layers(config_json: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of a target with `num_layers` that the EAGLE-3 drafter of a config.json reads.

    Raises ConfigError as `inner_layers`, and for a value that is no list of layers.
    """
    left = (config_json.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
    if not isinstance(left, list) or any(type(one) is not int for one in left):
        raise ConfigError("inner states of EAGLE-3", seen=left, allowed="a list of layers")
    return inner_layers(num_layers, tuple(layer + 1 for layer in left))


def dflash_inner_layers(config_json: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of a target with `num_layers` that the DFlash drafter of a config.json reads.

    These are all the layers in its config, by default EAGLE-3's, so that both learn from the same
    rows. Raises ConfigError for a target too shallow for the default. Raises it also for a value
    that is no list of layers, and for layers that the target lacks.
    """
    inside = config_json.get("dflash_config") or {}
    left = inside.get("target_layer_ids", config_json.get("target_layer_ids"))
    if left is None:
        return default_inner_layers(num_layers, "DFlash")
    if not isinstance(left, list) or not left or any(type(one) is not int for one in left):
        raise ConfigError("target_layer_ids of DFlash", seen=left, allowed="a list of layers")
    layers = tuple(layer + 1 for layer in left)
    check_inner_layers(layers, num_layers)
    return layers


def check_inner_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Raises ConfigError unless the layers ascend within 1 .. num_layers - 1."""
    if layers != tuple(sorted(set(layers))) or (
        layers and not 0 < layers[0] <= layers[-1] < num_layers
    ):
        raise ConfigError(
            "inner states", seen=layers, allowed=f"ascending layers of 1 to {num_layers - 1}"
        )
