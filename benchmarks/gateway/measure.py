"""Runs of the gateway's bench: each load on each front and on what lies behind it, in turns.

Owns order and repeats.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.gateway.fronts import Front
from benchmarks.gateway.load import Order
from benchmarks.gateway.script import MODEL, Pace, paces_s, texts
from benchmarks.processes import Child, Meter
from paceline.errors import InternalError

WARM_S = 2.0
WARM_STREAMS = 16
SEEDS_OF_A_RUN = 1 << 24
"""Prompts hold their seed, so that no run repeats one of another."""

Run = Mapping[str, Any]
"""What gateway_load.summary says, and "cpu_ms_per_request" of the front."""

Direct = Callable[[Order], Awaitable[Run]]


@dataclass(frozen=True, slots=True)
class Level:
    """A load: closed loops, or arrivals at a rate per second."""

    streams: int = 1
    rate: float = 0.0

    @property
    def name(self) -> str:
        """As in the table."""
        if self.rate:
            return f"{self.rate:g}/s"
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}"


@dataclass
class Contender:
    """A front and the way to its backend; what was measured, by level, one entry per repeat."""

    front: Front
    direct: Direct
    runs: dict[Level, list[Run]] = field(default_factory=dict)
    direct_runs: dict[Level, list[Run]] = field(default_factory=dict)


class Measurement:
    """The runs of one bench. `load` is the load's process."""

    def __init__(self, load: Child, pace: Pace, seconds: float) -> None:
        self._load = load
        self._pace = pace
        self._seconds = seconds
        self._numbers = itertools.count()

    async def warm(self, contenders: Sequence[Contender]) -> None:
        """What is loaded at a first request is loaded; not counted."""
        for one in contenders:
            order = self.order(Level(WARM_STREAMS), WARM_S)
            await one.direct(order)
            await self.under_load(one.front, order)

    async def repeat(self, contenders: Sequence[Contender], levels: Sequence[Level]) -> None:
        """Every level once, the contenders in turns; a front's run follows that of its backend."""
        for level in levels:
            for one in contenders:
                if not level.rate:
                    direct = await one.direct(self.order(level, self._seconds / 2))
                    one.direct_runs.setdefault(level, []).append(direct)
                run = await self.under_load(one.front, self.order(level, self._seconds))
                one.runs.setdefault(level, []).append(run)

    async def under_load(self, front: Front, order: Order) -> Run:
        """One run on a front. Raises InternalError when nothing came back."""
        meter = Meter(front.pid)
        found = await self.ask(front.port, order)
        if not found["right"] + found["wrong"]:
            raise InternalError(f"{front.name} answered no request", seen=found["example"] or found)
        ended = found["right"] + found["wrong"]
        return {**found, "cpu_ms_per_request": 1e3 * meter.read().cpu_s / ended}

    async def ask(self, port: int, order: Order) -> Run:
        """One run of the load's process on any server."""
        return await self._load.ask(**{**asdict(order), "port": port})

    def order(self, level: Level, seconds: float, keys: Sequence[str] = ()) -> Order:
        """An order whose prompts are new."""
        return Order(
            port=0,
            model=MODEL,
            texts=texts(self._pace),
            paces_s=paces_s(self._pace),
            think_s=self._pace.round_s,
            max_tokens=self._pace.most_tokens,
            streams=level.streams,
            seconds=seconds,
            rate=level.rate,
            keys=tuple(keys),
            first_seed=next(self._numbers) * SEEDS_OF_A_RUN,
        )
