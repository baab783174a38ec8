"""How many ranks an operator wants is remembered beside the checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import DataLoss
from paceline.services.policy_trainer.chosen_ranks import FILE, read_ranks, write_ranks


def test_a_chosen_number_takes_the_place_of_the_setting_until_that_changes(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert read_ranks(directory, 2) == 2
    write_ranks(directory, 3, 2)
    assert read_ranks(directory, 2) == 3
    assert read_ranks(directory, 4) == 4
    assert read_ranks(directory, 2, most=3) == 3
    assert read_ranks(directory, 2, most=2) == 2, "hosts have a place for each rank"


@pytest.mark.parametrize("text", ["", "3", "{}", '{"ranks": "many", "instead_of": 2}'])
def test_a_file_that_says_no_number_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DataLoss, match="does not say how many ranks"):
        read_ranks(tmp_path, 2)


def test_no_ranks_are_no_number(tmp_path: Path) -> None:
    write_ranks(tmp_path, 0, 2)
    with pytest.raises(DataLoss, match="seen: 0"):
        read_ranks(tmp_path, 2)
