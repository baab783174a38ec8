"""The Tiltfile, evaluated with substitutes for Tilt's functions that record their calls."""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from tilt_stand_in import ROOT, Resource, resources_of

from paceline.cli.main import app
from paceline.config import AddressesConfig
from paceline.local.healthcheck import main as healthcheck
from paceline.local.services import SERVICES, service

SERVING = [spec for spec in SERVICES if spec.address_key and not spec.ends_run]


@pytest.fixture(scope="module")
def resources() -> dict[str, Resource]:
    return resources_of({})


@pytest.fixture(scope="module")
def services(resources: dict[str, Resource]) -> dict[str, Resource]:
    return {spec.name: resources[spec.name] for spec in SERVICES}


@pytest.fixture(scope="module")
def buttons(resources: dict[str, Resource], services: dict[str, Resource]) -> dict[str, Resource]:
    return {name: one for name, one in resources.items() if name not in services}


def test_services_are_those_of_the_service_table_in_its_order(
    resources: dict[str, Resource], services: dict[str, Resource]
) -> None:
    assert list(resources)[: len(SERVICES)] == [spec.name for spec in SERVICES]
    for spec in SERVICES:
        settings = services[spec.name]
        command = settings["cmd" if spec.ends_run else "serve_cmd"]
        assert command[:3] == [".venv/bin/python", "-m", spec.module]
        assert tuple(command[3 : 3 + len(spec.arguments)]) == spec.arguments
        assert tuple(settings.get("resource_deps", ())) == spec.depends_on
        assert settings["labels"] == [spec.label]
        assert len(settings.get("links", ())) == len(spec.links)


def test_a_run_that_ends_is_a_command_that_ends_and_every_other_service_serves(
    services: dict[str, Resource],
) -> None:
    ends = [name for name, settings in services.items() if "serve_cmd" not in settings]
    assert ends == [spec.name for spec in SERVICES if spec.ends_run] == ["coordinator"]
    assert "readiness_probe" not in services["coordinator"]


def test_probes_start_no_process_and_ask_the_default_addresses(
    resources: dict[str, Resource],
) -> None:
    defaults = AddressesConfig()
    for spec in SERVING:
        probe = resources[spec.name]["readiness_probe"]
        (kind,) = {"exec", "http_get", "tcp_socket"} & set(probe)
        key = spec.links[0] if kind == "http_get" else spec.address_key
        host, port = probe[kind]["address"]
        assert kind != "exec"
        assert f"{host}:{port}" == getattr(defaults, key), spec.name
    health = resources["gateway"]["readiness_probe"]["http_get"]
    assert (
        health["url"] == f"http://{defaults.http}/health" == resources["gateway"]["links"][0]["url"]
    )
    assert all("exec" not in one.get("readiness_probe", {}) for one in resources.values())


def test_what_needs_a_redis_waits_until_all_its_roles_answer(services: dict[str, Resource]) -> None:
    for spec in SERVING:
        command = services[spec.name]["cmd"]
        assert command[1:3] == ["-m", "paceline.local.healthcheck"]
        roles = [value for word, value in pairwise(command) if word == "--redis"]
        needed = [service(name).arguments[-1] for name in spec.depends_on]
        assert roles == needed
        with pytest.raises(SystemExit):
            healthcheck([*command[3:], "--no-such-option"])


def test_dependencies_exist_and_have_no_circle(services: dict[str, Resource]) -> None:
    started: set[str] = set()
    for name, settings in services.items():  # each follows its dependencies, so there is no circle
        assert set(settings.get("resource_deps", ())) <= started
        started.add(name)


def test_what_is_no_service_waits_for_a_click(buttons: dict[str, Resource]) -> None:
    assert {"status", "doctor", "report", "chaos", "page", "test", "demo"} <= set(buttons)
    for name, settings in buttons.items():
        assert (settings["auto_init"], settings["trigger_mode"]) == (False, "manual"), name
        assert ("readiness_probe" in settings) == ("serve_cmd" in settings), name


def test_commands_exist(services: dict[str, Resource], buttons: dict[str, Resource]) -> None:
    for name in services:
        for key in {"cmd", "serve_cmd"} & set(services[name]):
            assert find_spec(services[name][key][2]) is not None
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for settings in buttons.values():
        command = settings.get("cmd") or settings["serve_cmd"]
        if command[0] == "make":
            assert command[1] in targets
        else:
            assert command[:3] == [".venv/bin/python", "-m", "paceline.cli.main"]
            parsed(*command[3:])


def parsed(name: str, *words: str) -> None:
    """Raises where the command line of `paceline` does not take these words."""
    group: Any = typer.main.get_command(app)
    command = group.commands[name]
    context = command.make_context(name, list(words), resilient_parsing=False)
    assert context.params


def test_the_config_it_names_exists_and_another_can_be_given(
    resources: dict[str, Resource],
) -> None:
    named = {
        command[command.index("--config") + 1]
        for each in (resources, resources_of({"config": "mine.toml"}))
        for settings in each.values()
        for command in (settings.get("cmd"), settings.get("serve_cmd"))
        if command and "--config" in command
    }
    assert named == {"examples/demo/demo.toml", "mine.toml"}
    assert Path(ROOT / "examples/demo/demo.toml").is_file()
