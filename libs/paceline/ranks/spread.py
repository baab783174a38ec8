"""Makes one group of ranks out of those of several hosts."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from paceline.errors import DeadlineExceeded, FailedPrecondition, PacelineError
from paceline.ranks.group import HostShare
from paceline.whole_files import writing

_LISTEN_S = 3600.0


class Ranks(Protocol):
    """Processes that compute together, or some of them; RankGroup says what each method does."""

    on_progress: Callable[[int, bytes], bool]

    @property
    def still_s(self) -> float: ...

    @property
    def pids(self) -> list[int]: ...

    @property
    def pids_here(self) -> list[int]: ...

    async def start(self, deadline_s: float, store: str = "") -> None: ...

    async def send(self, message: bytes) -> None: ...

    async def receive(self, deadline_s: float) -> tuple[int, bytes]: ...

    async def end_ranks(self, grace_s: float) -> None: ...

    async def stop(self, grace_s: float = 5.0) -> None: ...

    def kill(self) -> None: ...


class RanksOfHost(Ranks, Protocol):
    """Those of one host, which may be given others between two starts."""

    @property
    def size(self) -> int: ...

    def resize(self, share: HostShare) -> None: ...


class SpreadRanks:
    """The ranks of all parts as one group: what becomes of one part becomes of all. Parts that have
    no rank at a start are left alone until the next one.
    """

    def __init__(self, parts: Sequence[RanksOfHost], folder: Path) -> None:
        """`folder`: on a path that all hosts share; the ranks of each start meet in it anew."""
        self._parts = parts
        self._started: list[RanksOfHost] = []
        self._folder = folder
        self._heard: asyncio.Queue[tuple[int, bytes] | PacelineError] = asyncio.Queue()
        self._listening: list[asyncio.Task[None]] = []
        self._lost: PacelineError | None = None
        self.on_progress: Callable[[int, bytes], bool] = lambda rank, message: False
        for part in parts:
            part.on_progress = lambda rank, message: self.on_progress(rank, message)

    @property
    def still_s(self) -> float:
        """As RankGroup.still_s, of the part that has worked or spoken last."""
        return min(part.still_s for part in self._started or self._parts)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each of its own host."""
        return [pid for part in self._parts for pid in part.pids]

    @property
    def pids_here(self) -> list[int]:
        """Those of this host."""
        return [pid for part in self._parts for pid in part.pids_here]

    async def start(self, deadline_s: float, store: str = "") -> None:
        """As RankGroup.start, all parts at once; the first that fails ends the others."""
        if self._listening:
            raise FailedPrecondition("the ranks run already", seen=self.pids)
        met = store or self._fresh_store()
        self._started = [part for part in self._parts if part.size]
        starts = [asyncio.ensure_future(part.start(deadline_s, met)) for part in self._started]
        try:
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for one in done:
                one.result()
        except BaseException:
            for one in starts:
                one.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.end_ranks(0.0)
            raise
        self._listening = [asyncio.create_task(self._listen(part)) for part in self._started]

    async def send(self, message: bytes) -> None:
        """As RankGroup.send."""
        if self._lost is not None:
            raise self._lost
        for part in self._started:
            await part.send(message)

    async def receive(self, deadline_s: float) -> tuple[int, bytes]:
        """As RankGroup.receive."""
        if self._lost is not None:
            raise self._lost
        try:
            async with asyncio.timeout(max(deadline_s, 0)):
                heard = await self._heard.get()
        except TimeoutError as error:
            raise DeadlineExceeded("no rank spoke in time", seen=f"{deadline_s:.1f} s") from error
        if isinstance(heard, PacelineError):
            self._lost = heard
            raise heard
        return heard

    async def end_ranks(self, grace_s: float) -> None:
        """As RankGroup.end_ranks."""
        await self._end([part.end_ranks(grace_s) for part in self._parts])

    async def stop(self, grace_s: float = 5.0) -> None:
        """As RankGroup.stop."""
        await self._end([part.stop(grace_s) for part in self._parts])

    def kill(self) -> None:
        """As RankGroup.kill."""
        for part in self._parts:
            part.kill()

    async def _end(self, ends: Sequence[Awaitable[None]]) -> None:
        for listening in self._listening:
            listening.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)
        await asyncio.gather(*ends)
        self._listening, self._lost, self._heard = [], None, asyncio.Queue()

    async def _listen(self, part: Ranks) -> None:
        """Until a rank of the part is lost."""
        while True:
            try:
                self._heard.put_nowait(await part.receive(_LISTEN_S))
            except DeadlineExceeded:
                continue
            except PacelineError as error:
                self._heard.put_nowait(error)
                return

    def _fresh_store(self) -> str:
        """Path of a file in a new directory, this user's alone; that of the last start goes."""
        with writing(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, parents=True)
        return str(self._folder.absolute() / f"store-{secrets.token_hex(8)}")
