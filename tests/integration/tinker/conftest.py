"""The whole service behind `paceline serve tinker`, with the public SDK as its client.

The SDK is not changed: it gets the URL and the key that the command prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tinker_loop import TinkerServer, started, stopped

ONE_WORKER = {"gateway.engine.workers": 1, "gateway.engine.max_batch": 16}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder without the SDK."""
    try:
        import tinker  # noqa: F401
    except ImportError:
        missing = pytest.mark.skip(reason="the SDK is missing: pip install 'paceline[tinker]'")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(missing)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    """One service for the tests of a file. It ends with them: other files count ranks."""
    found = started(tmp_path_factory.mktemp("tinker") / "run", **ONE_WORKER)
    try:
        yield found
    finally:
        stopped(found)


@pytest.fixture
def client_of(served: TinkerServer) -> Iterator[Callable[[], Any]]:
    """Opens sessions of the SDK, which end with the test."""
    import tinker

    os.environ["TINKER_TELEMETRY"] = "0"  # the SDK leaves its connection for telemetry open
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
