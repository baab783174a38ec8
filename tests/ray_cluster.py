"""Starts a Ray cluster on loopback in another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray_nodes import TOKEN

from paceline.local.patience import patient

_HEAD = Path(__file__).with_name("ray_head.py")


@contextmanager
def ray_head() -> Iterator[str]:
    """The address of a cluster that ends with the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)  # equal in all tests, because Ray reads it once
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, str(_HEAD)]
        with subprocess.Popen(command, text=True, **pipes) as head:
            assert head.stdout is not None
            address = head.stdout.readline().strip()
            assert address
            yield address
            head.communicate("", timeout=patient(60))
