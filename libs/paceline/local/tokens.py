"""The tokens of a run that its user has not set: where they lie, and where the CLI and clients on
this machine find them.

`<run.dir>/tokens/operator` and `agent` hold the tokens. Whoever listens also writes the one that
opens its port to `<user's directory>/tokens/<port>`, so that a client needs the address alone.
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
    """Where the environment holds no token, set it to that of the run, made if need be; children
    inherit it.

    Raises ConfigError when the run's directory cannot hold it.
    """
    security = config.security
    if not security.run_tokens:
        return
    for variable, name in ((security.token_env, OPERATOR), (security.agent_token_env, AGENT)):
        if variable and not os.environ.get(variable):
            os.environ[variable] = read_or_make(token_file(config, name))


def token_file(config: ServiceConfig, name: str) -> Path:
    """Where the run keeps its `operator` or `agent` token."""
    return Path(config.run.dir).absolute() / "tokens" / name


def example_call(config: ServiceConfig, port: int | str) -> str:
    """A line to copy for the HTTP API of a gateway that listens at this port."""
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
    """While the block runs, `token_at` finds the token of each of these addresses."""
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
    """The token of whoever listens at `host:port` on this machine; "" where none is known.

    Raises ConfigError where the user's directory is not private.
    """
    port = _loopback_port(address)
    if not port:
        return ""
    try:
        pid, _, token = (user_directory() / "tokens" / port).read_text().partition(" ")
    except OSError:
        return ""
    # Who has died may have somebody else's server in its place.
    return token if pid.isdecimal() and exists(int(pid)) else ""


def _loopback_port(address: str) -> str:
    port = address.rpartition(":")[2]
    return port if is_loopback(address) and port.isdecimal() and int(port) else ""


def read_or_make(path: Path) -> str:
    """The secret in a file of this user alone, a random one where there is none. Raises
    ConfigError.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            made = _private_file(path, secrets.token_urlsafe(32))
            # A link, since another service of the run may make it at the same time.
            with suppress(FileExistsError):
                path.hardlink_to(made)
            made.unlink()
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"the run's token cannot be kept: {error.strerror}",
            seen=path,
            allowed="a directory that this user may write, or security.run_tokens=false",
        ) from error
    if not token:
        raise ConfigError("the run's token is empty", seen=path, allowed="no such file, or a token")
    return token


def _private_file(beside: Path, text: str) -> Path:
    """A new file in that directory, for this user alone."""
    made = beside.with_name(f".{beside.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return made
