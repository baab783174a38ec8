"""The program of a child that scores, and its messages.

A message is a line of JSON, so neither side can make the other side run code. Messages use stdin
and stdout, which the child reserves at once: code that prints then writes to stderr, and code that
reads stdin gets end of file. The process imports no more than the rules need.
"""

import asyncio
import inspect
import os
import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from paceline.errors import ConfigError, DataLoss, InvalidInput
from paceline.local.processes import die_with_parent
from paceline.plugins import import_object
from paceline.services.rollout_gateway.environments import Episode
from paceline.tagged_json import TaggedJson

MAX_BYTES = 64 << 20
"""Maximum bytes of one message."""
MAX_TRACE = 4000
"""Maximum characters of an exception's text in a message; the end is kept."""
ALLOWED = (
    "package.module:Class or path/to/file.py:Class, a class with score(episode) -> float | None"
)


@dataclass(frozen=True, slots=True)
class Load:
    """Import a rule and build it with the arguments; answered by Rewards or Refused."""

    path: str
    arguments: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreEpisodes:
    """Score episodes by a loaded rule; answered by Rewards or Raised."""

    path: str
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A ConfigError that the gateway raises."""

    message: str
    seen: str | None
    allowed: str | None


@dataclass(frozen=True, slots=True)
class Raised:
    """A failure of the request, or of one episode."""

    text: str


@dataclass(frozen=True, slots=True)
class Rewards:
    """The scores, in the order of the episodes."""

    values: tuple[float | Raised | None, ...] = ()


Request = Load | ScoreEpisodes
Answer = Refused | Raised | Rewards
REQUESTS = TaggedJson[Request](Load, ScoreEpisodes)
ANSWERS = TaggedJson[Answer](Refused, Raised, Rewards)


def encode(message: Request | Answer) -> bytes:
    """The message as one line. Raises InvalidInput above MAX_BYTES."""
    body = REQUESTS.encode(message) if isinstance(message, Request) else ANSWERS.encode(message)
    if len(body) >= MAX_BYTES:
        seen = f"{len(body)} bytes"
        raise InvalidInput(
            "an episode is too large for a child process", seen=seen, allowed=MAX_BYTES
        )
    return body + b"\n"


async def receive(reader: asyncio.StreamReader) -> Answer:
    """The child's next answer.

    Raises IncompleteReadError at the end of the stream, DataLoss for a line that is too long or no
    answer.
    """
    try:
        return ANSWERS.decode(await reader.readuntil(b"\n"))
    except asyncio.LimitOverrunError as error:
        raise DataLoss("a message is too long", allowed=MAX_BYTES) from error


def read(file: BinaryIO) -> Request | None:
    """The gateway's next request, from a blocking file; None at its end. Raises DataLoss."""
    line = file.readline(MAX_BYTES)
    return REQUESTS.decode(line) if line.endswith(b"\n") else None


class BatchRule(ABC):
    """A rule that scores several episodes at once."""

    @abstractmethod
    def score_batch(self, episodes: tuple[Episode, ...]) -> tuple[float | Raised | None, ...]:
        """One value for each episode; Raised for an episode that cannot be read."""


class OwnRule(BatchRule):
    """One object of a class with `score(episode)`, plain or a coroutine."""

    def __init__(self, rule: Any, runner: asyncio.Runner) -> None:
        self._rule = rule
        self._runner = runner

    def score_batch(self, episodes: tuple[Episode, ...]) -> tuple[float | Raised | None, ...]:
        """Raises the rule's errors, and TypeError for a value that is no number."""
        return tuple(self._score(episode) for episode in episodes)

    def _score(self, episode: Episode) -> float | None:
        """None, or the number as float; numpy and torch values with one element count as numbers.

        A coroutine runs to its end, always on the same event loop.
        """
        value = self._rule.score(episode)
        if inspect.isawaitable(value):
            value = self._runner.run(_await_result(value))
        if value is None:
            return None
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise TypeError(
                f"score has to return a float or None, not {type(value).__name__}: {value!r:.200}"
            )
        return float(value)


async def _await_result(value: Any) -> Any:
    return await value


def build_rule(load: Load, runner: asyncio.Runner) -> BatchRule:
    """Raises ConfigError when the path leads to no such class or the class cannot be built."""
    try:
        rule = import_object(load.path)(**load.arguments)
    except (Exception, SystemExit) as error:
        if isinstance(error, ConfigError) and load.arguments:
            raise
        message = f"a reward rule cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(message, seen=load.path) from error
    if isinstance(rule, BatchRule):
        return rule
    if not callable(getattr(rule, "score", None)):
        raise ConfigError("a reward rule has no method score", seen=load.path, allowed=ALLOWED)
    return OwnRule(rule, runner)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
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


def _answer(request: Request, rules: dict[str, BatchRule], runner: asyncio.Runner) -> Answer:
    try:
        if isinstance(request, ScoreEpisodes):
            return Rewards(rules[request.path].score_batch(request.episodes))
        rules[request.path] = build_rule(request, runner)
        return Rewards()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a rule is the answer
        if isinstance(error, ConfigError) and isinstance(request, Load):
            return Refused(error.message, error.seen, error.allowed)
        return Raised("".join(traceback.format_exception(error))[-MAX_TRACE:])


def main() -> None:
    """Answer one request at a time until the gateway closes the pipe."""
    requests, answers = _take_pipes()
    rules: dict[str, BatchRule] = {}
    with asyncio.Runner() as runner:
        while (request := read(requests)) is not None:
            answers.write(encode(_answer(request, rules, runner)))
            answers.flush()
