"""Copies of the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes.checkout import Checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")
