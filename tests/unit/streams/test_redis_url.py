"""The parts of a Redis URL, and the errors of invalid URLs."""

from __future__ import annotations

import pytest
from redis.asyncio.connection import SSLConnection

from paceline.errors import ConfigError
from paceline.streams import connect
from paceline.streams.connection import parse_redis_url, shown


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("redis://db:7000/3", "db"),
        ("redis://db", "db"),
        ("redis://[::1]:7000", "::1"),
        ("unix:///run/r.sock?db=0", "localhost"),
    ],
)
def test_a_url_names_its_server(url: str, host: str) -> None:
    found = parse_redis_url(url)
    assert found.host == host
    assert (found.tls, found.has_password) == (False, False)


def test_password_tls_and_options_are_read_and_not_shown() -> None:
    url = "rediss://u:p%40w@a:1/2?ssl_ca_certs=ca"
    found = parse_redis_url(url)
    assert (found.tls, found.has_password) == (True, True)
    expected = {"username": "u", "password": "p@w", "db": 2, "ssl_ca_certs": "ca"}
    address = {"host": "a", "port": 1, "connection_class": SSLConnection}
    assert found.settings == expected | address
    assert "p@w" not in repr(found)
    assert shown(url) == "rediss://a:1/2"


@pytest.mark.parametrize(
    "url",
    ["redis+cluster://a:1,b:2", "rediss+sentinel://u:s3cret@a,b/store", "unix+cluster:///s"],
)
def test_a_cluster_and_sentinels_are_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="one Redis server; clusters and Sentinels") as refused:
        connect(url)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("localhost:1", "localhost"),
        ("http://a:1", "one of the following schemes"),
        ("redis://:s3cret@a:port", "port"),
    ],
)
def test_a_url_that_is_none_is_refused_with_what_is_allowed(url: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"not a Redis URL: .*redis://host:port") as told:
        connect(url)
    assert wrong in str(told.value)
    assert "s3cret" not in str(told.value)
