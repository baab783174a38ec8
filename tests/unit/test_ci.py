"""The scripts that decide whether a change may land."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import known_keys
from paceline.services.coordinator.config import CoordinatorConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
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
    """Return ruff's findings by the project's rules on a statement in a module of that folder."""
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


def checked(script: str, tree: Path, files: dict[str, str]) -> tuple[int, str]:
    """The exit status and the output of a script of .ci in a repository, after a commit of the files."""
    git = ["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run(["git", "init", "-q", tree], check=True)
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    return ended(script, tree)


def ended(script: str, tree: Path) -> tuple[int, str]:
    """The exit status and the output of a script of .ci in that folder."""
    command = [sys.executable, ROOT / ".ci" / script]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


RECORD = "docs/adr/0001-one-process.md"
PLAIN = {
    "services/a.py": '"""Sends rows. See ADR 1 and docs/adr/0001."""\nx = 1  # rows of a batch\n',
    "libs/paceline/v1/a.py": "# what the generator says stands as it came\n",
    "docs/a.md": "A gateway sends rows ([ADR 1](adr/0001-one-process.md)). `what who says`\n",
    "docs/settings.md": "| `a` | `integer` |\n| `b` | `float` |\n",
    "docs/b.md": "See [figures](results/2026-11-30-products.md).\n",
    "CHANGELOG.md": "- What one that says so stands for.\n",
    RECORD: "# One process\n",
}


def test_a_tree_in_plain_prose_with_its_records_passes(tmp_path: Path) -> None:
    status, printed = checked("house.py", tmp_path, PLAIN)
    assert status == 0, printed
    assert "1 files, 2 settings, 1 decision records" in printed


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("services/b.py", '"""What it says."""\n', "docstrings and comments: .*services/b.py (2)"),
        ("libs/b.py", "x = 1  # goes on with those\n", "docstrings and comments: .*libs/b.py (2)"),
        ("docs/c.md", "It knows what of\nthem stands.\n", "pages: .*docs/c.md (4)"),
        ("services/b.py", "# see ADRs 1, 2 and 13\n", "services/b.py: ADR 13 does not exist"),
        ("tests/b.py", "# ADRs 1, 2 and 13\n", "tests/b.py: ADR 2 does not exist"),
        ("a.toml", "# docs/adr/0007\n", "a.toml: docs/adr/0007 does not exist"),
        ("README.md", "[x](docs/adr/0001-two.md)\n", "README.md: docs/adr/0001-two does not exist"),
        (RECORD, "[x](0009-x.md)\n", f"{RECORD}: docs/adr/0009-x does not exist"),
        ("CHANGELOG.md", "(ADR 12)\n", "CHANGELOG.md: ADR 12 does not exist"),
    ],
)
def test_dialect_and_absent_records_may_not_land(
    tmp_path: Path, name: str, text: str, fault: str
) -> None:
    status, printed = checked("house.py", tmp_path, PLAIN | {name: text})
    assert status == 1
    assert [line for line in printed.splitlines() if all(p in line for p in fault.split(".*"))]


def test_decision_records_have_a_limit_of_number(tmp_path: Path) -> None:
    records = {f"docs/adr/{n:04}-x.md": "# X\n" for n in range(2, 42)}
    status, printed = checked("house.py", tmp_path, PLAIN | records)
    assert (status, "docs/adr: 41 decision records; at most 40" in printed) == (1, True)


def test_source_files_of_large_commits_are_counted_also_in_a_shallow_clone(tmp_path: Path) -> None:
    tree, clone = tmp_path / "tree", tmp_path / "clone"
    checked("house.py", tree, PLAIN)
    large = {f"services/{name}.py": "x = 1\n" * 50 for name in "cde"}
    counted = "1 commits of 80 added lines: 3 files (median), 3 (p90)"
    assert counted in checked("house.py", tree, large)[1]
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{tree}", clone], check=True)
    status, printed = ended("house.py", clone)
    assert status == 0
    assert "0 commits of 80 added lines" in printed


@pytest.mark.slow
def test_the_product_and_each_file_have_a_limit_of_lines(tmp_path: Path) -> None:
    limit = runpy.run_path(str(ROOT / ".ci/sizes.py"))["PRODUCT_LINES"]
    files = {f"services/a/{n}.py": "x = 1\n" * 400 for n in range(limit // 400)}
    files["services/a/last.py"] = "x = 1\n" * (limit % 400)
    assert checked("sizes.py", tmp_path, files)[0] == 0
    status, printed = checked("sizes.py", tmp_path, {"libs/paceline/b.py": "x = 1\n"})
    assert status == 1
    assert f"product: {limit + 1:,} lines of code; at most {limit:,}" in printed
    status, printed = checked("sizes.py", tmp_path, {"services/a/0.py": "x = 1\n" * 401})
    assert "services/a/0.py: 401 lines; at most 400" in printed
