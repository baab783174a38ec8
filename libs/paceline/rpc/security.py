"""Tokens and TLS of both ends.

This module decides the scope of a token. Beyond loopback, tokens and TLS may be off only if the
settings permit it explicitly.
"""

import hmac
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import grpc

from paceline.addresses import is_loopback
from paceline.config import SecurityConfig
from paceline.errors import ConfigError
from paceline.rpc.status import NOT_ALLOWED, UNAUTHENTICATED

AUTHORIZATION = "authorization"
AGENT_METHODS = frozenset(["/paceline.v1.RolloutService/Generate"])
"""Methods that the agents' token opens; all other methods are for operators and services."""


class Scope(StrEnum):
    """Scope of a token."""

    AGENT = "agent"
    OPERATOR = "operator"


@lru_cache(maxsize=64)
def names_loopback(host: str) -> bool:
    """Whether the Host header of an HTTP request names this machine. Another name that resolves to
    loopback belongs to the page of another site (DNS rebinding). The port is optional.
    """
    if host.startswith("unix:"):
        return False  # here, unix:80 is a host called unix, not a socket
    return is_loopback(host)


def check_security(address: str, security: SecurityConfig) -> None:
    """Raises ConfigError for an incomplete TLS setting, and for an address beyond loopback without
    token or mutual TLS.
    """
    if bool(security.tls_cert) != bool(security.tls_key):
        seen = f"tls_cert={security.tls_cert!r} tls_key={security.tls_key!r}"
        raise ConfigError("security.tls_cert and security.tls_key go together", seen=seen)

    if security.agent_token and not security.token:
        message = "agents have a token and operators have none: they would be let in without"
        seen = f"${security.agent_token_env}"
        raise ConfigError(message, seen=seen, allowed=f"${security.token_env} beside it")
    if is_loopback(address) or security.allow_insecure:
        return
    needed = {
        f"a token in ${security.token_env}": security.token,
        "security.tls_cert and tls_key": security.tls_cert,
        "security.tls_ca": security.tls_ca,
    }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        message = f"{address} is reachable from other machines; missing: {', '.join(missing)}"
        allowed = "a loopback address, or token and TLS, or security.allow_insecure=true"
        raise ConfigError(message, reason="INSECURE_ADDRESS", seen=address, allowed=allowed)


def check_events(endpoint: str, security: SecurityConfig) -> None:
    """Raises ConfigError for a ZeroMQ endpoint beyond this machine without a CURVE key."""
    transport, _, place = endpoint.partition("://")
    local = transport in ("ipc", "inproc") or (transport == "tcp" and is_loopback(place))
    if not (local or security.curve_key or security.allow_insecure):
        message = f"{endpoint} is reachable from other machines; missing: security.curve_key"
        allowed = "a loopback endpoint, or security.curve_key, or security.allow_insecure=true"
        raise ConfigError(message, reason="INSECURE_ADDRESS", seen=endpoint, allowed=allowed)


def server_credentials(security: SecurityConfig) -> grpc.ServerCredentials | None:
    """TLS of a server. If tls_ca is set, clients must present a certificate signed by it.

    None without tls_cert.
    """
    if not security.tls_cert:
        return None
    pair = (_read(security.tls_key, "tls_key"), _read(security.tls_cert, "tls_cert"))
    authority = _read(security.tls_ca, "tls_ca") if security.tls_ca else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def channel_credentials(security: SecurityConfig) -> grpc.ChannelCredentials | None:
    """TLS of a client, with its own certificate if it has one.

    None without any TLS setting.
    """
    if not (security.tls_cert or security.tls_ca):
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(security.tls_ca, "tls_ca") if security.tls_ca else None,
        private_key=_read(security.tls_key, "tls_key") if security.tls_key else None,
        certificate_chain=_read(security.tls_cert, "tls_cert") if security.tls_cert else None,
    )


def scope_of(security: SecurityConfig, given: str) -> Scope | None:
    """Scope of a token; None for a wrong one. Without tokens every caller is an operator.

    Compares in constant time.
    """
    if not security.token:
        return Scope.OPERATOR
    if hmac.compare_digest(given.encode(), security.token.encode()):
        return Scope.OPERATOR
    agents = security.agent_token
    if agents and hmac.compare_digest(given.encode(), agents.encode()):
        return Scope.AGENT
    return None


def check_token(
    security: SecurityConfig, method: str, metadata: Iterable[tuple[str, str | bytes]]
) -> None:
    """Raises ConfigError unless the call carries a token for the method: UNAUTHENTICATED without a
    valid token, NOT_ALLOWED with the agents' token.
    """
    given = next((value for key, value in metadata if key == AUTHORIZATION), "")
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    scheme, _, token = text.partition(" ")
    scope = scope_of(security, token if scheme == "Bearer" else "")
    if scope is None:
        message = "the call carries no token or a wrong one"
        seen = "a token" if text else "no token"
        allowed = "authorization: Bearer <the server's token>"
        raise ConfigError(message, reason=UNAUTHENTICATED, seen=seen, allowed=allowed)
    if scope is Scope.AGENT and method not in AGENT_METHODS:
        message = "the agents' token does not open this"
        allowed = "authorization: Bearer <the operators' token>"
        raise ConfigError(message, reason=NOT_ALLOWED, seen=method, allowed=allowed)


def _read(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read security.{key}: {error.strerror}", seen=path) from error
