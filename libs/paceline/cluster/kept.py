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
"""Seconds that a keeper waits for news before it answers."""
_ANSWER_S, _AWAY_S = 30.0, 45.0
_STOP_S = 10.0
_NODE_DIED = "its node has died"
"""In what Ray says of an actor that died: nothing else tells it from one whose process ended. Where
it were said in other words, the node would be lost when a new keeper does not answer.
"""
Placed = Callable[[ServiceOrder], Any]
"""Makes the keeper of an order on the node where it belongs; an actor handle."""


class KeptService:
    """One service on the cluster. Where its keeper dies, and with it the service, another takes its
    place, as often as a process may die.
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
        """`surroundings`: what its environment holds besides, known once what it forks from is
        there; a forkserver's own is set by it. `lost`: addresses of nodes that have been lost, of
        all services of the run together.
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
        """As Child.run; Unavailable with the reason START_AGAIN where it cannot come back alone, or
        its keeper does not answer.
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
        """Stops the service, then its keeper. One on a node that is lost is not asked: it would not
        answer, and ends by itself when nobody looks for it.
        """
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        if self.order.host in self._lost_nodes:
            self._tell("stopped", "its node is lost: it ends there by itself")
        elif self._begun:  # else it may have no node to answer on
            with suppress(_died(), TimeoutError):  # what it started ends with it
                async with asyncio.timeout(patient(grace_s + _STOP_S)):
                    await keeper.stop.remote(grace_s)
                    self._take(KeeperReport.of(await keeper.look.remote(self._next, [], 0.0)))
        await self._kill(keeper)
        self.is_healthy.clear()
        self.pid = 0

    async def _kill(self, keeper: Any) -> None:
        import ray

        with suppress(TimeoutError):  # Ray does so when it can
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
        """Until it has finished. Raises what the keeper's child raises."""
        while True:
            report = await self._look()
            self._take(report)
            if report.error is not None:
                raise report.error
            if report.over:
                return

    async def _look(self) -> KeeperReport:
        """A node that cannot be reached may come back; Ray says when it is dead."""
        end = asyncio.get_running_loop().time() + patient(_AWAY_S)
        while True:
            healthy = [need.launch.name for need in self._needs if need.is_healthy.is_set()]
            try:
                asked = self._keeper.look.remote(self._next, healthy, _LOOK_S)
                return KeeperReport.of(await self._asked(asked))
            except DeadlineExceeded as error:  # a network that says nothing: Ray waits for longer
                raise self._lost(error) from error
            except _away() as error:
                if asyncio.get_running_loop().time() > end:
                    raise self._lost(error) from error
                await asyncio.sleep(_LOOK_S)

    async def _made(self) -> Any:
        """A keeper; the name of one that has just died is free in a moment."""
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
