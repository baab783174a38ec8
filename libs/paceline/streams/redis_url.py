"""Reads the URL of a Redis server.

    redis://[user:password@]host:port/db          rediss:// with TLS; unix:///path?db=0

Options of redis-py, such as ssl_ca_certs, follow a "?".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import parse_url

from paceline.errors import ConfigError

ALLOWED = "redis://host:port/db, rediss://host:port/db, unix:///path?db=0"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Address and connection settings of one server."""

    host: str
    settings: dict[str, Any] = field(repr=False)  # of a connection, as redis-py names them
    tls: bool
    socket: bool

    @property
    def has_password(self) -> bool:
        """Whether the server authenticates its clients."""
        return "password" in self.settings or "ssl_certfile" in self.settings


def shown(url: str) -> str:
    """A URL without its password and options."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def parse_redis_url(url: str) -> RedisUrl:
    """Address and settings of a URL.

    Raises ConfigError for a malformed URL, a cluster or Sentinels: a run's keys are written
    together, so they need one server.
    """
    scheme = urlsplit(url).scheme
    if "+" in scheme:
        raise ConfigError(
            "a run keeps its keys on one Redis server; clusters and Sentinels are not supported",
            seen=shown(url),
            allowed=ALLOWED,
        )
    try:
        settings: dict[str, Any] = dict(parse_url(url))
    except ValueError as error:
        raise ConfigError(f"not a Redis URL: {error}", seen=shown(url), allowed=ALLOWED) from error
    host = settings.get("host", "localhost")
    return RedisUrl(host, settings, scheme == "rediss", scheme == "unix")
