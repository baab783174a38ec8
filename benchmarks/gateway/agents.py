"""Plays the agents of a run, all at once. Each agent has its own connection, claims a task, takes
turns that grow one dialogue, and reports its reward.

It is a separate process. One JSON line on standard input requests a part of the work (see
CrowdOrder), and one line on standard output is the result. An agent with a wrong answer or an error
is counted and continues.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import uvloop

from benchmarks.gateway.load import (
    LINE_BYTES,
    Connection,
    TimedStream,
    contents,
    cpu_s,
    percentile_ms,
)

DEADLINE_S = 600.0
"""Seconds for an answer: with so many requests at once, the last answer waits for all other
answers.
"""
CLAIMING = 256
"""Agents that claim at the same time; all stay."""


What = Literal["claim", "turns", "complete"]


@dataclass(frozen=True, slots=True)
class CrowdOrder:
    """The next part for all agents."""

    what: What
    port: int
    model: str
    texts: Sequence[str]  # an answer must be in this list
    max_tokens: int
    agents: int
    turns: int


@dataclass(slots=True)
class Agent:
    """One agent and its dialogue."""

    key: str
    session: str
    messages: list[dict[str, str]]
    connection: Connection | None = None


@dataclass
class Crowd:
    """All agents."""

    part: CrowdOrder
    agents: list[Agent] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    wrong: int = 0
    example: str = ""  # of an error

    async def do(self, part: CrowdOrder) -> dict[str, Any]:
        """Does one part; returns its figures."""
        self.part = part
        self.wrong, self.turn_s, self.first_s = 0, [], []
        steps: dict[str, Callable[[], Awaitable[object]]] = {
            "claim": self._all_claim,
            "turns": self._all(self._turns),
            "complete": self._all(self._complete),
        }
        began, cpu = time.perf_counter(), cpu_s()
        await steps[part.what]()
        seconds = time.perf_counter() - began
        return {
            "agents": len(self.agents),
            "wrong": self.wrong,
            "example": self.example,
            "seconds": seconds,
            "load_cpu_share": (cpu_s() - cpu) / seconds,
            "turns": len(self.turn_s),
            **{f"turn_p{n}_ms": percentile_ms(self.turn_s, n) for n in (50, 99)},
            **{f"first_p{n}_ms": percentile_ms(self.first_s, n) for n in (50, 99)},
        }

    def _all(self, step: Callable[[Agent], Awaitable[None]]) -> Callable[[], Awaitable[object]]:
        return lambda: asyncio.gather(*map(step, self.agents))

    async def _all_claim(self) -> None:
        left = iter(range(self.part.agents))

        async def some() -> None:
            for _ in left:
                await self._claim()

        await asyncio.gather(*(some() for _ in range(CLAIMING)))

    async def _claim(self) -> None:
        agent = Agent("none", "", [])
        told = await self._ask(agent, "/v1/sessions", {"claim": True, "wait_s": 60})
        if told is not None:
            found = json.loads(told.body)
            agent.key, agent.session = found["api_key"], found["id"]
            agent.messages.append({"role": "user", "content": found["task"]["prompt"]})
            self.agents.append(agent)

    async def _turns(self, agent: Agent) -> None:
        for number in range(self.part.turns):
            if number:
                agent.messages.append({"role": "user", "content": f"and {number}"})
            body = {
                "model": self.part.model,
                "messages": agent.messages,
                "stream": True,
                "max_tokens": self.part.max_tokens,
            }
            began = time.perf_counter()
            told = await self._ask(agent, "/v1/chat/completions", body)
            if told is None:
                return
            text = "".join(contents(told.body))
            if text not in self.part.texts:
                self._note(f"{len(text)} characters that no script has")
            self.turn_s.append(told.end_s - began)
            self.first_s.append(told.first_s - began)
            agent.messages.append({"role": "assistant", "content": text})

    async def _complete(self, agent: Agent) -> None:
        path = f"/v1/sessions/{agent.session}/complete"
        await self._ask(agent, path, {"reward": 1.0})
        if agent.connection is not None:
            agent.connection.close()

    async def _ask(self, agent: Agent, path: str, body: dict[str, Any]) -> TimedStream | None:
        """Sends a request; returns its answer, or None for an error.

        It repeats the request once, because an idle connection may be closed at any time.
        """
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {agent.key}\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        told = TimedStream(0, time.perf_counter())
        for _ in range(2):
            told = TimedStream(0, told.due_s)
            connection = await self._connection(agent)
            await connection.ask(head.encode() + raw, told)
            if not told.error or told.first_s:
                break
        if told.error or told.status not in (200, 201):
            self._note(told.error or f"{told.status}: {told.body[:300]!r}")
            return None
        return told

    async def _connection(self, agent: Agent) -> Connection:
        if agent.connection is None or not agent.connection.usable:
            loop, make = asyncio.get_running_loop(), partial(Connection, DEADLINE_S)
            _, agent.connection = await loop.create_connection(make, "127.0.0.1", self.part.port)
        return agent.connection

    def _note(self, example: str) -> None:
        self.wrong += 1
        self.example = example


async def serve() -> None:
    """Does parts until standard input closes."""
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    crowd: Crowd | None = None
    while line := await reader.readline():
        part = CrowdOrder(**json.loads(line))
        crowd = crowd or Crowd(part)
        sys.stdout.write(json.dumps(await crowd.do(part)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # the signal may reach the whole process group; closed input ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(serve())
