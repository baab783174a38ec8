"""Spawns a child process that scores, and carries lines to it and back.

The child leads a process group, so that programs which its rules started end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from paceline.errors import DataLoss, DeadlineExceeded, Unavailable
from paceline.local.process_directory import process_directory
from paceline.local.processes import child_environment
from paceline.services.rollout_gateway.rewards.processes import pipes

LOST = "a child process of the rewards was lost"
REAP_S = 5.0
"""Maximum wait for the end of a killed process, in seconds."""


class LocalChild:
    """A child process that answers a line with a line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._answers = process.stdout

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the child's end was observed."""
        return self._process.returncode is not None or self._requests.is_closing()

    async def exchange(self, line: bytes, deadline_s: float) -> bytes:
        """Send a line, none when empty, and return the next line; one call at a time.

        The child is killed when it misses the deadline (DeadlineExceeded), when it ends
        (Unavailable), and when its caller is cancelled.
        """
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
        """Kill the child and its process group, and wait for its end."""
        self._requests.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # Do not wait for a process that the kernel does not release.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                await self._process.wait()


async def spawn_child(module: str, arguments: tuple[str, ...]) -> LocalChild:
    """Start `python -m module` with arguments. Raises Unavailable."""
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
