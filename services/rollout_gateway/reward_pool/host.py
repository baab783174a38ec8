"""Runs children that score, and code of models, on the node of one slot: the actor's side.

They are the very processes that there are beside a gateway, with the same walls, limits and
deadlines. What is asked has a number of its caller's, by which it can be called off.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from paceline.cluster.actor import ActorLoop, take_surroundings
from paceline.errors import Unavailable
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.rewards.processes.spawned import LOST, LocalChild, spawn_here
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.services.rollout_gateway.sandbox.launcher.request import encode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostOrder:
    """Surroundings of what runs on a slot: those of its gateway."""

    directory: str
    environment: Mapping[str, str]
    sandbox: Mapping[str, Any] = field(default_factory=dict)  # settings

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


class SlotHost:
    """An actor that ends with the gateway that has asked for it: Ray ends those of a driver that is
    gone. No method is a coroutine, else Ray would run all of them on one thread.
    """

    def __init__(self, order: str) -> None:
        asked = HostOrder(**json.loads(order))
        take_surroundings(asked.directory, asked.environment)
        self._processes = SlotProcesses(SandboxConfig.model_validate(asked.sandbox))
        self._loop = ActorLoop()

    def ready(self) -> None:
        """Returns when the actor is there."""

    def ask(self, number: int, method: str, *arguments: Any) -> Any:
        """What a method of SlotProcesses returns."""
        asked = getattr(self._processes, method)(number, *arguments)
        return self._loop.run(self._processes.numbered(number, asked))

    def call_off(self, number: int) -> None:
        """Ends what was asked with this number, with all processes of it."""
        self._loop.run(self._processes.call_off(number))

    def end(self) -> None:
        """Ends all."""
        self._loop.run(self._processes.end())


class SlotProcesses:
    """The processes on one slot."""

    def __init__(self, limits: SandboxConfig) -> None:
        self._sandbox = Sandbox(limits)
        self._children: dict[int, LocalChild] = {}
        self._under_way: dict[int, asyncio.Task[Any]] = {}
        self._called_off: set[int] = set()

    async def spawn(self, number: int, module: str, arguments: tuple[str, ...]) -> int:
        """Starts a child, which has this number from now on; its process id."""
        self._children[number] = await spawn_here(module, arguments)
        return self._children[number].pid

    async def exchange(self, _: int, child: int, line: bytes, deadline_s: float) -> bytes:
        """See ChildLines."""
        if child not in self._children:
            raise Unavailable(LOST, seen="it has ended")
        try:
            return await self._children[child].exchange(line, deadline_s)
        finally:
            if self._children[child].ended:
                del self._children[child]

    async def close(self, _: int, child: int) -> None:
        """See ChildLines."""
        if child in self._children:
            await self._children.pop(child).close()

    async def layers(self, _: int) -> tuple[str, ...]:
        """See Sandbox."""
        return await self._sandbox.layers()

    async def run(self, _: int, code: str, stdin: str, files: Mapping[str, str]) -> bytes:
        """See Sandbox; the result as JSON."""
        return encode(await self._sandbox.run(code, stdin=stdin, files=files))

    async def numbered(self, number: int, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns, unless it is called off."""
        task = asyncio.create_task(work)
        self._under_way[number] = task
        if number in self._called_off:  # calls may overtake each other
            task.cancel()
        try:
            return await task
        finally:
            del self._under_way[number]

    async def call_off(self, number: int) -> None:
        """See SlotHost."""
        self._called_off.add(number)
        if task := self._under_way.get(number):
            task.cancel()
            await asyncio.wait({task})
        await self.close(number, number)

    async def end(self) -> None:
        """See SlotHost."""
        for number in list(self._under_way):
            await self.call_off(number)
        for child in list(self._children):
            await self.close(child, child)
