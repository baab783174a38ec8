"""The Tiltfile, evaluated with stand-ins for Tilt's functions that record their calls."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import starlark as sl

from paceline.config import AddressesConfig
from paceline.local.healthcheck import main as healthcheck
from paceline.local.services import SERVICES

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
config = struct(define_string = _define_string, parse = _parse)
"""


class Recorder:
    """Takes the place of Tilt: resources by name, in the order of the file."""

    def __init__(self) -> None:
        self.resources: dict[str, dict[str, Any]] = {}

    def local_resource(self, name: str, **settings: Any) -> None:
        assert name not in self.resources, f"{name} is defined twice"
        self.resources[name] = settings

    def local(self, *arguments: Any, **settings: Any) -> None:
        raise AssertionError("Tilt refuses local() where a kubecontext looks like production")


def tilt_dialect() -> sl.Dialect:
    """What Tilt's own Starlark takes: no f-strings, no types."""
    dialect = sl.Dialect.standard()
    dialect.enable_lambda = dialect.enable_top_level_stmt = True
    dialect.enable_def = dialect.enable_keyword_only_arguments = True
    dialect.enable_f_strings = False
    return dialect


@pytest.fixture(scope="module")
def resources() -> dict[str, dict[str, Any]]:
    recorder, module = Recorder(), sl.Module()
    module["TRIGGER_MODE_MANUAL"] = "manual"
    module.add_callable("local_resource", recorder.local_resource)
    module.add_callable("local", recorder.local)
    module.add_callable("_define_string", lambda name: None)
    module.add_callable("_parse", dict)
    module.add_callable("exec_action", lambda command: {"command": command})
    module.add_callable("probe", lambda **settings: settings)
    module.add_callable("link", lambda url, name: {"url": url, "name": name})
    names = sl.Globals.extended_by([sl.LibraryExtension.StructType])
    sl.eval(module, sl.parse("prelude", PRELUDE, tilt_dialect()), names)
    sl.eval(module, sl.parse("Tiltfile", (ROOT / "Tiltfile").read_text(), tilt_dialect()), names)
    return recorder.resources


@pytest.fixture(scope="module")
def services(resources: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: settings for name, settings in resources.items() if "serve_cmd" in settings}


def test_the_tiltfile_is_short() -> None:
    assert len((ROOT / "Tiltfile").read_text().splitlines()) < 60


def test_services_are_those_of_the_service_table_in_its_order(
    services: dict[str, dict[str, Any]],
) -> None:
    seen = [
        (name, each["serve_cmd"][2], tuple(each["resource_deps"]), each["labels"])
        for name, each in services.items()
    ]
    assert seen == [(spec.name, spec.module, spec.depends_on, [spec.label]) for spec in SERVICES]
    for spec in SERVICES:
        command = services[spec.name]["serve_cmd"]
        assert tuple(command[3 : 3 + len(spec.arguments)]) == spec.arguments
        assert len(services[spec.name]["links"]) == len(spec.links)


def test_every_service_has_a_probe_through_the_health_check(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, settings in services.items():
        command = settings["readiness_probe"]["exec"]["command"]
        assert command[1:3] == ["-m", "paceline.local.healthcheck"], name
        with pytest.raises(SystemExit):
            healthcheck([*command[3:], "--no-such-option"])


def test_probes_ask_the_default_addresses_and_each_role_of_redis_once(
    services: dict[str, dict[str, Any]],
) -> None:
    probed = {name: s["readiness_probe"]["exec"]["command"][4] for name, s in services.items()}
    defaults = AddressesConfig()
    for spec in SERVICES:
        if spec.address_key:
            assert probed[spec.name] == getattr(defaults, spec.address_key)
        else:
            assert probed[spec.name] in spec.arguments
    assert len(set(probed.values())) == len(services)


def test_dependencies_exist_and_have_no_circle(services: dict[str, dict[str, Any]]) -> None:
    started: set[str] = set()
    for name, settings in services.items():  # each follows what it needs, so there is no circle
        assert set(settings["resource_deps"]) <= started
        started.add(name)


def test_commands_exist(
    resources: dict[str, dict[str, Any]], services: dict[str, dict[str, Any]]
) -> None:
    for settings in services.values():
        assert settings["serve_cmd"][:2] == [".venv/bin/python", "-m"]
        assert find_spec(settings["serve_cmd"][2]) is not None
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in set(resources) - set(services):
        make, target = resources[name]["cmd"]
        assert make == "make"
        assert target in targets
    assert {"test", "demo"} <= set(resources)


def test_the_config_it_names_exists(services: dict[str, dict[str, Any]]) -> None:
    for settings in services.values():
        command = settings["serve_cmd"]
        assert (ROOT / command[command.index("--config") + 1]).is_file()
