"""Creates a run's tokens if the user sets none, and finds them for clients on this machine.

`<run.dir>/tokens/operator` and `agent` hold the tokens. A listening service also writes the token
of its port to `<user's directory>/tokens/<port>`. So a client on this machine needs only the
address.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.addresses import is_loopback
from paceline.errors import ConfigError
from paceline.local.processes import exists
from paceline.local.user_directory import user_directory

if TYPE_CHECKING:
    from paceline.config import ServiceConfig

OPERATOR, AGENT = "operator", "agent"


def use_run_tokens(config: ServiceConfig) -> None:
    """Sets empty token variables to the run's tokens, created if absent; child processes inherit
    them.

    Raises ConfigError if the run's directory cannot hold them.
    """
    security = config.security
    if not security.run_tokens:
        return
    for variable, name in ((security.token_env, OPERATOR), (security.agent_token_env, AGENT)):
        if variable and not os.environ.get(variable):
            os.environ[variable] = read_or_make(token_file(config, name))


def token_file(config: ServiceConfig, name: str) -> Path:
    """Path of the run's `operator` or `agent` token."""
    return Path(config.run.dir).absolute() / "tokens" / name


def example_call(config: ServiceConfig, port: int | str) -> str:
    """A shell command that calls the HTTP API of a gateway at this port."""
    security, file = config.security, token_file(config, AGENT)
    scheme = "https" if security.tls_cert else "http"
    line = f"curl {scheme}://{config.addresses.http.rpartition(':')[0]}:{port}/v1/models"
    if not security.token:
        return f"{line}  # no token: every user of this machine may use and steer this gateway"
    kept = security.run_tokens and file.exists()
    token = f"$(cat {shlex.quote(str(file))})" if kept else f"${security.token_env}"
    return f'{line} -H "Authorization: Bearer {token}"'


@contextmanager
def announced(tokens: Mapping[str, str]) -> Iterator[None]:
    """Publishes the tokens of these addresses for `token_at`, for the duration of the block."""
    written: dict[Path, str] = {}
    for address, token in tokens.items():
        port = _loopback_port(address)
        if token and port:
            path = user_directory() / "tokens" / port
            path.parent.mkdir(mode=0o700, exist_ok=True)
            written[path] = f"{os.getpid()} {token}"
            _private_file(path, written[path]).replace(path)
    try:
        yield
    finally:
        for path, text in written.items():
            with suppress(OSError):
                if path.read_text() == text:
                    path.unlink()


def token_at(address: str) -> str:
    """The token of the server at `host:port` on this machine; "" if unknown.

    Raises ConfigError if the user's directory is not private.
    """
    port = _loopback_port(address)
    if not port:
        return ""
    try:
        pid, _, token = (user_directory() / "tokens" / port).read_text().partition(" ")
    except OSError:
        return ""
    # After a server's death, another user's server may have its port.
    return token if pid.isdecimal() and exists(int(pid)) else ""


def _loopback_port(address: str) -> str:
    port = address.rpartition(":")[2]
    return port if is_loopback(address) and port.isdecimal() and int(port) else ""


def read_or_make(path: Path) -> str:
    """The secret in this user's private file; creates a random secret if the file is absent. Raises
    ConfigError.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            made = _private_file(path, secrets.token_urlsafe(32))
            # Link atomically: another service of the run may create the file at the same time.
            with suppress(FileExistsError):
                path.hardlink_to(made)
            made.unlink()
        token = path.read_text().strip()
    except OSError as error:
        message = f"the run's token cannot be kept: {error.strerror}"
        allowed = "a directory that this user may write, or security.run_tokens=false"
        raise ConfigError(message, seen=path, allowed=allowed) from error
    if not token:
        raise ConfigError("the run's token is empty", seen=path, allowed="no such file, or a token")
    return token


def _private_file(beside: Path, text: str) -> Path:
    """Creates a temporary file beside `beside` that only this user can read."""
    made = beside.with_name(f".{beside.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return made
