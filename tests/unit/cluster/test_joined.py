"""The addresses that a run may join, checked before it calls Ray."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from ray_nodes import WITH_RAY

from paceline.cli.command import Launcher
from paceline.cluster import joined
from paceline.errors import ConfigError, PacelineError

HEAD = "203.0.113.7:6379"
REALLY_REACHED = joined._reached


async def reached(address: str) -> None:
    """Every address answers."""


@pytest.fixture(autouse=True)
def _no_ray_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(joined, "_reached", reached)


async def test_without_ray_it_is_said_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("paceline.local.checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[ray\]'"):
        async with joined.joined(None):
            pass


@WITH_RAY
@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ({}, r"a token .* and TLS"),
        ({"RAY_AUTH_TOKEN": "t"}, r"needs TLS"),
        ({"RAY_USE_TLS": "1"}, r"needs a token"),
    ],
)
async def test_a_cluster_that_lets_everybody_in_is_not_joined(
    given: dict[str, str], lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_AUTH_MODE", "token" if "RAY_AUTH_TOKEN" in given else "disabled")
    with pytest.raises(ConfigError, match=lacking):
        async with joined.joined(HEAD):
            pass


@pytest.mark.parametrize(
    ("address", "refusal"),
    [
        ("ray://127.0.0.1:1", "Ray's client is not used"),
        ("nowhere", "--address is not an address"),
        ("127.0.0.1:1", "no Ray cluster answers"),
    ],
)
async def test_an_address_where_no_cluster_can_be_is_refused_by_its_name(
    address: str, refusal: str
) -> None:
    with pytest.raises(PacelineError, match=refusal):
        await REALLY_REACHED(address)


def test_an_address_without_a_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="add --launcher ray"):
        Launcher("local", HEAD)


def test_a_launcher_is_named_again_by_its_words() -> None:
    assert Launcher("local", None).words == []
    assert Launcher("ray", HEAD).words == ["--launcher", "ray", "--address", HEAD]
