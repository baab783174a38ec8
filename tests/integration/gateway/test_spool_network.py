"""Hosts of a network copy a version from each other: what each sends, by its interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.test_worker_hosts import words
from net_hosts import NETWORK, WITH_NAMESPACES, Host, hosts

from paceline.local.patience import patient

pytestmark = [WITH_NAMESPACES, pytest.mark.network, pytest.mark.timeout(300)]
ADDRESS = f"{NETWORK}.1:7401"
MIB = 32
PUSH = Path(__file__).parents[2] / "push_version.py"
GATEWAY = "paceline.services.rollout_gateway"


def settings(model: Path, fan_out: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "addresses": {"gateway": ADDRESS, "http": "127.0.0.1:0"},
        "spool_dir": str(model.parent / "spool"),
        "security": {"allow_insecure": True},
        "engine": {
            "kind": "scripted",
            "script": str(model.parent / "script.json"),
            "workers": 0,
            "hosts": (1, 1, 1, 1),
            "shared_spool": False,
            "copies_fan_out": fan_out,
        },
    }


@contextmanager
def running(host: Host, *command: str) -> Iterator[None]:
    process = subprocess.Popen([*host.within, sys.executable, "-m", *command])
    try:
        yield
    finally:
        process.terminate()
        process.wait(patient(60))


def sent_bytes(host: Host) -> int:
    command = [*host.within, "ip", "-s", "-j", "link", "show", "eth0"]
    found = subprocess.run(command, check=True, capture_output=True, timeout=patient(20))
    return int(json.loads(found.stdout)[0]["stats64"]["tx"]["bytes"])


@pytest.mark.parametrize(
    ("fan_out", "copies"), [(0, [3, 0, 0, 0]), (1, [1, 1, 1, 0]), (2, [2, 1, 0, 0])]
)
def test_a_host_sends_a_version_to_as_many_as_copy_from_it(
    model_dir: Path,
    script: dict[str, Any],
    fan_out: int,
    copies: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "of-a-network-that-tests-make-here")
    (model_dir.parent / "script.json").write_text(json.dumps(script))
    given = list(words(settings(model_dir, fan_out)))
    paths = os.pathsep.join([str(PUSH.parent), *sys.path])
    with hosts(4) as made, ExitStack() as stack:
        gateway, *others = made
        stack.enter_context(running(gateway, GATEWAY, *given))
        for number, host in enumerate(others, start=1):
            command = (f"{GATEWAY}.worker_host", "--host", str(number), *given)
            stack.enter_context(running(host, *command))
        before = [sent_bytes(host) for host in made]
        push = [*gateway.within, sys.executable, str(PUSH), ADDRESS, "4", str(MIB)]
        environment = {**os.environ, "PYTHONPATH": paths}
        subprocess.run(push, check=True, env=environment, timeout=patient(120))
        sent = [sent_bytes(host) - start for host, start in zip(made, before, strict=True)]
    assert [round(size / (MIB << 20), 1) for size in sent] == pytest.approx(copies, abs=0.1)
