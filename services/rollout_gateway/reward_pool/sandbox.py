"""Runs code of models on the slots of a pool instead of beside the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.reward_pool.slot import PoolSlot, SlotLost
from paceline.services.rollout_gateway.sandbox import Sandbox, SandboxResult
from paceline.services.rollout_gateway.sandbox.runs import START_S, checked_files
from paceline.telemetry import get_logger

log = get_logger(__name__)
_RUNS = 4
"""Programs that a node's first one may cost it."""
LIVES = 2
"""Slots that one program may cost."""


class PooledSandbox(Sandbox):
    """One program at a time on each slot; each node builds the strongest walls that it has."""

    def __init__(self, config: SandboxConfig, slots: Sequence[PoolSlot]) -> None:
        super().__init__(config)
        self._slots_there = slots
        self._free: asyncio.Queue[PoolSlot] = asyncio.Queue()
        for slot in slots:
            self._free.put_nowait(slot)

    async def layers(self) -> tuple[str, ...]:
        """See Sandbox: the weakest of what the nodes have, each of which has to have any."""
        found = await asyncio.gather(*(self._on(slot, "layers") for slot in self._slots_there))
        return min(found, key=len)

    async def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None
    ) -> SandboxResult:
        """See Sandbox. Where a slot is lost, another one runs it once more."""
        arguments = code, stdin, checked_files(files or {})
        for _ in range(LIVES - 1):
            try:
                return await self._run(arguments)
            except SlotLost as error:
                log.warning("a program is run once more", error=str(error))
        return await self._run(arguments)

    async def _run(self, arguments: tuple[str, str, dict[str, str]]) -> SandboxResult:
        slot = await self._free.get()
        try:
            return SandboxResult(**json.loads(await self._on(slot, "run", *arguments)))
        finally:
            self._free.put_nowait(slot)

    async def _on(self, slot: PoolSlot, method: str, *arguments: object) -> Any:
        # A node's first program waits for the trials of its walls.
        longest_s = _RUNS * (self.config.wall_s + patient(START_S))
        return await slot.ask(method, *arguments, within_s=longest_s)
