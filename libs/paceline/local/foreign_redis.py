"""Checks a Redis that others run: what of it would lose a run, or show it to others."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.exceptions import ResponseError

from paceline.config import SecurityConfig
from paceline.errors import ConfigError
from paceline.rpc import is_loopback
from paceline.streams.connection import connect, redis_errors


def on_this_machine(url: str) -> bool:
    """Whether a URL's server is reached without a network."""
    parts = urlsplit(url)
    return parts.scheme == "unix" or is_loopback(f"[{parts.hostname}]:0")


def shown(url: str) -> str:
    """A URL without its password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def check_url(url: str, setting: str, security: SecurityConfig) -> None:
    """Raises ConfigError for a server on another machine without password or without TLS."""
    if on_this_machine(url) or security.allow_insecure:
        return
    parts = urlsplit(url)
    needed = {
        "a password": parts.password or "ssl_certfile" in parse_qs(parts.query),
        "TLS": parts.scheme == "rediss",
    }
    missing = [name for name, given in needed.items() if not given]
    if missing:
        raise ConfigError(
            f"the server of {setting} is on another machine; missing: {', '.join(missing)}",
            reason="INSECURE_ADDRESS",
            seen=shown(url),
            allowed="rediss://:<password>@host:port/0, a server on this machine, or "
            "security.allow_insecure=true",
        )


async def check_durable(url: str) -> str:
    """What a user should know of a server that is to keep a run, in words; "" when nothing.

    Raises ConfigError when it would evict the run's keys or is a replica, Unavailable.
    """
    parts = urlsplit(url)
    doubts = []
    if parts.scheme != "unix" and not (parts.password or "ssl_certfile" in parse_qs(parts.query)):
        doubts.append("it asks for no password: who reaches it may read and change the run")
    client: Any = connect(url)
    try:
        with redis_errors(client, "look at its settings"):
            try:
                info = await client.info()
            except ResponseError as error:
                return "; ".join([*doubts, f"its settings cannot be checked: {error}"])
            _require_kept(info, url)
            doubts += await _persistence(client, info)
    finally:
        await client.aclose()
    return "; ".join(doubts)


def _require_kept(info: dict[str, Any], url: str) -> None:
    if info.get("role") == "slave":
        raise ConfigError(f"Redis at {shown(url)} is a replica", allowed="the URL of its primary")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory"):
        raise ConfigError(
            f"Redis at {shown(url)} throws keys away when its memory is full",
            seen=f"maxmemory-policy {policy}",
            allowed="noeviction",
        )


async def _persistence(client: Any, info: dict[str, Any]) -> list[str]:
    if "aof_enabled" not in info:
        return ["whether it keeps an append-only file cannot be checked"]
    if not info["aof_enabled"]:
        return ["it keeps no append-only file (appendonly no): its restart ends the run"]
    try:
        sync = (await client.config_get("appendfsync"))["appendfsync"]
    except ResponseError:
        return ["appendfsync cannot be checked: CONFIG is forbidden"]
    if sync == "always":
        return []
    return [f"appendfsync is {sync}: a crash of its machine loses what was just acknowledged"]
