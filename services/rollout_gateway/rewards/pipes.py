"""Carries messages between the gateway and a child that scores, and runs the child's loop.

A message is a line of JSON, so neither side can make the other side run code. Messages use stdin
and stdout, which the child reserves at once: code that prints then writes to stderr, and code that
reads stdin gets end of file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from paceline.errors import ConfigError, DataLoss, InvalidInput
from paceline.local.processes import die_with_parent
from paceline.services.rollout_gateway.environments import Episode
from paceline.tagged_json import TaggedJson

MAX_BYTES = 64 << 20
"""Maximum bytes of one message."""
MAX_TRACE = 4000
"""Maximum characters of an exception's text in a message; the end is kept."""


@dataclass(frozen=True, slots=True)
class Load:
    """Import and build the rule at an import path; answered by Done or Refused."""

    path: str


@dataclass(frozen=True, slots=True)
class ScoreEpisodes:
    """Score episodes; answered by Rewards or Raised."""

    path: str  # of the rule; a reward model has none
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The child serves, or has built the rule."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A ConfigError that the gateway raises."""

    message: str
    seen: str | None
    allowed: str | None

    @classmethod
    def of(cls, error: ConfigError) -> Refused:
        """An error as an answer."""
        return cls(error.message, error.seen, error.allowed)

    def error(self) -> ConfigError:
        """The error to raise in the gateway."""
        return ConfigError(self.message, seen=self.seen, allowed=self.allowed)


@dataclass(frozen=True, slots=True)
class Raised:
    """A failure of the request, or of one episode."""

    text: str


@dataclass(frozen=True, slots=True)
class Rewards:
    """The scores, in the order of the episodes."""

    values: tuple[float | Raised | None, ...]


Request = Load | ScoreEpisodes
Answer = Done | Refused | Raised | Rewards
REQUESTS = TaggedJson[Request](Load, ScoreEpisodes)
ANSWERS = TaggedJson[Answer](Done, Refused, Raised, Rewards)


def encode(message: Request | Answer) -> bytes:
    """The message as one line. Raises InvalidInput above MAX_BYTES."""
    body = REQUESTS.encode(message) if isinstance(message, Request) else ANSWERS.encode(message)
    line = body + b"\n"
    if len(line) > MAX_BYTES:
        raise InvalidInput(
            "an episode is too large for a child process",
            seen=f"{len(line)} bytes",
            allowed=MAX_BYTES,
        )
    return line


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The line of the child's next answer.

    Raises IncompleteReadError at the end of the stream, DataLoss for a line that is too long.
    """
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise DataLoss("a message is too long", allowed=MAX_BYTES) from error


def read(file: BinaryIO) -> Request | None:
    """The gateway's next request, from a blocking file; None at its end. Raises DataLoss."""
    line = file.readline(MAX_BYTES)
    return REQUESTS.decode(line) if line.endswith(b"\n") else None


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers). Afterwards descriptor 0 is empty and descriptor 1 is stderr.

    The child dies with the gateway (on Linux; elsewhere the closed pipe ends it between calls). It
    ignores keyboard interrupts, because the gateway ends it.
    """
    requests, answers = os.dup(0), os.dup(1)  # not inherited by programs that the child starts
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def serve(answer: Callable[[Request], Answer], requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the gateway closes the pipe.

    An exception of `answer` is sent as Raised.
    """
    tell(answers, Done())
    while (request := read(requests)) is not None:
        try:
            given = answer(request)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a rule is the answer
            given = Raised("".join(traceback.format_exception(error))[-MAX_TRACE:])
        tell(answers, given)


def tell(answers: BinaryIO, value: Answer) -> None:
    """Send one message."""
    answers.write(encode(value))
    answers.flush()
