"""The scripts that decide whether a change may land."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import known_keys
from paceline.services.coordinator.config import CoordinatorConfig

ROOT = Path(__file__).parents[2]


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
    assert rows["coordinator.sampling.temperature"][:3] == ["float", "1.0", ">= 1e-20, <= 10"]
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
