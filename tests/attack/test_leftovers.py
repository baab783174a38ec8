"""The next start removes the leftovers of a killed gateway and keeps the files of a living one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from integration.gateway.conftest import sums, tiny_model

from examples.scripted_engine.engine import SCRIPTED_PATH
from paceline.local.patience import patient

SOCKETS = 2
"""Sockets of a gateway with two workers: a socket for each worker."""
pytestmark = [pytest.mark.attack, pytest.mark.timeout(120)]

GATEWAY = """
import asyncio, json, sys
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.gateway import Gateway

CODE = "import time; open('begun', 'w').close(); time.sleep(99)"

async def main():
    gateway = Gateway(GatewayConfig.model_validate(json.loads(sys.argv[1])))
    await gateway.start()
    running = asyncio.create_task(gateway.equipment.sandbox.run(CODE))
    print("serves", flush=True)
    await running

asyncio.run(main())
"""
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A separate folder for temporary files, with a short path because socket paths are limited."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, temporary: Path, redis_url: str) -> Iterator[Start]:
    """Starts a gateway with two workers and row rings, which runs code in a sandbox."""
    model = tiny_model(tmp_path / "model")
    script = tmp_path / "script.json"
    script.write_text(json.dumps(sums(model)))
    gateways = []

    def start(name: str) -> subprocess.Popen[str]:
        settings = {
            "run": {"id": name, "dir": str(tmp_path / name)},
            "model": str(model),
            "trajectories": True,
            "redis": {"durable_url": redis_url, "features_url": redis_url},
            "engine": {"kind": SCRIPTED_PATH, "workers": 2, "options": {"file": str(script)}},
            "rewards": {"sandbox": {"wall_s": 100, "isolation": "limits"}},
            "spool_dir": "",
        }
        environment = {**os.environ, "TMPDIR": str(temporary)}
        gateway = subprocess.Popen(
            [sys.executable, "-c", GATEWAY, json.dumps(settings)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        gateways.append(gateway)
        assert gateway.stdout is not None
        assert "serves\n" in gateway.stdout  # after the sandbox's log lines
        return gateway

    yield start
    for gateway in gateways:
        with gateway:
            gateway.kill()


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_socket() or not path.is_dir()}


def ours_in_shared_memory() -> set[Path]:
    """Files of gateways in shared memory, by name; SGLang and Ray of other tests add and remove
    theirs.
    """
    there = Path("/dev/shm")
    return {one for name in ("paceline*", "torch_*", "psm_*") for one in there.glob(name)}


def boxes_below(folder: Path) -> set[Path]:
    """Boxes of programs that have begun."""
    return {path.parent for path in folder.rglob("box-*/begun")}


def when_it_runs_code(gateway: subprocess.Popen[str], folder: Path, before: set[Path]) -> set[Path]:
    """Waits until the gateway's sandbox runs a program; returns its boxes."""
    end = time.monotonic() + patient(30)
    while time.monotonic() < end:
        if boxes := boxes_below(folder) - before:
            return boxes
        assert gateway.poll() is None
        time.sleep(0.02)
    raise AssertionError("no sandbox ran")


def killed_at_once(gateway: subprocess.Popen[str]) -> None:
    """Kills like a machine's OOM killer or a batch system: no process of the gateway cleans up."""
    family = [*psutil.Process(gateway.pid).children(recursive=True), psutil.Process(gateway.pid)]
    for process in family:
        process.suspend()
    for process in family:
        process.kill()
    gateway.wait()
    psutil.wait_procs(family, timeout=patient(10))


def test_all_that_a_killed_gateway_left_is_swept_and_nothing_of_a_living_one(
    start: Start, temporary: Path
) -> None:
    shared = ours_in_shared_memory()
    neighbour = start("neighbour")
    boxes = when_it_runs_code(neighbour, temporary, set())
    living = files_below(temporary)
    assert len([path for path in living if path.is_socket()]) == SOCKETS

    first = start("first")
    left = when_it_runs_code(first, temporary, boxes) | (files_below(temporary) - living)
    assert len([path for path in left if path.is_socket()]) == SOCKETS
    killed_at_once(first)
    assert any(path.exists() for path in left)

    second = start("second")
    when_it_runs_code(second, temporary, boxes | left)
    assert [path for path in left if path.exists()] == []
    assert [path for path in (*boxes, *living) if not path.exists()] == []
    assert [one for one in ours_in_shared_memory() if one not in shared] == []
    assert {path.name.rpartition("-")[0] for path in temporary.iterdir()} <= {
        "paceline",
        "paceline-boxes",
    }
