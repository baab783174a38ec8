"""Finds a run and opens a channel to its coordinator as its operator."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from paceline.cli.run_files import files_of, note_settings
from paceline.config import SecurityConfig, ServiceConfig, load_config
from paceline.errors import InvalidInput, NotFound, Unavailable
from paceline.local.tokens import token_at
from paceline.rpc import channel, rpc_errors
from paceline.v1.coordinator_pb2_grpc import CoordinatorServiceStub

DEADLINE_S = 5.0
"""For an answer of a coordinator."""


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Where a run's coordinator listens, and what opens it."""

    address: str
    security: SecurityConfig

    def channel(self) -> grpc.aio.Channel:
        """A channel that carries $PACELINE_TOKEN, else the token of the run that serves there."""
        security = self.security
        if not security.token and (token := token_at(self.address)):
            os.environ[security.token_env] = token
        return channel(self.address, security)


@contextmanager
def coordinator_answers(coordinator: Coordinator) -> Iterator[None]:
    """Raises Unavailable with the address when nobody answers a call of the block."""
    try:
        with rpc_errors():
            yield
    except Unavailable as error:
        raise Unavailable("no coordinator answers", seen=coordinator.address) from error


@asynccontextmanager
async def asked(
    coordinator: Coordinator, method: str, request: object
) -> AsyncIterator[tuple[Any, Any]]:
    """A stub of the coordinator, for as long as the block, and its answer to a first request.

    Raises Unavailable when nobody answers, and what the coordinator refuses it with.
    """
    async with coordinator.channel() as connection:
        stub = CoordinatorServiceStub(connection)  # type: ignore[no-untyped-call]
        with coordinator_answers(coordinator):
            answer = await getattr(stub, method)(request, timeout=DEADLINE_S)
        yield stub, answer


def coordinator_of(files: Sequence[Path], address: str | None = None) -> Coordinator:
    """The coordinator of the run with these settings; `address` is where it listens instead.

    Raises ConfigError for settings that cannot be read.
    """
    config = load_config(ServiceConfig, "local", files)
    return Coordinator(address or config.addresses.coordinator, config.security)


def find_coordinator(run: str, files: Sequence[Path]) -> Coordinator:
    """The coordinator of a run's directory, of an id below runs/, or at host:port.

    Raises NotFound when there is no such directory with a config.toml.
    """
    if not _directories(run) and run.rpartition(":")[2].isdecimal():
        return coordinator_of(files, run)
    return coordinator_of([run_directory(run) / "config.toml", *files])


def run_directory(run: str) -> Path:
    """The directory of a run, by itself or by its id below runs/. Raises NotFound."""
    for directory in _directories(run):
        return directory
    raise NotFound(
        "no such run",
        seen=run,
        allowed="a directory with config.toml, or its name in runs/; of one that goes on also "
        "the coordinator's host:port",
    )


def directory_of(run: str | None, settings: Sequence[Path]) -> Path:
    """The directory of a run by its name, or of the run with these settings, which are noted there
    where nobody has: services that were started one by one leave no config.toml.

    Raises NotFound, InvalidInput for neither or both.
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
