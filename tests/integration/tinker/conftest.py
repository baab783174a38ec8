"""The whole service behind `paceline serve tinker`, with the public SDK as its client.

The SDK is not changed: it gets the URL and the key that the command prints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.local.patience import patient
from paceline.local.ports import free_ports

MODEL = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
START_S, STOP_S = 120, 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder without the SDK."""
    try:
        import tinker  # noqa: F401
    except ImportError:
        missing = pytest.mark.skip(reason="the SDK is missing: pip install 'paceline[tinker]'")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(missing)


@dataclass
class Served:
    """The running service."""

    url: str
    key: str
    directory: Path
    process: subprocess.Popen[str]


def started(directory: Path, model: Path = MODEL, **settings: object) -> Served:
    """Starts the service and waits for the lines with its URL and key."""
    keys = ("gateway", "http", "policy_trainer", "tinker", "tinker_http")
    ports = {
        f"addresses.{key}": f"127.0.0.1:{port}"
        for key, port in zip(keys, free_ports(5), strict=True)
    }
    given: dict[str, object] = {
        **ports,
        "run.dir": directory,
        "run.id": "tinker",
        "gateway.engine.workers": 1,
        "gateway.engine.max_batch": 16,
        "policy_trainer.ranks": 2,
        **settings,
    }
    words = [f"{key}={value}" for key, value in given.items()]
    command = [sys.executable, "-m", "paceline.cli", "serve", "tinker", "--model", str(model)]
    process = subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("export TINKER_API_KEY="):
            break
    else:
        raise AssertionError("".join(lines))
    token = (directory / "tokens" / "operator").read_text().strip()
    url = next(line for line in lines if "TINKER_BASE_URL=" in line).partition("=")[2].strip()
    return Served(url, f"tml-{token}", directory, process)


def stopped(served: Served) -> None:
    """Stops the service and waits for its end."""
    served.process.send_signal(signal.SIGTERM)
    served.process.wait(patient(STOP_S))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One service for the tests of a file. It ends with them: other files count ranks."""
    found = started(tmp_path_factory.mktemp("tinker") / "run")
    try:
        yield found
    finally:
        stopped(found)


@pytest.fixture
def client_of(served: Served) -> Iterator[Callable[[], Any]]:
    """Opens sessions of the SDK, which end with the test."""
    import tinker

    os.environ["TINKER_TELEMETRY"] = "1"
    opened = []

    def open_one() -> Any:
        opened.append(tinker.ServiceClient(base_url=served.url, api_key=served.key))
        return opened[-1]

    yield open_one
    for client in opened:
        client.close("success").result()


@pytest.fixture
def client(client_of: Callable[[], Any]) -> Any:
    """A session of the SDK."""
    return client_of()
