"""Spawns a child process that scores, and carries lines to it and back.

A child is the leader of a process group: what its rules have started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from paceline.errors import DataLoss, DeadlineExceeded, Unavailable
from paceline.local.process_directory import process_directory
from paceline.local.processes import child_environment
from paceline.services.rollout_gateway.rewards.processes import pipes

LOST = "a child process of the rewards was lost"
REAP_S = 5.0
"""Longest wait for the end of a process that was killed."""


class ChildLines(Protocol):
    """A child that answers a line with a line, on this machine or another."""

    @property
    def pid(self) -> int:
        """Process id, where it is."""
        ...

    @property
    def ended(self) -> bool:
        """Whether its end was seen."""
        ...

    async def exchange(self, line: bytes, deadline_s: float) -> bytes:
        """Sends a line, none when empty, and returns the next one; one at a time.

        A child that does not answer in time (DeadlineExceeded), ends (Unavailable), or whose caller
        is cancelled, is killed.
        """
        ...

    async def close(self) -> None:
        """Kill it, with what it started, and wait for its end."""
        ...


Spawn = Callable[[str, tuple[str, ...]], Awaitable[ChildLines]]
"""Starts `python -m module` with arguments. Raises Unavailable."""


class LocalChild:
    """A child of this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._answers = process.stdout

    @property
    def pid(self) -> int:
        """See ChildLines."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """See ChildLines."""
        return self._process.returncode is not None or self._requests.is_closing()

    async def exchange(self, line: bytes, deadline_s: float) -> bytes:
        """See ChildLines."""
        answered = False
        try:
            async with asyncio.timeout(deadline_s):
                self._requests.write(line)
                await self._requests.drain()
                answer = await pipes.receive(self._answers)
            answered = True
        except TimeoutError as error:
            raise DeadlineExceeded(
                "a child process of the rewards did not answer", seen=f"{deadline_s} s"
            ) from error
        except (OSError, asyncio.IncompleteReadError, DataLoss) as error:
            await self.close()
            code = self._process.returncode
            raise Unavailable(LOST, seen=f"exit code {code}: {error}") from error
        finally:
            if not answered:
                await self.close()

        return answer

    async def close(self) -> None:
        """See ChildLines."""
        self._requests.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process that the kernel does not let go is not waited for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                await self._process.wait()


async def spawn_here(module: str, arguments: tuple[str, ...]) -> LocalChild:
    """A child of this process. Raises Unavailable."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment({"TMPDIR": str(process_directory())}),
            limit=pipes.MAX_BYTES,
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"a child process of the rewards cannot start: {error}") from error
    return LocalChild(process)
