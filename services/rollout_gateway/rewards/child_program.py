"""The program of a child that scores, and its messages.

A message is a line of JSON, so neither side can make the other side run code. Messages use stdin
and stdout, which the child reserves at once: code that prints then writes to stderr, and code that
reads stdin gets end of file. The process imports no more than the rules need.
"""

import asyncio
import inspect
import traceback
from dataclasses import dataclass
from typing import Any, BinaryIO

from paceline.errors import ConfigError, InvalidInput
from paceline.local.processes import MAX_LINE_BYTES, reserve_pipes
from paceline.plugins import import_object
from paceline.services.rollout_gateway.environments import Episode
from paceline.tagged_json import TaggedJson

MAX_TRACE = 4000
"""Maximum characters of an exception's text in a message; the end is kept."""
_PLACES = "package.module:Class or path/to/file.py:Class"
ALLOWED = f"{_PLACES}, a class with score(episode) -> float | None"


@dataclass(frozen=True, slots=True)
class RuleRequest:
    """Scores an episode by the rule at an import path, which is built on first use. Without an
    episode the rule is only built. Answered by Scored, Refused or Raised.
    """

    path: str
    episode: Episode | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A ConfigError that the gateway raises."""

    message: str
    seen: str | None
    allowed: str | None


@dataclass(frozen=True, slots=True)
class Raised:
    """A failure of the request."""

    text: str


@dataclass(frozen=True, slots=True)
class Scored:
    """The rule's value."""

    value: float | None = None


Answer = Refused | Raised | Scored
REQUESTS = TaggedJson[RuleRequest](RuleRequest)
ANSWERS = TaggedJson[Answer](Refused, Raised, Scored)


def encode(message: RuleRequest | Answer) -> bytes:
    """The message as one line. Raises InvalidInput above MAX_LINE_BYTES."""
    body = REQUESTS.encode(message) if isinstance(message, RuleRequest) else ANSWERS.encode(message)
    if len(body) >= MAX_LINE_BYTES:
        text, seen = "an episode is too large for a child process", f"{len(body)} bytes"
        raise InvalidInput(text, seen=seen, allowed=MAX_LINE_BYTES)
    return body + b"\n"


def read(file: BinaryIO) -> RuleRequest | None:
    """The gateway's next request, from a blocking file; None at its end. Raises DataLoss."""
    line = file.readline(MAX_LINE_BYTES)
    return REQUESTS.decode(line) if line.endswith(b"\n") else None


def score(rule: Any, episode: Episode, runner: asyncio.Runner) -> float | None:
    """None, or the number as float; numpy and torch values with one element count as numbers.

    A coroutine runs to its end, always on the same event loop. Raises the rule's errors, and
    TypeError for a value that is no number.
    """

    async def awaited(value: Any) -> Any:
        return await value

    value = rule.score(episode)
    if inspect.isawaitable(value):
        value = runner.run(awaited(value))
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        kind = type(value).__name__
        raise TypeError(f"score has to return a float or None, not {kind}: {value!r:.200}")
    return float(value)


def build_rule(path: str) -> Any:
    """A user's rule. Raises ConfigError when the path leads to no such class or the class cannot be
    built.
    """
    try:
        rule = import_object(path)()
    except (Exception, SystemExit) as error:
        message = f"a reward rule cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(message, seen=path) from error
    if not callable(getattr(rule, "score", None)):
        raise ConfigError("a reward rule has no method score", seen=path, allowed=ALLOWED)
    return rule


def _answer(request: RuleRequest, rules: dict[str, Any], runner: asyncio.Runner) -> Answer:
    episode = request.episode
    try:
        if request.path not in rules:
            rules[request.path] = build_rule(request.path)
        return Scored() if episode is None else Scored(score(rules[request.path], episode, runner))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a rule is the answer
        if isinstance(error, ConfigError) and episode is None:
            return Refused(error.message, error.seen, error.allowed)
        return Raised("".join(traceback.format_exception(error))[-MAX_TRACE:])


def main() -> None:
    """Answer one request at a time until the gateway closes the pipe."""
    requests, answers = reserve_pipes()
    rules: dict[str, Any] = {}
    with asyncio.Runner() as runner:
        while (request := read(requests)) is not None:
            answers.write(encode(_answer(request, rules, runner)))
            answers.flush()
