"""A copy of the checkout in which the tests follow a recipe of CONTRIBUTING.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from paceline.local.patience import patient
from paceline.local.ports import free_ports

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "demo" / "policy_start"
CLI = "from paceline.cli.main import app; app()"


@dataclass(frozen=True)
class Change:
    """One change of a recipe: a new file, or a line before `before` in an existing file."""

    path: str
    text: str
    before: str = ""


def places(changes: Sequence[Change]) -> int:
    """Files that a recipe changes."""
    return len({one.path for one in changes})


class Checkout:
    """The copy: links to the code, with the changed files replaced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("libs", "services", "examples/scripted_engine"):
            shutil.copytree(
                ROOT / folder,
                root / folder,
                copy_function=os.symlink,
                symlinks=True,  # libs/paceline/services leads to the copy of services
                ignore=shutil.ignore_patterns("__pycache__"),
            )

    def change(self, changes: Sequence[Change]) -> None:
        """Applies a recipe; every `before` has to occur once."""
        for one in changes:
            path = self.root / one.path
            text = one.text
            if one.before:
                old = path.read_text()
                assert old.count(one.before) == 1, f"{one.path}: {one.before!r}"
                text = old.replace(one.before, one.text + one.before)
                path.unlink()  # a link: the original file stays unchanged
            assert not path.exists(), one.path
            path.write_text(text)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of processes that import this copy, and modules beside it."""
        folders = (self.root / "libs", self.root)
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}

    def python(self, code: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a program in this copy."""
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.root,
            timeout=patient(60),
        )

    @contextmanager
    def gateway(self, *words: str) -> Iterator[tuple[httpx.Client, str]]:
        """`paceline serve gateway` as a process; yields its HTTP API and its gRPC address."""
        http, grpc = free_ports(2)
        command = ["serve", "gateway", "--no-token", "--model", str(MODEL)]
        command += ["--http-port", str(http)]
        with (self.root / "gateway.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", CLI, *command, "--grpc-port", str(grpc), *words],
                env=self.environment,
                cwd=self.root,
                stdout=log,
                stderr=log,
            )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=patient(20)) as client:
                self._wait(process, client)
                yield client, f"127.0.0.1:{grpc}"
        finally:
            process.terminate()
            process.wait(patient(30))

    def _wait(self, process: subprocess.Popen[bytes], client: httpx.Client) -> None:
        until = time.monotonic() + patient(60)
        while True:
            try:
                if client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            log = (self.root / "gateway.log").read_text()[-2000:]
            assert process.poll() is None, log
            assert time.monotonic() < until, log
            time.sleep(0.05)
