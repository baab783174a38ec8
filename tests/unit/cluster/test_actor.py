"""An actor takes some settings from the process that started the run; Ray sets the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.cluster.keeper import take_surroundings, travelling

TOKEN = "RAY_AUTH_TOKEN"


@pytest.fixture(autouse=True)
def _back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_variables_and_credentials_of_ray_do_not_reach_services(tmp_path: Path) -> None:
    os.environ.update({TOKEN: "secret", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1"})
    take_surroundings(str(tmp_path), {"A": "b"})
    assert not {TOKEN, "RAY_JOB_ID", "OMP_NUM_THREADS"} & os.environ.keys()
    assert (os.environ["A"], Path.cwd()) == ("b", tmp_path)


def test_credentials_of_ray_do_not_travel() -> None:
    os.environ.update({"PACELINE_TOKEN": "t", TOKEN: "secret"})
    found = travelling()
    assert found["PACELINE_TOKEN"] == "t"
    assert TOKEN not in found
