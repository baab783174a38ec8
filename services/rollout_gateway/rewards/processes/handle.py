"""One life of one child that scores, seen from the gateway. Owns the process and its pipes, not
what is asked.

A child is the leader of a process group: what its rules have started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError, DataLoss, DeadlineExceeded, Unavailable
from rollout_gateway.rewards.processes import frames
from rollout_gateway.rewards.processes.loop import PARENT_VARIABLE

REAP_S = 5.0
"""Longest wait for the end of a process that was killed."""


class ChildProcess:
    """Not reused: a restart makes another."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._answers = process.stdout
        self.loaded: set[str] = set()
        """What its user has made it load."""

    @classmethod
    async def start(
        cls, module: str, arguments: tuple[str, ...], deadline_s: float
    ) -> ChildProcess:
        """Spawn `python -m module` and wait until it serves.

        Raises ConfigError when it refuses its arguments, Unavailable, DeadlineExceeded.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"a child process of the rewards cannot start: {error}") from error
        child = cls(process)
        answer = await child._exchange(b"", deadline_s)
        if "refused" in answer:
            await child.close()
            raise refusal(answer["refused"])
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether its end was seen."""
        return self._process.returncode is not None or self._requests.is_closing()

    async def ask(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """The answer to one request; one at a time.

        A child that does not answer in time (DeadlineExceeded), ends or garbles its answer
        (Unavailable), or whose caller is cancelled, is killed.
        """
        return await self._exchange(frames.encode(request), deadline_s)

    async def close(self) -> None:
        """Kill it, with what it started, and wait for its end."""
        self._requests.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(
            TimeoutError
        ):  # a process that the kernel does not let go is not waited for
            async with asyncio.timeout(REAP_S):
                await self._process.wait()

    async def _exchange(self, frame: bytes, deadline_s: float) -> dict[str, Any]:
        answered = False
        try:
            async with asyncio.timeout(deadline_s):
                self._requests.write(frame)
                await self._requests.drain()
                answer = await frames.receive(self._answers)
            answered = True
        except TimeoutError as error:
            raise DeadlineExceeded(
                "a child process of the rewards did not answer", seen=f"{deadline_s} s"
            ) from error
        except (OSError, asyncio.IncompleteReadError, DataLoss) as error:
            await self.close()
            code = self._process.returncode
            raise Unavailable(
                "a child process of the rewards was lost", seen=f"exit code {code}: {error}"
            ) from error
        finally:
            if not answered:
                await self.close()
        return answer


def refusal(parts: Mapping[str, Any]) -> ConfigError:
    """The error that `child_side.refused` wrote."""
    return ConfigError(parts["message"], seen=parts["seen"], allowed=parts["allowed"])
