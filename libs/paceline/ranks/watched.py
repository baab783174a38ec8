"""Restarts lost ranks, dispatches their messages, and reports the service as healthy while they
run.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from typing import Any, Generic, TypeVar

from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.local.launch import RestartPolicy
from paceline.local.news import tell_supervisor
from paceline.local.patience import cancel
from paceline.local.processes import stopped
from paceline.ranks.group import RankGroup
from paceline.ranks.messages import Doing, Failed, Impaired
from paceline.rpc import Server
from paceline.rpc.progress import Activity
from paceline.tagged_json import TaggedJson
from paceline.telemetry import get_logger
from paceline.v1.progress_pb2 import Part

_IDLE_S = 3600.0
_LAST_WORDS_S = 1.0
"""Seconds for calls to receive their replies at the end of a service."""
_log = get_logger(__name__)
M = TypeVar("M")
T = TypeVar("T")


class WatchedRanks(Generic[M]):
    """A supervised group of ranks; `supervise` must be running.

    `on_message` receives every message of a rank. The first message is rank 0's current position.
    Then `on_start` prepares the new group before it accepts commands. `on_lost` receives the error
    of a loss before the restart.
    """

    def __init__(
        self,
        group: RankGroup,
        messages: TaggedJson[M],
        *,
        service: str,
        start_deadline_s: float,
        on_message: Callable[[M], None],
        on_start: Callable[[], None] = lambda: None,
        on_lost: Callable[[PacelineError], None] = lambda error: None,
    ) -> None:
        self._messages = messages
        self.group = group
        """The ranks; supervision restarts them after a kill."""
        self._start_deadline_s = start_deadline_s
        self._news: dict[int, asyncio.Queue[M | PacelineError]] = {}  # replies by command id
        self._commands = count(1)
        self._on_start, self._on_message, self._on_lost = on_start, on_message, on_lost
        self._ready = asyncio.Event()
        self._show_health: Callable[[bool], None] = lambda healthy: None
        self._lost_s: float | None = None  # time of the loss, until the ranks are back
        self._service = Activity(service)
        self._doing = Activity(f"{service} ranks")
        group.on_progress = lambda rank, data: self._note_progress(messages.decode(data))

    @property
    def ready(self) -> bool:
        """Whether the ranks accept commands."""
        return self._ready.is_set()

    def works_on(self, command: str) -> None:
        """Notes the current command of the service; "" for none."""
        self._service.begins(command, self._doing.name if command else "")
        self._doing.begins(command)

    def parts(self, counts: Mapping[str, int]) -> list[Part]:
        """Progress of the service and of its ranks. During a command the service waits for its
        ranks.
        """
        trouble = stopped(self.group.pids) or ("" if self.ready else "they are being started")
        # the ranks' spans belong to other processes
        ranks = self._doing.part(
            {"ranks": self.group.world_size if self.group.pids else 0}, trouble=trouble
        )
        ranks.ClearField("last_span")
        ranks.still_s = self._still_s
        service = self._service.part(counts)
        service.still_s = min(service.still_s, ranks.still_s)
        return [service, ranks]

    @property
    def _still_s(self) -> float:
        """Counted seconds since the ranks' last progress."""
        return min(time.monotonic() - self._doing.moved_s, self.group.still_s)

    async def supervise(self) -> None:
        """Starts the ranks, and restarts the group after each loss.

        Raises the error of a failed first start, or the last error after too many failed starts in
        a row, however long each takes.
        """
        policy, ever_ready = RestartPolicy(window_s=inf), False
        while True:
            try:
                await self._start()
                ever_ready = True
                policy.ends.clear()
                await self._listen()
            except PacelineError as error:
                await self._lose(error)
                if not policy.note_end() or not ever_ready:
                    raise
                _log.error("ranks lost; they are started again", error=str(error))
                if len(policy.ends) > 1:  # the first loss frees no slot by waiting
                    await policy.pause()

    async def wait_ready(self, deadline_s: float) -> None:
        """Waits until the ranks accept commands. Raises Unavailable after `deadline_s` seconds
        without progress.
        """
        try:
            await self._in_time(self._ready.wait(), deadline_s)
        except TimeoutError as error:
            message = "the ranks are not ready"
            raise Unavailable(message, seen=f"{deadline_s} s", reason="RANK_LOST") from error

    async def _in_time(self, awaited: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Awaits a result. Raises TimeoutError after `deadline_s` seconds without progress of the
        ranks.
        """
        began_s, left_s = time.monotonic(), deadline_s
        waiting = asyncio.ensure_future(awaited)
        try:
            while not waiting.done():
                if left_s <= 0:
                    raise TimeoutError
                await asyncio.wait({waiting}, timeout=left_s)
                left_s = deadline_s - min(time.monotonic() - began_s, self._still_s)
            return waiting.result()
        finally:
            waiting.cancel()

    @asynccontextmanager
    async def served(
        self, server: Server, service: str, stop: asyncio.Event, grace_s: float
    ) -> AsyncIterator[None]:
        """Starts server and ranks and waits for `stop`. The body then runs with the ranks still up.

        Raises the error of a failed first start. Afterwards no rank is left.
        """
        self._show_health = partial(server.set_serving, service)
        self._show_health(False)
        await server.start()
        supervision = asyncio.create_task(self.supervise())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({supervision, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if supervision.done():
                await supervision
            yield
        finally:
            await cancel(stopped, supervision)
            await self.group.stop(grace_s)
            await server.stop(_LAST_WORDS_S)

    def send(self, message: M) -> None:
        """Sends one message to every rank. Raises RankLost if a rank is gone."""
        self.group.send(self._messages.encode(message))

    async def run(self, command: Any, last: type[Any], deadline_s: float) -> AsyncGenerator[Any]:
        """Sends a command under a new id and yields its replies, up to the first of type `last`.

        Raises the errors that ranks report, Unavailable if a rank is lost, and DeadlineExceeded
        after `deadline_s` seconds without progress.
        """
        number = next(self._commands)
        self.works_on(type(command).__name__.lower())
        news = self._news[number] = asyncio.Queue()
        try:
            self.send(replace(command, command_id=number))
            while True:
                one = await self._in_time(news.get(), deadline_s)
                if isinstance(one, Failed):
                    raise one.error()
                if isinstance(one, PacelineError):
                    raise one
                yield one
                if isinstance(one, last):
                    return
        except TimeoutError as error:
            raise DeadlineExceeded("the ranks stay silent", seen=f"{deadline_s} s") from error
        finally:
            del self._news[number]
            self.works_on("")

    async def _start(self) -> None:
        await self.group.start(self._start_deadline_s)
        while not self._take(*await self.group.receive(self._start_deadline_s)):
            pass  # work before the first position report, such as a replay
        self._on_start()
        _log.info("ranks_ready", pids=self.group.pids)
        self._ready.set()
        self._show_health(True)
        if self._lost_s is not None:
            away_s = time.monotonic() - self._lost_s
            tell_supervisor("recovered", f"its ranks work again after {away_s:.1f} s")
            self._lost_s = None

    async def _lose(self, error: PacelineError) -> None:
        """Notifies all waiting callers of the loss and stops the remaining ranks."""
        if self._lost_s is None:
            self._lost_s = time.monotonic()
        tell_supervisor("impaired", str(error).partition("\n")[0])
        self._ready.clear()
        self._show_health(False)
        lost = f"the ranks are restarted: {error}"
        for news in self._news.values():
            news.put_nowait(Unavailable(lost, reason=error.reason))
        self._on_lost(error)
        await self.group.end_ranks(0.0)

    async def _listen(self) -> None:
        """Dispatches messages for ever; ends with RankLost, which it raises."""
        while True:
            try:
                rank, data = await self.group.receive(_IDLE_S)
            except DeadlineExceeded:
                continue
            self._take(rank, data)

    def _note_progress(self, message: M) -> bool:
        """Records a progress report; returns False for any other message."""
        self._doing.moves()
        if isinstance(message, Impaired):
            tell_supervisor("impaired", message.what)
        elif isinstance(message, Doing) and message.what != self._doing.doing:
            self._doing.begins(message.what, message.waits_for)
        return isinstance(message, Doing | Impaired)

    def _take(self, rank: int, data: bytes) -> bool:
        """Dispatches a message. Returns False for a progress report, True for any other message."""
        message = self._messages.decode(data)
        if self._note_progress(message):
            return False
        self._on_message(message)
        news = self._news.get(getattr(message, "command_id", 0))
        if news is not None:
            news.put_nowait(message)
        return True
