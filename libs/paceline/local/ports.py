"""Finds free ports for a local run and rejects taken ports with the name of their setting."""

import errno
import fcntl
import os
import random
import socket
from collections import deque
from functools import cache
from pathlib import Path

from paceline.addresses import loopback
from paceline.errors import ConfigError, Unavailable
from paceline.local import processes
from paceline.local.user_directory import user_directory

_TRIES = 200
_LOWEST, _EPHEMERAL = 10_000, 32_768
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MOST_HELD = 1000
_held: deque[int] = deque()


def free_port() -> int:
    """A free TCP port of the loopback address, at the time of the call."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different free TCP ports of the loopback address, at the time of the call. Raises Unavailable
    if too few are free.

    The ports are below the system's range for outgoing connections, so that no connection takes a
    port before its server starts. No other process of this user gets the same port while this
    process lives, or until it receives a thousand more ports.
    """
    low = int(_RANGE.read_text().split()[0]) if _RANGE.is_file() else _EPHEMERAL
    choices = range(_LOWEST, max(_LOWEST + _TRIES, min(low, 65_536)))
    found: list[int] = []
    for port in random.SystemRandom().sample(choices, min(_TRIES + count, len(choices))):
        if len(found) == count:
            break
        if _hold(port) and _is_free(port):
            found.append(port)

    if len(found) < count:
        raise Unavailable(f"too few free ports on {loopback()}", seen=len(found), allowed=count)
    return found


def _hold(port: int) -> bool:
    """Reserves a port for this process. Returns False if it is already reserved."""
    if port in _held:  # a lock does not exclude its own process
        return False
    try:
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):
        return False
    _held.append(port)
    if len(_held) > _MOST_HELD:
        fcntl.lockf(_locks(), fcntl.LOCK_UN, 1, _held.popleft())
    return True


@cache
def _locks() -> int:
    """A lock file. The byte at a port's number is locked by the process that reserves the port."""
    return os.open(user_directory() / "ports", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_free(port: int) -> bool:
    host = loopback().strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def split_address(address: str, setting: str = "address") -> tuple[str, int]:
    """Host and port of "host:port" or "tcp://host:port". Raises ConfigError with `setting`
    otherwise.
    """
    host, _, port = address.rsplit("//", 1)[-1].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{setting} is not an address", seen=address, allowed="host:port")
    return host.strip("[]"), int(port)


def interface_to(address: str) -> str:
    """Name of the network interface from which this machine reaches `host:port`. Raises OSError
    without a route.
    """
    import psutil  # import late: the client installs without psutil

    host, port = split_address(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        own = probe.getsockname()[0]
    held = psutil.net_if_addrs().items()
    names = (name for name, all_of in held if own in [one.address for one in all_of])
    return next(names, processes.LOOPBACK)  # Linux lists 127.0.0.1 alone


def require_free(address: str, setting: str) -> None:
    """Raises Unavailable with port and setting if `address` is in use; port 0 is always free.

    Raises ConfigError if the address cannot be bound for another reason.
    """
    host, port = split_address(address, setting)
    if port == 0:
        return
    try:
        bound(host, port).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            message = f"{setting} cannot be bound: {error.strerror}"
            raise ConfigError(message, seen=address) from error
        raise Unavailable(
            f"port {port} is in use; stop what listens there or set {setting} to another address",
            reason="PORT_IN_USE",
            seen=address,
        ) from error


def bound(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the first local address of the host, IPv4 before IPv6.

    The socket does not listen yet. Raises OSError if the host has no local address or the port is
    taken.
    """
    known = loopback().strip("[]") if host == "localhost" else host or None  # None: a wildcard
    found = socket.getaddrinfo(known, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    failures = []
    for family, _, _, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        made = socket.socket(family)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError as error:
            made.close()
            failures.append(error)
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            raise
        return made
    raise failures[0]
