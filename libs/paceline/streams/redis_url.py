"""Reads the URL of a Redis: of one server, of a cluster, or of a master that Sentinel watches.

    redis://[user:password@]host:port/db          rediss:// with TLS; unix:///path?db=0
    redis+cluster://[user:password@]host:port,host:port           rediss+cluster://
    redis+sentinel://[user:password@]host:port,host:port/master[/db]   rediss+sentinel://

Options follow a "?": those of redis-py, such as ssl_ca_certs; of a cluster and behind Sentinel also
`replicas`, of Sentinel `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import parse_url

from paceline.addresses import spelled
from paceline.errors import ConfigError

Address = tuple[str, int]
Kind = Literal["server", "cluster", "sentinel"]
ALLOWED = (
    "redis://host:port/db, rediss://host:port/db, unix:///path?db=0, "
    "redis+cluster://host:port,host:port, redis+sentinel://host:port,host:port/master, "
    "or the last two with rediss+"
)
_PORTS = {"server": 6379, "cluster": 6379, "sentinel": 26379}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Where a Redis is, and how one is let in."""

    kind: Kind
    addresses: tuple[Address, ...]  # nodes of the cluster, or Sentinels, to begin with
    service: str  # name of the master that Sentinel watches
    settings: dict[str, Any] = field(repr=False)  # of a connection, as redis-py names them
    sentinel_settings: dict[str, Any] = field(repr=False)
    replicas: int  # that must have a write before it counts
    tls: bool
    socket: bool

    @property
    def has_password(self) -> bool:
        """Whether the server can tell who comes."""
        return "password" in self.settings or "ssl_certfile" in self.settings

    def __str__(self) -> str:
        if self.socket:
            return str(self.settings.get("path"))
        where = ",".join(f"{spelled(host)}:{port}" for host, port in self.addresses)
        match self.kind:
            case "server":
                return where
            case "cluster":
                return f"the cluster of {where}"
            case "sentinel":
                return f"{self.service} of the Sentinels {where}"


def shown(url: str) -> str:
    """A URL without its password and its options."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def parse_redis_url(url: str) -> RedisUrl:
    """What a URL says. Raises ConfigError for one that is none."""
    try:
        return _parsed(url)
    except ValueError as error:
        raise ConfigError(f"not a Redis URL: {error}", seen=shown(url), allowed=ALLOWED) from error


def _parsed(url: str) -> RedisUrl:
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if kind not in ("", "cluster", "sentinel") or (kind and scheme == "unix"):
        raise ValueError(f"there is no {parts.scheme}://")
    who, at, where = parts.netloc.rpartition("@")
    of: Kind = "cluster" if kind == "cluster" else "sentinel" if kind else "server"
    service, db = ("", parts.path) if of != "sentinel" else _service(parts.path)
    if of == "server":
        settings: dict[str, Any] = dict(parse_url(url))
        address = (settings.get("host", "localhost"), settings.get("port", _PORTS[of]))
        addresses: tuple[Address, ...] = (address,)
    else:
        if db.strip("/") and not db.strip("/").isdecimal():
            raise ValueError(f"{db.strip('/')} is no number of a database")
        plain = f"{scheme}://{who}{at}{db}?{parts.query}"
        settings = dict(parse_url(plain))
        addresses = tuple(_address(one, _PORTS[of]) for one in where.split(","))

    replicas = settings.pop("replicas", "0") if of != "server" else "0"
    if not re.fullmatch(r"\d{1,2}", replicas):
        raise ValueError(f"replicas={replicas} is no number")
    if of == "cluster" and settings.get("db"):
        raise ValueError("a cluster has no databases but 0")
    sentinels = {
        name.removeprefix("sentinel_"): settings.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if of == "sentinel" and name in settings
    }
    shared = {name: value for name, value in settings.items() if name.startswith("ssl_")}
    tls, socket = scheme == "rediss", scheme == "unix"
    return RedisUrl(
        of, addresses, service, settings, shared | sentinels, int(replicas), tls, socket
    )


def _service(path: str) -> tuple[str, str]:
    name, _, db = path.strip("/").partition("/")
    if not name:
        raise ValueError("the name of the master is missing behind the Sentinels")
    return unquote(name), f"/{db}"


def _address(text: str, port: int) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no host:port")
    return parts.hostname, port if parts.port is None else parts.port
