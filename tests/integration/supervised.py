"""Stub services under a supervisor, and the supervisor's events."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.config import SecurityConfig
from paceline.local.launch import ChildEvent, Launch, RestartPolicy
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.rpc import wait_healthy

HERE = Path(__file__).parent
QUICK = RestartPolicy(tries=2, window_s=60.0, base_s=0.01)


def stub_launch(
    name: str, *arguments: str, needs: tuple[str, ...] = (), ends_run: bool = False
) -> Launch:
    address = f"127.0.0.1:{free_port()}"

    async def healthy(deadline_s: float) -> None:
        await wait_healthy(address, SecurityConfig(), deadline_s)

    command = (sys.executable, str(HERE / "service_stub.py"), "--address", address, *arguments)
    return Launch(
        name, command, healthy, needs, ((address, f"addresses.{name}"),), ends_run=ends_run
    )


class Events(list[ChildEvent]):
    """Received events, and a wait for an event."""

    def __init__(self) -> None:
        super().__init__()
        self._heard = asyncio.Condition()
        self._notes: set[asyncio.Task[None]] = set()

    def hear(self, event: ChildEvent) -> None:
        self.append(event)
        note = asyncio.get_running_loop().create_task(self._note())
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    async def _note(self) -> None:
        async with self._heard:
            self._heard.notify_all()

    async def until(self, fits: Callable[[Events], bool]) -> None:
        async with asyncio.timeout(patient(20)), self._heard:
            await self._heard.wait_for(lambda: fits(self))

    def kinds(self, name: str) -> list[str]:
        return [event.kind for event in self if event.name == name]
