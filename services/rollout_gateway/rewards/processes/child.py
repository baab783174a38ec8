"""The gateway's end of a child process that scores: sends requests, ends and replaces the child."""

from __future__ import annotations

from paceline.errors import DataLoss, DeadlineExceeded, Unavailable
from paceline.services.rollout_gateway.rewards.processes import pipes
from paceline.services.rollout_gateway.rewards.processes.spawned import (
    LOST,
    LocalChild,
    spawn_child,
)

STOPPED = "the gateway's rewards have stopped"


class ChildProcess:
    """One child process; a restart makes a new object."""

    def __init__(self, lines: LocalChild) -> None:
        self._lines = lines
        self.loaded: set[str] = set()
        """Rules that the child has loaded."""

    @classmethod
    async def start(
        cls, module: str, arguments: tuple[str, ...], deadline_s: float
    ) -> ChildProcess:
        """Spawn `python -m module` and wait until it serves.

        Raises ConfigError when it refuses its arguments, Unavailable, DeadlineExceeded.
        """
        child = cls(await spawn_child(module, arguments))
        answer = await child._exchange(b"", deadline_s)
        if isinstance(answer, pipes.Refused):
            await child.close()
            raise answer.error()
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._lines.pid

    @property
    def ended(self) -> bool:
        """Whether its end was observed."""
        return self._lines.ended

    async def ask(self, request: pipes.Request, deadline_s: float) -> pipes.Answer:
        """The answer to one request; one request at a time.

        The child is killed when it does not answer in time (DeadlineExceeded). It is also killed
        when it ends or sends an invalid answer (Unavailable), and when its caller is cancelled.
        """
        return await self._exchange(pipes.encode(request), deadline_s)

    async def close(self) -> None:
        """Kill the child and its descendants, and wait for its end."""
        await self._lines.close()

    async def _exchange(self, line: bytes, deadline_s: float) -> pipes.Answer:
        given = await self._lines.exchange(line, deadline_s)
        try:
            return pipes.ANSWERS.decode(given)
        except DataLoss as error:
            await self.close()
            raise Unavailable(LOST, seen=error) from error


class ChildPlace:
    """A place for one child at a time; for one caller at a time."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._child: ChildProcess | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process id of the child, if one lives."""
        return [self._child.pid] if self._child is not None and not self._child.ended else []

    @property
    def closed(self) -> bool:
        """Whether the place starts no more children."""
        return self._closed

    async def living(self, module: str, *arguments: str) -> ChildProcess:
        """The child, started if necessary. Raises ConfigError or Unavailable."""
        if self._closed:
            raise Unavailable(STOPPED)
        if self._child is None or self._child.ended:
            try:
                self._child = await ChildProcess.start(module, arguments, self._start_s)
            except DeadlineExceeded as error:
                raise Unavailable(
                    "a child process of the rewards did not start in time", seen=error.seen
                ) from error
            if self._closed:
                await self._child.close()
                raise Unavailable(STOPPED)
        return self._child

    async def close(self) -> None:
        """End the child and start no more."""
        self._closed = True
        if self._child is not None:
            await self._child.close()
