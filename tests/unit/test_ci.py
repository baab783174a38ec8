"""The scripts that decide whether a change may land."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.config import CoordinatorConfig
from paceline.config import known_keys

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("failing", "code", "closing"),
    [
        ("nothing", 0, "test: PASSED"),
        ("--ignore=tests/unit", 1, "test: FAILED in N s: [processes and contracts]"),
        ("worksteal", 1, "test: FAILED in N s: [unit]"),
        ("pytest", 1, "test: FAILED in N s: [processes and contracts] [unit]"),
    ],
)
def test_both_parts_run_and_the_last_line_names_those_that_failed(
    failing: str, code: int, closing: str, tmp_path: Path
) -> None:
    """Over a Python that writes down its arguments and fails where one of them fits."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/test", tmp_path / ".ci/test")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/usr/bin/env bash\necho "$@" >> calls\nfor one; do [ "$one" = {failing} ] && exit 1; done; exit 0\n'
    )
    python.chmod(0o755)
    done = subprocess.run([tmp_path / ".ci/test"], capture_output=True, text=True, check=False)
    assert done.returncode == code
    last = re.sub(r"in \d+ s", "in N s", done.stdout.splitlines()[-1])
    assert last.startswith(closing)
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert "--ignore=tests/unit" in first
    assert "tests/unit" in second.split()


def test_the_page_of_settings_has_every_key_once_with_its_range(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / ".ci/docs", tmp_path], check=True, capture_output=True)
    section, rows = "", {}
    for line in (tmp_path / "settings.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            key, *cells = (cell.strip().strip("`") for cell in line.strip("|").split(" | "))
            assert rows.setdefault(f"{section}.{key}", cells) is cells
    shared = ("run.", "redis.", "telemetry.", "security.", "addresses.")
    known = known_keys(CoordinatorConfig)
    own = {f"coordinator.{key}" for key in known if not key.startswith(shared)}
    assert {key for key in rows if key.startswith("coordinator.")} == own
    assert {key for key in rows if key.startswith(shared)} == set(known) & {
        key for key in known if key.startswith(shared)
    }
    assert rows["coordinator.sampling.temperature"][:3] == ["float", "1.0", "> 0, <= 10"]
    assert rows["run.seed"][:3] == ["integer", "0", ">= 0, < 2^63"]


def refused(statement: str, folder: str) -> str:
    """What ruff says under the project's rules to a statement in a module of that folder."""
    command = [ROOT / ".venv/bin/ruff", "check", "--quiet", "--output-format=concise"]
    done = subprocess.run(
        [*command, "--select=S,TID251", f"--stdin-filename={folder}/planted.py", "-"],
        input=f"{statement}\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "folder", ["libs/paceline", "services/coordinator", "benchmarks", "examples"]
)
@pytest.mark.parametrize(
    "statement",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal",
        "import shelve",
        "import dill",
        "import cloudpickle",
        "import joblib",
        "from multiprocessing.connection import Client",
        "import torch; torch.load('x')",
        "import torch; torch.load('x', weights_only=False)",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "import yaml; yaml.load('x')",
        "import yaml; yaml.load('x', Loader=yaml.Loader)",
        "import torch.distributed as dist; dist.broadcast_object_list([])",
        "import torch.distributed as dist; dist.all_gather_object([], 1)",
        "from torch.distributed.checkpoint.state_dict_loader import load",
        "import torch.distributed.checkpoint as dcp; dcp.load({})",
    ],
)
def test_what_runs_code_when_it_decodes_may_not_land(statement: str, folder: str) -> None:
    assert "TID251" in refused(statement, folder)


def test_what_only_decodes_may_land() -> None:
    assert not refused("import json; import yaml; json.loads('1'); yaml.safe_load('x')", "services")
