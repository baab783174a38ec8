"""A whole run under Tilt if Tilt is installed, else under a stand-in that executes the Tiltfile."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from demo_runs import SMALL
from tilt_stand_in import ROOT, TiltCi, resources_of

from paceline.cli.run_files import parse_override
from paceline.config.load import merge, read_tables, write_tables
from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUN_S = 240.0


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps at the Tiltfile's default addresses."""
    monkeypatch.delenv("REDIS_URL", raising=False)
    tree = read_tables(ROOT / "examples/demo/demo.toml")
    for word in (*SMALL, "coordinator.steps=2", f"run.dir={tmp_path}/run", "run.id=tilt"):
        merge(tree, parse_override(word))
    merge(tree, {"telemetry": {"spans_dir": f"{tmp_path}/run/spans"}})
    write_tables(tmp_path / "settings.toml", tree)
    return tmp_path / "settings.toml"


def report_of(settings: Path) -> subprocess.CompletedProcess[str]:
    """Output of the report button."""
    command = resources_of({"config": str(settings)})["report"]["cmd"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patient(120), check=False
    )


def test_every_resource_becomes_ready_and_a_run_that_ends_is_no_error(
    settings: Path, tmp_path: Path
) -> None:
    resources = resources_of({"config": str(settings)})
    tilt = TiltCi(resources, tmp_path, patient(RUN_S))
    tilt.run()
    assert tilt.ready[-1] == "coordinator"
    assert len(tilt.ready) == 6
    assert "run finished" in tilt.log("coordinator")
    said = report_of(settings)
    assert said.returncode == 0, said.stderr
    assert "2 steps" in said.stdout + said.stderr
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.skipif(shutil.which("tilt") is None, reason="there is no tilt on PATH")
def test_tilt_itself_says_that_the_run_succeeded(settings: Path) -> None:
    quiet = {**os.environ, "TILT_DISABLE_ANALYTICS": "1"}
    words = ("--web-mode=prod", "--host", "127.0.0.1", "--port", "0", "--timeout", "10m")
    done = subprocess.run(
        ["tilt", "ci", *words, "-f", str(ROOT / "Tiltfile"), "--", f"--config={settings}"],
        cwd=ROOT,
        env=quiet,
        capture_output=True,
        text=True,
        timeout=patient(RUN_S),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "run finished" in done.stdout
    assert report_of(settings).returncode == 0
