"""Which addresses stay on this machine, and which the proxy variables apply to."""

from __future__ import annotations

import pytest

from paceline.addresses import is_loopback, loopback, needs_ipv6, proxied
from paceline.local.ports import bound, split_address

OF_THIS_MACHINE = (
    "127.0.0.1:7400",
    "127.8.9.1:1",
    "localhost:7400",
    "LocalHost:7400",
    "[::1]:7400",
    "localhost",
    "[::1]",
    "unix:/tmp/x.sock",
    "unix:///tmp/x.sock",
    "http://127.0.0.1:7408",
    "http://user:word@localhost/v1?x=http://elsewhere",
    "https://[::1]:7408/v1",
    "0.0.0.0:7400",
    "http://[::]:7408",
)
OF_OTHERS = (
    "10.0.0.2:7400",
    "[2001:db8::1]:7400",
    "gateway:7401",
    "localhost.example.org:80",
    "http://127.0.0.1@example.org/",
    "https://example.org/127.0.0.1:80",
    "http://example.org?://127.0.0.1:80",
)


@pytest.mark.parametrize("address", OF_THIS_MACHINE)
def test_an_address_of_this_machine_is_not_proxied(address: str) -> None:
    assert not proxied(address)


@pytest.mark.parametrize("address", OF_OTHERS)
def test_an_address_of_another_host_is_proxied(address: str) -> None:
    assert proxied(address)


@pytest.mark.parametrize("address", ["http://127.0.0.1:80", "x@127.0.0.1:80", "0.0.0.0:80"])
def test_no_url_and_no_wildcard_passes_for_loopback_where_a_token_depends_on_it(
    address: str,
) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize("address", ["[::1]:7405", "[fe80::1%lo]:1", "nobody.invalid:7405"])
def test_an_ipv6_address_and_a_name_without_ipv4_need_ipv6(address: str) -> None:
    assert needs_ipv6(address)


@pytest.mark.parametrize("address", ["127.0.0.1:7405", "10.0.0.2:1"])
def test_an_ipv4_address_needs_no_ipv6(address: str) -> None:
    assert not needs_ipv6(address)


def test_the_loopback_of_this_machine_can_be_bound_as_it_is_spelled() -> None:
    host, port = split_address(f"{loopback()}:0")
    with bound(host, port) as found:
        assert found.getsockname()[0] == host
