"""Sites, keys and errors of HTTP requests."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from paceline import errors
from paceline.rpc.http_requests import api_key, check_site, status_of


def request(**headers: str) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    raw = [(name.encode(), value.encode()) for name, value in named.items()]
    return Request({"type": "http", "headers": raw})


OWN = "http://localhost:8000"


@pytest.mark.parametrize(
    ("host", "origin", "origins"),
    [
        ("evil.example", "", []),
        ("localhost:8000", OWN, None),
        ("localhost:8000", "http://evil.example", []),
        ("localhost:8000", "http://[", []),
        ("localhost:8000", "null", [OWN]),
    ],
)
def test_a_foreign_host_or_page_is_refused(
    host: str, origin: str, origins: list[str] | None
) -> None:
    given = request(host=host, origin=origin) if origin else request(host=host)
    with pytest.raises(errors.InvalidInput) as caught:
        check_site(given, loopback=True, origins=origins)
    assert status_of(caught.value)[0] == 403


@pytest.mark.parametrize(
    ("origin", "origins"),
    [(OWN, []), ("http://page.example", ["http://page.example"]), ("http://any.example", ["*"])],
)
def test_the_own_page_and_the_pages_that_are_set_are_let_in(
    origin: str, origins: list[str]
) -> None:
    check_site(request(host="localhost:8000", origin=origin), loopback=True, origins=origins)


def test_a_key_is_a_bearer_token_or_has_its_own_header() -> None:
    assert api_key(request(authorization="Bearer a", x_api_key="b")) == "a"
    assert api_key(request(x_api_key="b")) == "b"


def test_a_reason_comes_before_the_class_of_an_error() -> None:
    assert status_of(errors.InvalidInput("x", reason="BODY_TOO_LARGE"))[0] == 413
    assert status_of(errors.InvalidInput("x"))[0] == 400
    assert status_of(errors.InternalError("x"))[0] == 500
