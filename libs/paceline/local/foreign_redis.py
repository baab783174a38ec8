"""Checks an external Redis for settings that would lose a run or expose it."""

from typing import Any

from redis.exceptions import ResponseError

from paceline.addresses import is_loopback
from paceline.config import SecurityConfig
from paceline.errors import ConfigError
from paceline.streams.connection import connect, parse_redis_url, redis_errors, shown


def on_this_machine(url: str) -> bool:
    """Whether the URL's server is on this machine."""
    where = parse_redis_url(url)
    return where.socket or is_loopback(f"[{where.host}]:0")


def check_url(url: str, setting: str, security: SecurityConfig) -> None:
    """Raises ConfigError for a server on another machine without password or without TLS."""
    if on_this_machine(url) or security.allow_insecure:
        return
    where = parse_redis_url(url)
    needed = {"a password": where.has_password, "TLS": where.tls}
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
    """Warnings about a server that is to store a run, as text; "" without warnings.

    Raises ConfigError if it may evict the run's keys or is a replica, and Unavailable.
    """
    where = parse_redis_url(url)
    doubts = []
    if not where.socket and not where.has_password:
        doubts.append("it asks for no password: who reaches it may read and change the run")
    client: Any = connect(url)
    try:
        with redis_errors(client, "look at its settings"):
            doubts += await _doubts(client, shown(url))
    finally:
        await client.aclose()
    return "; ".join(dict.fromkeys(doubts))


async def _doubts(client: Any, url: str) -> list[str]:
    try:
        info = await client.info()
    except ResponseError as error:
        return [f"its settings cannot be checked: {error}"]
    _require_kept(info, url)
    return await _persistence(client, info)


def _require_kept(info: dict[str, Any], url: str) -> None:
    if info.get("role") == "slave":
        raise ConfigError(f"Redis at {url} is a replica", allowed="the URL of its primary")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory"):
        raise ConfigError(
            f"Redis at {url} throws keys away when its memory is full",
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
