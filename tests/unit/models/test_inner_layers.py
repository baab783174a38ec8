"""The inner states that EAGLE-3 reads: the default rule, and the layers that checkpoints name."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.speculators.kinds import (
    check_inner_layers,
    default_inner_layers,
    eagle3_inner_layers,
)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (4, (1, 2, 3)),
        (5, (1, 2, 3)),
        (6, (2, 3, 4)),
        (7, (2, 3, 4)),
        (8, (2, 4, 5)),
        (28, (2, 14, 25)),
    ],
)
def test_low_middle_and_high_layers_are_read(layers: int, expected: tuple[int, ...]) -> None:
    assert default_inner_layers(layers) == expected


@pytest.mark.parametrize("layers", [4, 5, 6, 7, 12, 61, 126])
def test_the_three_layers_are_ascending_layers_of_the_target(layers: int) -> None:
    low, middle, high = default_inner_layers(layers)
    assert 0 < low < middle < high < layers


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_fewer_than_four_layers_are_refused(layers: int) -> None:
    with pytest.raises(ConfigError, match="too shallow"):
        default_inner_layers(layers)


def test_a_checkpoint_names_the_layers_its_states_leave() -> None:
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 6, 20]}}
    assert eagle3_inner_layers(named, 28) == (1, 7, 21)
    assert (
        eagle3_inner_layers({}, 28)
        == eagle3_inner_layers({"eagle_config": None}, 28)
        == (2, 14, 25)
    )


@pytest.mark.parametrize("named", [[1, 2], [0, 6, 27], [6, 0, 20], [-1, 6, 20], [6, 6, 20]])
def test_wrong_layers_of_a_checkpoint_are_refused(named: list[int]) -> None:
    with pytest.raises(ConfigError, match="inner states"):
        eagle3_inner_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": named}}, 28)


def test_layers_to_capture_ascend_within_the_target() -> None:
    check_inner_layers((), 4)
    check_inner_layers((1, 3), 4)
    for wrong in ((0, 2), (2, 2), (3, 1), (4,)):
        with pytest.raises(ConfigError, match="1 to 3"):
            check_inner_layers(wrong, 4)
