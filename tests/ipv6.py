"""Host names by which a test reaches this machine, with IPv6 where available."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest


def _has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


WITH_IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 loopback")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", pytest.param("[::1]", marks=WITH_IPV6))
