"""Starts the programs of the examples as their READMEs describe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.local.patience import patient
from paceline.local.ports import free_port

ROOT = Path(__file__).parents[1]
READY_S = patient(60.0)
Serve = Callable[[str], str]
"""Starts the gateway of an example; yields its address."""


def run_example(
    script: str, *arguments: str, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs `python examples/<script> ...` from the repository's root."""
    command = [sys.executable, f"examples/{script}", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@contextmanager
def background(*words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `paceline <words>` in the repository's root; ends it by Ctrl-C after the block."""
    environment = dict(os.environ)
    environment.pop("REDIS_URL", None)
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=patient(30))
        finally:
            process.kill()


@contextmanager
def gateway(folder: Path, *words: str) -> Iterator[str]:
    """Runs `paceline serve gateway <words>` on a free port, with its files in `folder`; yields its
    address.
    """
    port, log = free_port(), folder / "gateway.log"
    ports = ("--http-port", str(port), "--grpc-port", "0")
    with background("serve", "gateway", *words, *ports, f'run.dir="{folder}"', log=log) as process:
        until_it_serves(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"


def until_it_serves(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a gateway's health."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    pytest.fail(f"no gateway at {url}:\n{log.read_text()}")
