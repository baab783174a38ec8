"""Keeps the results of calls until their callers have read them, in bounded memory."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from paceline import errors
from paceline.telemetry import get_logger

JSON, BINARY = "application/json", "application/x-protobuf"
LOST = "LEARNER_LOST"
_OF_USER = (errors.InvalidInput, errors.NotFound, errors.FailedPrecondition)
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """A call's answer in its form on the wire."""

    body: bytes
    media: str = JSON

    @classmethod
    def of(cls, **fields: Any) -> "Result":
        """An answer in JSON."""
        return cls(json.dumps(fields).encode())

    @classmethod
    def failed(cls, error: errors.PacelineError) -> "Result":
        """A failure, with the SDK's category: its caller's fault or this server's."""
        of_user = isinstance(error, _OF_USER)
        category = "user" if of_user and error.reason != LOST else "server"
        return cls.of(error=str(error), category=category)


@dataclass(slots=True)
class Future:
    """A call, and its answer once it is done."""

    name: str
    size: int  # bytes that it keeps
    answer: asyncio.Future[Result] = field(default_factory=asyncio.Future)
    read: bool = False
    task: asyncio.Task[None] | None = None  # None: another object runs the call

    def promise(self, **more: Any) -> dict[str, Any]:
        """The fields of a call's first answer."""
        return {"request_id": self.name, **more}


class Futures:
    """All calls by the names of their futures. Use on one event loop.

    Answers that were read are dropped for new calls, oldest first; others never.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, Future] = OrderedDict()
        self._bytes = 0

    def open(self, name: str, size: int) -> Future:
        """A future for a new call of so many bytes. Raises ResourceExhausted without room."""
        while len(self._kept) >= self._most or self._bytes + size > self._most_bytes:
            old = next((one for one in self._kept.values() if one.read), None)
            if old is None:
                seen, allowed = f"{len(self._kept)}, {self._bytes} bytes", f"{self._most} calls"
                message = "too many calls wait for their turn or their reader"
                raise errors.ResourceExhausted(message, seen=seen, allowed=allowed)
            self._bytes -= self._kept.pop(old.name).size
        future = self._kept[name] = Future(name, size)
        self._bytes += size
        return future

    def find(self, name: str) -> Future | None:
        """The future of that name, if it is kept."""
        return self._kept.get(name)

    def settle(self, future: Future, result: Result) -> None:
        """Stores an answer and wakes its readers."""
        if future.name in self._kept:
            self._bytes += len(result.body) - future.size
        future.size = len(result.body)
        future.answer.set_result(result)

    def start(self, future: Future, call: Awaitable[Result]) -> None:
        """Runs a call beside all other calls."""
        future.task = asyncio.create_task(self.run(future, call))

    async def run(self, future: Future, call: Awaitable[Result]) -> None:
        """Runs a call and stores its answer or failure."""
        try:
            result = await call
        except errors.PacelineError as error:
            result = Result.failed(error)
        except Exception as error:  # noqa: BLE001  the caller must not wait for ever
            _log.error("a call failed", future=future.name, exc_info=error)
            result = Result.failed(errors.InternalError("the front failed; its log has the cause"))
        self.settle(future, result)

    async def wait(self, name: str, deadline_s: float) -> Result | None:
        """The answer; None if it is not there in time. Raises NotFound for an unknown name."""
        future = self.find(name)
        if future is None:
            message = "no such call; its answer was read, or the server restarted"
            raise errors.NotFound(message, seen=name)
        await asyncio.wait([future.answer], timeout=deadline_s)
        future.read = future.answer.done()
        return future.answer.result() if future.read else None
