"""Lists every process of a run, in the order of the data; services.toml describes them."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from paceline.errors import NotFound


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One service and how to start it: `python -m <module> [--config FILE] [key=value ...]`."""

    name: str  # also its config section and log file
    module: str
    label: str  # group in a dashboard
    settings: str = ""  # import path of the settings class; "": none
    address_key: str = ""  # key of the main port, for AddressesConfig.of; "": none
    depends_on: tuple[str, ...] = ()  # services that must be healthy first
    more_address_keys: tuple[str, ...] = ()  # further keys that it binds
    links: tuple[str, ...] = ()  # keys that are web pages
    ends_run: bool = False  # the run ends when it exits with status 0
    optional: bool = False  # the run continues without it
    arguments: tuple[str, ...] = ()  # before --config
    forked: tuple[str, ...] = ()  # modules for forks, and their late imports

    @property
    def command_name(self) -> str:
        """Name on the command line: `paceline serve <command_name>`."""
        return self.name.replace("_", "-")


REDIS = "paceline.local.redis"
"""Module of the Redis servers. They listen at the URLs in [redis], not at [addresses]."""


def _read_specs() -> Iterator[ServiceSpec]:
    file = Path(__file__).with_name("services.toml")
    for name, keys in tomllib.loads(file.read_text(encoding="utf-8")).items():
        for key, value in keys.items():
            keys[key] = tuple(value) if isinstance(value, list) else value
        yield ServiceSpec(name, **keys)


*_SPECS, TINKER = _read_specs()
SERVICES = tuple(_SPECS)
"""The services of a run. TINKER, the front of the Tinker API, replaces the coordinator."""
GATEWAY, POLICY_TRAINER = "gateway", "policy_trainer"


def numbered(name: str, number: int) -> str:
    """Name of one process of a service with several: a gateway, or a policy trainer's node."""
    return f"{name}-{number}" if number else name


def services_of(gateways: int, policy_nodes: int = 1) -> list[ServiceSpec]:
    """The services of a run with so many gateways, and so many nodes of its policy trainer."""
    names = tuple(numbered(GATEWAY, number) for number in range(gateways))
    found = list[ServiceSpec]()
    for spec in SERVICES:
        needs = spec.depends_on
        if GATEWAY in needs:
            needs = (*names, *(name for name in needs if name != GATEWAY))
        if spec.name == POLICY_TRAINER:  # stopped before its ranks elsewhere: it saves them
            found += [service(numbered(spec.name, node)) for node in range(1, policy_nodes)]
        found.append(replace(spec, depends_on=needs))
        if spec.name == GATEWAY:
            found += map(service, names[1:])
    return found


def service(name: str) -> ServiceSpec:
    """The service with this name, with - or _. Raises NotFound with all names."""
    first, _, number = name.partition("-")
    if first in (GATEWAY, POLICY_TRAINER) and number.isdecimal() and int(number):
        own = replace(service(first), name=name, address_key="", arguments=(f"--{first}", number))
        if first == POLICY_TRAINER:
            return own
        key, http = f"more_gateways.{int(number) - 1}", f"more_gateways_http.{int(number) - 1}"
        return replace(own, address_key=key, more_address_keys=(http,), links=(http,))
    wanted = name.replace("-", "_")
    known = (*SERVICES, TINKER)
    for spec in known:
        if spec.name == wanted:
            return spec
    allowed = ", ".join(spec.command_name for spec in known)
    raise NotFound("no such service", seen=name, allowed=allowed)


def settings_of_run(files: Sequence[Path], overrides: Sequence[str]) -> dict[str, Any]:
    """Settings by service name, of all services with settings. Raises ConfigError."""
    # Import late: the command line's help uses the table of services alone.
    from paceline.config.load import load_config
    from paceline.plugins import import_object

    return {
        spec.name: load_config(import_object(spec.settings), spec.name, files, overrides)
        for spec in SERVICES
        if spec.settings
    }


def gpu_settings(found: Mapping[str, Any]) -> list[str]:
    """Keys of the settings that request a GPU."""
    gateway, policy, drafter = itemgetter("gateway", "policy_trainer", "drafter_trainer")(found)
    named = {"policy_trainer.device": policy.device, "drafter_trainer.device": drafter.device}
    if gateway.engine.kind == "sglang":
        named["gateway.engine.sglang.device"] = gateway.engine.sglang.device
    return [key for key, device in named.items() if device == "cuda"]
