"""What an actor takes from whoever started the run, and what it leaves to Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.cluster.actor import ADDRESS_VARIABLE, take_surroundings, travelling

TOKEN = "RAY_AUTH_TOKEN"


@pytest.fixture(autouse=True)
def _back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize("joins", [False, True])
def test_what_lets_in_to_the_cluster_is_left_to_those_who_join_it_alone(
    joins: bool, tmp_path: Path
) -> None:
    os.environ.update({TOKEN: "secret", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1"})
    take_surroundings(str(tmp_path), {"A": "b"} | ({ADDRESS_VARIABLE: "x:1"} if joins else {}))
    assert (TOKEN in os.environ) == joins
    assert not {"RAY_JOB_ID", "OMP_NUM_THREADS"} & os.environ.keys()
    assert (os.environ["A"], Path.cwd()) == ("b", tmp_path)


def test_the_address_of_the_cluster_does_not_travel_further() -> None:
    os.environ.update({ADDRESS_VARIABLE: "x:1", "PACELINE_TOKEN": "t", TOKEN: "secret"})
    found = travelling()
    assert found["PACELINE_TOKEN"] == "t"
    assert not {ADDRESS_VARIABLE, TOKEN} & found.keys()
