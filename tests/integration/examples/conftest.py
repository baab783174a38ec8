"""Fixture: a gateway of an example for the duration of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from example_runs import Serve, gateway


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve("<example>")` starts its gateway on a free port and returns its address."""
    with ExitStack() as stack:

        def start(example: str) -> str:
            settings = f"examples/{example}/serve.toml"
            return stack.enter_context(gateway(tmp_path, "--config", settings))

        yield start
