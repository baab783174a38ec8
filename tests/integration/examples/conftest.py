"""Fixture: a gateway of an example for the duration of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from example_runs import Serve, background, until_it_serves

from paceline.local.ports import free_port


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve("<example>")` starts its gateway on a free port and returns its address."""
    with ExitStack() as stack:

        def start(example: str) -> str:
            port, log = free_port(), tmp_path / "gateway.log"
            words = [
                "serve",
                "gateway",
                "--config",
                f"examples/{example}/serve.toml",
                "--http-port",
                str(port),
            ]
            words += ["--grpc-port", "0", f'run.dir="{tmp_path}"']
            process = stack.enter_context(background(*words, log=log))
            until_it_serves(f"http://127.0.0.1:{port}", process, log)
            return f"http://127.0.0.1:{port}"

        yield start
