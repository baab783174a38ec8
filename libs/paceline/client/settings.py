"""Settings of a client with their checks: the gateway's address, credentials, deadlines and
retries.
"""

from __future__ import annotations

import os
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from paceline.errors import InvalidInput
from paceline.local.tokens import token_at

TOKEN_VARIABLES = ("PACELINE_AGENT_TOKEN", "PACELINE_TOKEN")
DEADLINE_S = 30.0
GENERATION_DEADLINE_S = 600.0
MAX_CONNECTIONS = 256
KEEPALIVE_S = 2.0
"""Seconds after which idle connections are closed. The server closes them later (uvicorn: after 5
s), so no call meets a closing connection.
"""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts: doubling from `first_s` to `most_s`, each drawn between its half and
    its full value.
    """

    first_s: float = 0.25
    most_s: float = 8.0
    draw: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic

    def wait_s(self, attempt: int, asked_s: float | None) -> float:
        """Seconds before the attempt after `attempt` (from 1), at least the server's request."""
        whole = min(self.first_s * 2.0 ** min(attempt - 1, 32), self.most_s)
        drawn = whole * (0.5 + 0.5 * self.draw())
        return drawn if asked_s is None else asked_s + min(drawn, self.first_s)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Checked settings of a client."""

    base_url: str  # scheme, host, port and optionally a path; no /v1, no slash at the end
    token: str = field(repr=False)
    deadline_s: float  # of a call that does not generate
    generation_deadline_s: float
    backoff: Backoff
    finds_token: bool = False
    """Search for the token of the local server until one is found: the run may begin later than the
    agent.
    """

    @property
    def current_token(self) -> str:
        """The agents' token, or "" without one."""
        return self.token or (find_token(self.base_url) if self.finds_token else "")

    @classmethod
    def of(
        cls,
        base_url: str,
        token: str | None,
        deadline_s: float = DEADLINE_S,
        generation_deadline_s: float = GENERATION_DEADLINE_S,
        backoff: Backoff | None = None,
    ) -> ClientSettings:
        """Checks and completes settings. Raises InvalidInput."""
        url = _root(base_url)
        given = find_token(url) if token is None else token
        check_header(given, "token")
        for name, value in (
            ("deadline_s", deadline_s),
            ("generation_deadline_s", generation_deadline_s),
        ):
            check_seconds(name, value)
        return cls(
            url, given, deadline_s, generation_deadline_s, backoff or Backoff(), token is None
        )


def find_token(base_url: str) -> str:
    """The agents' token: from $PACELINE_AGENT_TOKEN, $PACELINE_TOKEN, or the run served there on
    this machine; "" without one.
    """
    given = (os.environ.get(name, "") for name in TOKEN_VARIABLES)
    return next(filter(None, given), "") or token_at(urlsplit(base_url).netloc)


def check_seconds(name: str, value: float) -> float:
    """A positive, finite number of seconds. Raises InvalidInput."""
    if not 0 < value < float("inf"):
        raise InvalidInput(
            f"{name} is not a number of seconds", seen=value, allowed="more than 0, finite"
        )
    return value


def check_header(value: str, name: str) -> str:
    """Text for a header. Raises InvalidInput without showing the text."""
    if not value.isascii() or not value.isprintable():
        raise InvalidInput(
            f"the {name} holds characters that a header cannot carry", allowed="printable ASCII"
        )
    return value


def verification(verify: bool | ssl.SSLContext, ca: str | Path | None) -> bool | ssl.SSLContext:
    """httpx's `verify`: the usual authorities, `ca` alone, a context's authorities, or no check.

    Raises InvalidInput for `ca` without verify=True, or for an invalid file.
    """
    if ca is None:
        return verify
    if verify is not True:
        raise InvalidInput(
            "ca goes with verify=True alone; a context names its own", seen=f"verify={verify!r}"
        )
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput("ca is not a PEM file of certificates", seen=str(ca)) from error


def _root(base_url: str) -> str:
    try:
        parts = urlsplit(base_url)
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or a broken IPv6 address
        well_formed = False
    if not well_formed:
        raise InvalidInput(
            "base_url is not a URL", seen=repr(base_url), allowed="http(s)://host[:port][/path]"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidInput(
            "base_url holds a user, a query or a fragment", allowed="http(s)://host[:port][/path]"
        )
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")
