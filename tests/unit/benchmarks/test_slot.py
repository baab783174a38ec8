"""A slot is measured at the demo's width and at other widths."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import slot
from benchmarks.packing import DEMO
from paceline.errors import InvalidInput


def test_a_wider_drafter_has_more_heads_of_the_same_size() -> None:
    assert slot.widened(128) == DEMO
    wide = slot.widened(512)
    assert (wide.num_heads, wide.num_kv_heads, wide.head_dim) == (16, 8, 32)
    assert wide.intermediate_size == 4 * DEMO.intermediate_size
    assert slot.widened(96).num_kv_heads == 3


def test_a_width_that_heads_do_not_fill_is_refused() -> None:
    with pytest.raises(InvalidInput, match="multiple of 32"):
        slot.widened(100)


async def test_steps_and_their_products_are_told_at_another_width() -> None:
    result = await slot.run(argparse.Namespace(pairs=2, tokens=64, hidden=64))
    steps, alone, _ = result.rows
    assert float(alone["ms"]) > 0 < float(steps["ms"])
    assert result.title.endswith("width 64")
