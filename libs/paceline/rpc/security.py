"""Token and TLS of both ends.

Owns the rule that beyond loopback neither may be off unless the settings say so.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path

import grpc

from paceline.config import SecurityConfig
from paceline.errors import ConfigError
from paceline.rpc.status import UNAUTHENTICATED

AUTHORIZATION = "authorization"


def is_loopback(address: str) -> bool:
    """Whether `host:port`, `[ipv6]:port` or `unix:path` stays on this machine; names other than
    localhost do not.
    """
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_security(address: str, security: SecurityConfig) -> None:
    """Raises ConfigError for half a TLS setting, and for an address beyond loopback without token
    or mutual TLS.
    """
    if bool(security.tls_cert) != bool(security.tls_key):
        raise ConfigError(
            "security.tls_cert and security.tls_key go together",
            seen=f"tls_cert={security.tls_cert!r} tls_key={security.tls_key!r}",
        )

    if is_loopback(address) or security.allow_insecure:
        return
    needed = {
        f"a token in ${security.token_env}": security.token,
        "security.tls_cert and tls_key": security.tls_cert,
        "security.tls_ca": security.tls_ca,
    }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        raise ConfigError(
            f"{address} is reachable from other machines; missing: {', '.join(missing)}",
            reason="INSECURE_ADDRESS",
            seen=address,
            allowed="a loopback address, or token and TLS, or security.allow_insecure=true",
        )


def check_events(endpoint: str, security: SecurityConfig) -> None:
    """Raises ConfigError for a ZeroMQ endpoint beyond this machine without a CURVE key."""
    transport, _, place = endpoint.partition("://")
    local = transport in ("ipc", "inproc") or (transport == "tcp" and is_loopback(place))
    if not (local or security.curve_key or security.allow_insecure):
        raise ConfigError(
            f"{endpoint} is reachable from other machines; missing: security.curve_key",
            reason="INSECURE_ADDRESS",
            seen=endpoint,
            allowed="a loopback endpoint, or security.curve_key, or security.allow_insecure=true",
        )


def server_credentials(security: SecurityConfig) -> grpc.ServerCredentials | None:
    """TLS of a server; clients must show a certificate of tls_ca when that is set.

    None without tls_cert.
    """
    if not security.tls_cert:
        return None
    pair = (_read(security.tls_key, "tls_key"), _read(security.tls_cert, "tls_cert"))
    authority = _read(security.tls_ca, "tls_ca") if security.tls_ca else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def channel_credentials(security: SecurityConfig) -> grpc.ChannelCredentials | None:
    """TLS of a client; it shows its own certificate when it has one.

    None without any TLS setting.
    """
    if not (security.tls_cert or security.tls_ca):
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(security.tls_ca, "tls_ca") if security.tls_ca else None,
        private_key=_read(security.tls_key, "tls_key") if security.tls_key else None,
        certificate_chain=_read(security.tls_cert, "tls_cert") if security.tls_cert else None,
    )


def check_token(token: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Raises ConfigError (reason UNAUTHENTICATED) unless the call carries the token; compares in
    constant time.
    """
    if not token:
        return
    given = next((value for key, value in metadata if key == AUTHORIZATION), "")
    given_bytes = given if isinstance(given, bytes) else given.encode()
    if not hmac.compare_digest(given_bytes, f"Bearer {token}".encode()):
        raise ConfigError(
            "the call carries no token or a wrong one",
            reason=UNAUTHENTICATED,
            seen="a token" if given_bytes else "no token",
            allowed="authorization: Bearer <the server's token>",
        )


def _read(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read security.{key}: {error.strerror}", seen=path) from error
