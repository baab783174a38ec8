"""Asks the actor of one slot of the pool: the gateway's side.

Where an actor or its node is lost, that is a machine's fault: what was asked raises Unavailable,
and whoever asks again gets an actor on another slot's node.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.services.rollout_gateway.rewards.processes.child import STOPPED
from paceline.services.rollout_gateway.rewards.processes.spawned import LOST
from paceline.telemetry import get_logger

log = get_logger(__name__)
START_S = 60.0
"""Longest start of an actor."""
ANSWER_S = 30.0
"""Longest time that an answer is late: beyond it the node is taken for lost."""
END_S = 10.0
Placed = Callable[[int], Any]
"""Makes an actor on the slot of this number; its handle."""


class SlotLost(Unavailable):
    """The actor of a slot, or its node, is gone."""


class PoolSlot:
    """One slot, and an actor there from the first question on. Safe for concurrent use."""

    def __init__(self, placed: Placed, number: int, count: int) -> None:
        """`count`: of all slots, on one of which a lost actor is replaced."""
        self._placed = placed
        self._at, self._count = number, count
        self._actor: Any = None
        self._making = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._closed = False

    async def spawn(self, module: str, arguments: tuple[str, ...]) -> PooledChild:
        """See Spawn."""
        actor, number = await self._living(), next(self._numbers)
        pid: int = await self._asked(actor, number, "spawn", module, arguments)
        return PooledChild(self, actor, number, pid)

    async def ask(self, method: str, *arguments: object, within_s: float = 0.0) -> Any:
        """What a method of SlotProcesses returns, which itself takes so long at most.

        Raises what it raises, SlotLost when there is no answer. A caller that is cancelled waits
        until it is called off there.
        """
        actor = await self._living()
        return await self._asked(actor, next(self._numbers), method, *arguments, within_s=within_s)

    async def ask_child(
        self, actor: Any, method: str, *arguments: object, within_s: float = 0.0
    ) -> Any:
        """As `ask`, of the actor that has a child; SlotLost where that is another one now."""
        if self._actor is not actor:
            raise SlotLost(LOST, seen="its actor is gone")
        return await self._asked(actor, next(self._numbers), method, *arguments, within_s=within_s)

    async def close(self) -> None:
        """Ends what runs there, and its actor; none is made afterwards."""
        self._closed = True
        async with self._making:
            actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(SlotLost):
                await _answered(actor.end.remote(), END_S)
            await _kill(actor)

    async def _living(self) -> Any:
        async with self._making:
            if self._closed:
                raise Unavailable(STOPPED)
            if self._actor is None:
                actor = await asyncio.to_thread(self._placed, self._at)
                try:
                    await _answered(actor.ready.remote(), patient(START_S))
                except BaseException as error:
                    self._go_on()
                    await _kill(actor)
                    if isinstance(error, SlotLost):
                        log.warning("a slot of the rewards has no actor", error=str(error))
                    raise
                self._actor = actor
            return self._actor

    async def _asked(
        self, actor: Any, number: int, method: str, *arguments: object, within_s: float = 0.0
    ) -> Any:
        asked = actor.ask.remote(number, method, *arguments)
        try:
            return await self._answer(actor, asked, within_s)
        except asyncio.CancelledError:
            with suppress(SlotLost):  # then nothing is left of it
                await self._answer(actor, actor.call_off.remote(number), 0.0)
            raise

    async def _answer(self, actor: Any, asked: Any, within_s: float) -> Any:
        try:
            return await _answered(asked, within_s)
        except SlotLost as error:
            await self._lose(actor, error)
            raise

    async def _lose(self, actor: Any, error: SlotLost) -> None:
        """Another is made elsewhere when next asked."""
        if self._actor is actor:
            log.warning("the actor of a slot of the rewards is lost", error=str(error))
            self._actor = None
            self._go_on()
            await _kill(actor)

    def _go_on(self) -> None:
        self._at = (self._at + 1) % self._count


class PooledChild:
    """A child on the node of a slot; see ChildLines."""

    def __init__(self, slot: PoolSlot, actor: Any, number: int, pid: int) -> None:
        self._slot = slot
        self._actor = actor
        self._number = number
        self._pid = pid
        self._ended = False

    @property
    def pid(self) -> int:
        """See ChildLines."""
        return self._pid

    @property
    def ended(self) -> bool:
        """See ChildLines; of an end between two exchanges the next one tells."""
        return self._ended

    async def exchange(self, line: bytes, deadline_s: float) -> bytes:
        """See ChildLines."""
        answered = False
        try:
            given: bytes = await self._slot.ask_child(
                self._actor, "exchange", self._number, line, deadline_s, within_s=deadline_s
            )
            answered = True
        finally:
            self._ended = not answered
        return given

    async def close(self) -> None:
        """See ChildLines."""
        if not self._ended:
            self._ended = True
            with suppress(Unavailable):  # then it has ended with its actor
                await self._slot.ask_child(self._actor, "close", self._number)


async def _answered(answer: Any, within_s: float) -> Any:
    """Raises SlotLost, or what was raised there."""
    from ray.exceptions import RayError, RayTaskError

    late_s = within_s + patient(ANSWER_S)
    try:
        async with asyncio.timeout(late_s):
            return await answer
    except TimeoutError as error:
        raise SlotLost("a slot of the rewards does not answer", seen=f"{late_s:.0f} s") from error
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, PacelineError) else error) from error
    except RayError as error:
        raise SlotLost(
            "a slot of the rewards is lost", seen=" ".join(str(error).split())
        ) from error


async def _kill(actor: Any) -> None:
    import ray

    await asyncio.to_thread(ray.kill, actor)
