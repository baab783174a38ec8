"""Finds a run and opens an operator's channel to its coordinator."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from paceline.cli.run_files import files_of, note_settings
from paceline.config import SecurityConfig, ServiceConfig
from paceline.config.load import load_config
from paceline.errors import InvalidInput, NotFound, Unavailable
from paceline.local.tokens import token_at
from paceline.rpc import channel, rpc_errors
from paceline.v1.coordinator_pb2_grpc import CoordinatorServiceStub

DEADLINE_S = 5.0
"""Seconds to wait for a coordinator's reply."""


@dataclass(frozen=True, slots=True)
class Coordinator:
    """A coordinator's address and the security settings for a channel."""

    address: str
    security: SecurityConfig

    def channel(self) -> grpc.aio.Channel:
        """A channel with $PACELINE_TOKEN, or else with the token of the run at this address."""
        security = self.security
        if not security.token and (token := token_at(self.address)):
            os.environ[security.token_env] = token
        return channel(self.address, security)


def coordinator_at(connection: grpc.aio.Channel) -> Any:
    """A stub of the coordinator at the other end."""
    return CoordinatorServiceStub(connection)  # type: ignore[no-untyped-call]


@asynccontextmanager
async def opened(coordinator: Coordinator) -> AsyncIterator[tuple[grpc.aio.Channel, Any]]:
    """Yields a channel and a stub of the coordinator.

    A call in the block raises Unavailable with the address without a reply, and the error of a
    rejected request.
    """
    async with coordinator.channel() as connection:
        try:
            with rpc_errors():
                yield connection, coordinator_at(connection)
        except Unavailable as error:
            raise Unavailable("no coordinator answers", seen=coordinator.address) from error


def coordinator_of(files: Sequence[Path], address: str | None = None) -> Coordinator:
    """The coordinator of the run with these settings; `address` overrides its address.

    Raises ConfigError if the settings cannot be read.
    """
    config = load_config(ServiceConfig, "local", files)
    return Coordinator(address or config.addresses.coordinator, config.security)


def find_coordinator(
    run: str | None, files: Sequence[Path], address: str | None = None
) -> Coordinator:
    """The coordinator of a run: by directory, by id below runs/, or by host:port; None: by settings
    and `address`.

    Raises NotFound without a directory that has a config.toml.
    """
    if run is None:
        return coordinator_of(files, address)
    if not _directories(run) and run.rpartition(":")[2].isdecimal():
        return coordinator_of(files, run)
    return coordinator_of([run_directory(run) / "config.toml", *files])


def run_directory(run: str) -> Path:
    """The directory of a run, by path or by id below runs/. Raises NotFound."""
    for directory in _directories(run):
        return directory
    raise NotFound(
        "no such run",
        seen=run,
        allowed="a directory with config.toml, or its name in runs/; of one that goes on also "
        "the coordinator's host:port",
    )


def directory_of(run: str | None, settings: Sequence[Path]) -> Path:
    """The directory of a run, by name or by settings.

    Services that are started separately leave no config.toml, so the settings are written there if
    absent.

    Raises NotFound, and InvalidInput unless exactly one of `run` and `settings` is given.
    """
    if (run is None) == (not settings):
        raise InvalidInput("which run?", seen=run, allowed="the run, or --config with its settings")
    if run is not None:
        return run_directory(run)
    files = files_of(load_config(ServiceConfig, "local", settings))
    if not files.directory.is_dir():
        raise NotFound("this run has not begun", seen=files.directory)
    if not files.config.is_file():
        note_settings(files, settings)
    return files.directory


def _directories(run: str) -> list[Path]:
    places = [Path(run), Path("runs") / run]
    return [place for place in places if (place / "config.toml").is_file()]
