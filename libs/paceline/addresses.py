"""Decides which addresses stay on this machine and bypass proxies, and formats the loopback
address.
"""

import ipaddress
import os
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def is_loopback(address: str) -> bool:
    """Whether `host:port`, `[ipv6]:port` or `unix:path` stays on this machine. The port may be
    absent. The only host name that counts is localhost.
    """
    if address.startswith("unix:"):
        return True
    host = _host(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxied(address: str) -> bool:
    """Whether the proxy variables apply to `host:port`, `[ipv6]:port`, `unix:path` or a URL.

    They apply to other hosts only. A connection to 0.0.0.0 or [::] also reaches this machine.
    """
    place = address
    if "://" in address and not address.startswith("unix:"):
        place = urlsplit(address).netloc.rpartition("@")[2]
    if is_loopback(place):
        return False
    try:
        return not ipaddress.ip_address(_host(place)).is_unspecified
    except ValueError:
        return True


def direct(url: str, verify: bool | ssl.SSLContext = True) -> dict[str, Any]:
    """Arguments of httpx's clients for reaching a URL of this machine without a proxy.

    httpx reads the variables for proxies and for trusted certificates, or neither.
    """
    if proxied(url):
        return {"verify": verify}
    if verify is True and url.startswith("https:"):
        verify = ssl.create_default_context()
    return {"verify": verify, "trust_env": False}


def exempt_loopback(*urls: str) -> None:
    """Adds the loopback hosts, and the hosts of `urls` on this machine, to no_proxy of this
    process.

    Libraries that read the proxy variables themselves then use no proxy for these hosts.
    """
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if given.strip() == "*":
        return
    own = [urlsplit(url).hostname or "" for url in urls if not proxied(url)]
    named = [*(one.strip() for one in given.split(",")), "localhost", "127.0.0.1", "::1", *own]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys(filter(None, named)))


def reachable(address: str, port: int) -> str:
    """`host:port` at which this machine reaches a server that listens on the host of `address`;
    loopback for a server on all addresses.
    """
    everywhere = not is_loopback(address) and not proxied(address)
    return f"{loopback() if everywhere else address.rpartition(':')[0]}:{port}"


def loopback() -> str:
    """This machine's loopback host in `host:port` form: 127.0.0.1, or [::1] without IPv4."""
    for family, host in _LOOPBACKS:
        try:
            with socket.socket(family) as probe:
                probe.bind((host, 0))
        except OSError:  # the host lacks the address or the family
            continue
        return spelled(host)
    return _LOOPBACKS[0][1]  # the first use of this address reports the fault


def spelled(host: str) -> str:
    """Formats a host for `host:port` and URLs: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


def needs_ipv6(address: str) -> bool:
    """Whether sockets for `host:port` must use IPv6.

    True for an IPv6 address and for a name without an IPv4 address. True for the wildcard `*` if
    this machine has no IPv4 loopback.
    """
    host = _host(address)
    if host == "*":
        return loopback() != "127.0.0.1"
    try:
        return ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        pass  # a name
    try:
        return not socket.getaddrinfo(host, None, socket.AF_INET)
    except OSError:
        return True


def _host(address: str) -> str:
    has_port = ":" in address.rpartition("]")[2]
    return (address.rpartition(":")[0] if has_port else address).strip("[]").lower()
