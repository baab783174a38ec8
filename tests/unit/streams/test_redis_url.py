"""What a URL of a Redis says, and what is said of one that is none."""

from __future__ import annotations

import pytest
from redis.asyncio.connection import SSLConnection

from paceline.errors import ConfigError
from paceline.streams import connect
from paceline.streams.redis_url import parse_redis_url, shown


@pytest.mark.parametrize(
    ("url", "kind", "addresses", "words"),
    [
        ("redis://db:7000/3", "server", [("db", 7000)], "db:7000"),
        ("redis://db", "server", [("db", 6379)], "db:6379"),
        ("unix:///run/r.sock?db=0", "server", [("localhost", 6379)], "/run/r.sock"),
        (
            "redis+cluster://a:7000,b,[::1]:7002",
            "cluster",
            [("a", 7000), ("b", 6379), ("::1", 7002)],
            "the cluster of a:7000,b:6379,::1:7002",
        ),
        (
            "redis+sentinel://a,b:7001/my%20store",
            "sentinel",
            [("a", 26379), ("b", 7001)],
            "my store of the Sentinels a:26379,b:7001",
        ),
    ],
)
def test_a_url_names_its_servers(
    url: str, kind: str, addresses: list[tuple[str, int]], words: str
) -> None:
    found = parse_redis_url(url)
    assert (found.kind, list(found.addresses), str(found)) == (kind, addresses, words)
    assert (found.tls, found.has_password, found.replicas) == (False, False, 0)


def test_password_tls_and_options_are_those_of_every_connection() -> None:
    url = "rediss+sentinel://u:p%40w@a,b/store/2?replicas=1&ssl_ca_certs=ca&sentinel_password=s"
    found = parse_redis_url(url)
    assert (found.service, found.replicas, found.tls, found.has_password) == (
        "store",
        1,
        True,
        True,
    )
    expected = {"username": "u", "password": "p@w", "db": 2, "ssl_ca_certs": "ca"}
    assert found.settings == {**expected, "connection_class": SSLConnection}
    assert found.sentinel_settings == {"password": "s", "ssl_ca_certs": "ca"}
    assert "p@w" not in repr(found)
    assert shown(url) == "rediss+sentinel://a,b/store/2"


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("localhost:1", "localhost"),
        ("redis+clutser://a:1", "there is no redis+clutser://"),
        ("unix+cluster:///s", "there is no unix+cluster://"),
        ("http+cluster://a:1", "one of the following schemes"),
        ("redis+cluster://", "'' is no host:port"),
        ("redis+cluster://a:1,,b:2", "'' is no host:port"),
        ("redis+cluster://a:port", "port"),
        ("redis+cluster://a:1/3", "no databases but 0"),
        ("redis+sentinel://a:1", "name of the master is missing"),
        ("redis+sentinel://a:1/store/x", "x is no number of a database"),
        ("redis+cluster://a:1?replicas=one", "replicas=one is no number"),
        ("redis+cluster://:s3cret@a:port", "port"),
    ],
)
def test_a_url_that_is_none_is_refused_with_what_is_allowed(url: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"not a Redis URL: .*redis\+cluster://host:port") as told:
        connect(url)
    assert wrong in str(told.value)
    assert "s3cret" not in str(told.value)
