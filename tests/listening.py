"""Listening sockets of processes, as the kernel lists them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import psutil


def open_doors(processes: Iterable[psutil.Process]) -> tuple[list[tuple[str, int]], set[str]]:
    """(address, port) of every listening TCP socket and every UDP socket open to any sender, and
    the paths of unix sockets. A path in the abstract namespace begins with @.
    """
    inet, unix = [], set()
    for process in processes:
        for one in process.net_connections("inet"):
            if not one.raddr:
                inet.append((one.laddr.ip, one.laddr.port))
        unix |= {str(one.laddr) for one in process.net_connections("unix") if one.laddr}
    return inet, unix


def beyond_loopback(inet: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Sockets that other machines reach."""
    return [one for one in inet if not _address(one[0]).is_loopback]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """A v4 address behind a dual-stack socket counts as v4."""
    found = ipaddress.ip_address(text)
    return getattr(found, "ipv4_mapped", None) or found
