"""Which drafters bring their trainer."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli.tinker import trained_drafter


@pytest.mark.parametrize(
    ("tree", "trained"),
    [
        ({}, ""),
        ({"gateway": {"drafter": "off"}}, ""),
        ({"gateway": {"drafter": "ngram"}}, ""),
        ({"gateway": {"drafter": "eagle"}}, "eagle"),
        ({"gateway": {"drafter": "dflash"}}, "dflash"),
        ({"gateway": {"drafter": "some/directory"}}, "some/directory"),
        ({"gateway": {"drafter": "eagle"}, "tinker": {"drafter_workers": 2}}, "eagle"),
        ({"gateway": {"drafter": "eagle"}, "tinker": {"drafter_workers": 0}}, ""),
    ],
)
def test_a_drafter_with_weights_is_trained_unless_no_worker_lends(
    tree: dict[str, Any], trained: str
) -> None:
    assert trained_drafter(tree) == trained
