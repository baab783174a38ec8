"""Checks which addresses of a run would pass through the environment's proxies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # public

from paceline.addresses import proxied
from paceline.config import ServiceConfig
from paceline.local.findings import Finding
from paceline.streams.redis_url import shown

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
_EXEMPT = ("no_grpc_proxy", "no_proxy")


def look_at_proxies(config: ServiceConfig, environment: Mapping[str, str] = os.environ) -> Finding:
    """A finding; it warns if gRPC or HTTP between this run's services would pass through a
    proxy.
    """
    named = _set(environment, _PROXIES)
    if not named:
        return Finding("proxies", "ok", "the environment names none")
    exempt = _set(environment, _EXEMPT)
    seen = ", ".join(f"{name}={shown(value)}" for name, value in named.items())
    seen += ": for other hosts, such as the Hub; not for loopback and unix sockets"
    seen += "".join(f"; {name}={value}" for name, value in exempt.items())
    addresses = config.addresses.model_dump()
    del addresses["events"]  # ZeroMQ uses no proxy
    through = [
        f"addresses.{name}={address}"
        for name, address in addresses.items()
        if proxied(address) and not any(_exempts(hosts, address) for hosts in exempt.values())
    ]
    if not through:
        return Finding("proxies", "ok", seen)
    return Finding(
        "proxies",
        "warn",
        f"{seen}; the proxy is asked for {', '.join(through)}",
        "name these hosts in no_proxy, unless the proxy leads to them",
    )


def _set(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """The variables that are set, in lower or upper case."""
    spelled = (spelling for name in names for spelling in (name, name.upper()))
    return {name: environment[name] for name in spelled if environment.get(name)}


def _exempts(hosts: str, address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return bool(proxy_bypass_environment(host, {"no": hosts}))
