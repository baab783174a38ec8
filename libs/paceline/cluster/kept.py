"""Keeps the services of a pool running through their keeper: the supervisor's side."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.cluster.order import START_AGAIN, KeeperReport, PoolOrder
from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.local.launch import ChildEvent, Launch
from paceline.local.patience import patient, within

_LOOK_S = 1.0
"""Seconds that a keeper waits for events before it replies."""
_ANSWER_S, _AWAY_S = 30.0, 45.0
_STOP_S = 10.0
_NODE_DIED = "its node has died"
"""Part of Ray's message for an actor whose node died; no other sign distinguishes this from the
death of its process. Without it, the other keepers of the node do not respond to `stop`.
"""
Placed = Callable[[PoolOrder], Any]
"""Creates the keeper of a pool on its node and returns the actor handle."""


class KeptPool:
    """The services of a pool on the cluster. If their keeper dies or does not respond, they are
    lost, and the whole run starts again.
    """

    pid = 0  # the keeper's events report the process ids

    def __init__(
        self,
        launch: Launch,
        order: PoolOrder,
        placed: Placed,
        on_event: Callable[[ChildEvent], None],
        lost: set[str],
    ) -> None:
        """Creates the handle without starting the services. `lost`: addresses of lost nodes, shared
        by all pools of the run.
        """
        self.launch, self.order = launch, order
        self.is_healthy = asyncio.Event()
        self._placed, self._on_event, self._lost_nodes = placed, on_event, lost
        self._keeper: Any = None
        self._next, self._begun = 0, False

    async def run(self) -> None:
        """Starts the services; returns when the service that ends the run has finished.

        Raises the errors of their supervisor, and Unavailable with reason START_AGAIN if their
        keeper is lost.
        """
        from ray.exceptions import ActorDiedError, RayActorError

        try:
            self._keeper = await asyncio.to_thread(self._placed, self.order)
            await self._asked(self._keeper.begin.remote())
            self._begun = True
            while not (report := await self._look()).over:
                self._take(report)
        except (RayActorError, DeadlineExceeded) as error:
            node = not isinstance(error, ActorDiedError) or _NODE_DIED in str(error)
            if node:
                self._lost_nodes.add(self.order.host)
            what = "node" if node else "keeper"
            raise Unavailable(
                f"the {what} of {', '.join(self.order.services)} is lost",
                reason=START_AGAIN,
                seen=" ".join(str(error).split()),
            ) from error
        self._take(report)
        if report.error is not None:
            raise report.error.error()

    async def stop(self, grace_s: float) -> None:
        """Stops the services, then their keeper.

        A keeper on a lost node gets no call, because it cannot respond. It ends by itself after
        DESERTED_S seconds without a call.
        """
        from ray.exceptions import RayActorError

        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        if self.order.host in self._lost_nodes:
            detail = "its node is lost: it ends there by itself"
            for name in self.order.services:
                self._on_event(ChildEvent(name, "stopped", 0, detail))
        elif self._begun:  # otherwise it may have no node
            with suppress(RayActorError, TimeoutError):  # its children end with it
                async with asyncio.timeout(patient(grace_s + _STOP_S)):
                    await keeper.stop.remote(grace_s)
                    self._take(await keeper.look.remote(self._next, 0.0))
        await self._kill(keeper)
        self.is_healthy.clear()

    async def _kill(self, keeper: Any) -> None:
        import ray

        with suppress(TimeoutError):  # Ray kills it later
            async with asyncio.timeout(patient(_STOP_S)):
                await asyncio.to_thread(ray.kill, keeper)

    async def _look(self) -> KeeperReport:
        """Polls the keeper. A node may be unreachable for a while; Ray reports its death."""
        from ray.exceptions import ActorUnavailableError

        end = asyncio.get_running_loop().time() + patient(_AWAY_S)
        while True:
            try:
                report: KeeperReport = await self._asked(
                    self._keeper.look.remote(self._next, _LOOK_S)
                )
                return report
            except ActorUnavailableError:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(_LOOK_S)

    async def _asked(self, answer: Any) -> Any:
        from ray.exceptions import RayTaskError

        try:
            name = self.order.name
            return await within(_ANSWER_S, answer, f"the keeper of {name} does not answer")
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, PacelineError) else error) from error

    def _take(self, report: KeeperReport) -> None:
        for event in report.events:
            self._on_event(event)
        self._next = report.next
        if report.healthy:
            self.is_healthy.set()
