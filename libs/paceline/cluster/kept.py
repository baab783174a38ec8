"""Keeps a service running through its keeper on the cluster: the supervisor's side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.cluster.order import START_AGAIN, KeeperReport, ServiceOrder
from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.local.launch import ChildEvent, EventKind, Launch, RestartPolicy, Supervised
from paceline.local.patience import patient

_LOOK_S = 1.0
"""Seconds that a keeper waits for events before it replies."""
_ANSWER_S, _AWAY_S = 30.0, 45.0
_STOP_S = 10.0
_NODE_DIED = "its node has died"
"""Part of Ray's message for an actor whose node died; no other sign distinguishes this from the
death of its process. If Ray changes the text, the node counts as lost once a new keeper does not
respond.
"""
Placed = Callable[[ServiceOrder], Any]
"""Creates the keeper of a service on its node and returns the actor handle."""


class KeptService:
    """A service on the cluster. If its keeper dies, the service dies too, and a new keeper replaces
    it. The restart policy of processes limits the replacements.
    """

    def __init__(
        self,
        launch: Launch,
        order: ServiceOrder,
        needs: Sequence[Supervised],
        placed: Placed,
        surroundings: asyncio.Future[Mapping[str, str]],
        on_event: Callable[[ChildEvent], None],
        lost: set[str] | None = None,
    ) -> None:
        """Creates the handle without starting the service.

        `surroundings`: more environment variables for the service; a forkserver sets them at its
        start. `lost`: addresses of lost nodes, shared by all services of the run.
        """
        self._lost_nodes = set[str]() if lost is None else lost
        self.launch = launch
        self.log = Path(order.run_dir) / "logs" / f"{launch.name}.log"
        self.is_healthy = asyncio.Event()
        self._needs = needs
        self.pid = 0
        self.order = order
        self._placed = placed
        self._surroundings = surroundings
        self._on_event = on_event
        self._policy = RestartPolicy()
        self._keeper: Any = None
        self._next, self._begun = 0, False
        self._deaths: list[float] = []

    async def run(self) -> None:
        """As Child.run. Raises Unavailable with reason START_AGAIN if the service cannot be
        replaced alone or its keeper does not respond.
        """
        for need in self._needs:
            await need.is_healthy.wait()
        while True:
            self._keeper = await self._made()
            try:
                await self._begin()
                await self._live()
                return
            except _died() as error:
                if _NODE_DIED in str(error) and not self.order.modules:
                    raise self._lost(error) from error
                self._gone(error)
                if self.order.modules:
                    raise Unavailable(
                        "what services fork from is gone with its keeper", reason=START_AGAIN
                    ) from error
                await asyncio.sleep(self._pause_s())

    async def stop(self, grace_s: float) -> None:
        """Stops the service, then its keeper.

        A keeper on a lost node gets no call, because it cannot respond. It ends by itself after
        DESERTED_S seconds without a call.
        """
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        if self.order.host in self._lost_nodes:
            self._tell("stopped", "its node is lost: it ends there by itself")
        elif self._begun:  # otherwise it may have no node
            with suppress(_died(), TimeoutError):  # its children end with it
                async with asyncio.timeout(patient(grace_s + _STOP_S)):
                    await keeper.stop.remote(grace_s)
                    self._take(KeeperReport.of(await keeper.look.remote(self._next, [], 0.0)))
        await self._kill(keeper)
        self.is_healthy.clear()
        self.pid = 0

    async def _kill(self, keeper: Any) -> None:
        import ray

        with suppress(TimeoutError):  # Ray kills it later
            async with asyncio.timeout(patient(_STOP_S)):
                await asyncio.to_thread(ray.kill, keeper)

    async def _begin(self) -> None:
        self._next, self._begun = 0, False
        given = {} if self.order.modules else await self._surroundings
        try:
            found = await self._asked(self._keeper.begin.remote(dict(given)))
        except DeadlineExceeded as error:
            raise self._lost(error) from error
        self._begun = True
        if self.order.modules and not self._surroundings.done():
            self._surroundings.set_result(found)

    async def _live(self) -> None:
        """Returns when the service has finished. Raises the error of the keeper's child."""
        while True:
            report = await self._look()
            self._take(report)
            if report.error is not None:
                raise report.error
            if report.over:
                return

    async def _look(self) -> KeeperReport:
        """Polls the keeper. A node may be unreachable for a while; Ray reports its death."""
        end = asyncio.get_running_loop().time() + patient(_AWAY_S)
        while True:
            healthy = [need.launch.name for need in self._needs if need.is_healthy.is_set()]
            try:
                asked = self._keeper.look.remote(self._next, healthy, _LOOK_S)
                return KeeperReport.of(await self._asked(asked))
            except DeadlineExceeded as error:  # silent network: Ray waits longer
                raise self._lost(error) from error
            except _away() as error:
                if asyncio.get_running_loop().time() > end:
                    raise self._lost(error) from error
                await asyncio.sleep(_LOOK_S)

    async def _made(self) -> Any:
        """Creates a keeper. The name of a dead keeper is free only after a moment."""
        end = asyncio.get_running_loop().time() + patient(_AWAY_S)
        while True:
            try:
                return await asyncio.to_thread(self._placed, self.order)
            except ValueError as error:
                if asyncio.get_running_loop().time() > end:
                    raise self._lost(error) from error
                await asyncio.sleep(_LOOK_S)

    def _lost(self, cause: Exception) -> Unavailable:
        self._lost_nodes.add(self.order.host)
        return Unavailable(
            f"the node of {self.launch.name} is lost",
            reason=START_AGAIN,
            seen=" ".join(str(cause).split()),
        )

    async def _asked(self, answer: Any) -> Any:
        try:
            async with asyncio.timeout(patient(_ANSWER_S)):
                return await answer
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the keeper of {self.launch.name} does not answer",
                seen=f"{patient(_ANSWER_S):.0f} s",
            ) from error
        except _failed() as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, PacelineError) else error) from error

    def _take(self, report: KeeperReport) -> None:
        for event in report.events:
            self.pid = 0 if event.kind in ("died", "stopped", "finished") else event.pid
            self._on_event(event)
        self._next = report.next
        if report.healthy:
            self.is_healthy.set()
        else:
            self.is_healthy.clear()

    def _gone(self, error: Exception) -> None:
        self.is_healthy.clear()
        self._tell("died", f"its keeper on the cluster is gone: {' '.join(str(error).split())}")
        self.pid = 0
        self._keeper = None
        now = asyncio.get_running_loop().time()
        self._deaths = [at for at in self._deaths if now - at < self._policy.window_s] + [now]
        if len(self._deaths) > self._policy.tries:
            raise Unavailable(f"{self.launch.name}: its keeper dies again and again") from error

    def _pause_s(self) -> float:
        doubled: float = self._policy.base_s * 2 ** (len(self._deaths) - 1)
        return min(doubled, self._policy.cap_s)

    def _tell(self, kind: EventKind, detail: str) -> None:
        self._on_event(ChildEvent(self.launch.name, kind, self.pid, detail))


def _died() -> type[Exception]:
    import ray

    return ray.exceptions.RayActorError


def _away() -> type[Exception]:
    import ray

    return ray.exceptions.ActorUnavailableError


def _failed() -> type[Exception]:
    import ray

    return ray.exceptions.RayTaskError
