"""Progress of a service: its present work, the part that it waits for, and the chain of waits."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from paceline.errors import DeadlineExceeded, PacelineError
from paceline.rpc.server import Server
from paceline.rpc.status import rpc_errors
from paceline.telemetry import last_span
from paceline.v1 import progress_pb2 as pb
from paceline.v1 import progress_pb2_grpc

SERVICE_NAME = "paceline.v1.ProgressService"
AGENTS, REDIS = "agents", "redis"
"""Causes of a wait that are not parts of a service."""
LONGEST_S = 86_400.0
"""Deadline in seconds of a call under `while_moving`: a server caps a call that has none."""
ASK_S = 2.0
"""Maximum time of an answer, seconds; a later service is reported as in trouble."""
_LOOK_S = 10.0
"""Maximum time of an answer that ends a call: a busy service answers late."""


@dataclass(slots=True)
class Activity:
    """The present work of one part; times are from time.monotonic()."""

    name: str
    doing: str = ""
    waits_for: str = ""
    began_s: float = field(default_factory=time.monotonic)
    moved_s: float = field(default_factory=time.monotonic)

    def begins(self, doing: str, waits_for: str = "") -> None:
        """Starts another activity, "" for none. This counts as progress."""
        self.doing, self.waits_for = doing, waits_for
        self.began_s = self.moved_s = time.monotonic()

    def moves(self) -> None:
        """Records progress of the present activity."""
        self.moved_s = time.monotonic()

    def part(self, counts: Mapping[str, int] | None = None, *, trouble: str = "") -> pb.Part:
        """The part in its form on the wire."""
        now_s, (ended, ended_s) = time.monotonic(), last_span()
        return pb.Part(
            name=self.name,
            doing=self.doing,
            doing_s=now_s - self.began_s,
            still_s=now_s - self.moved_s,
            waits_for=self.waits_for,
            counts=counts,
            last_span=ended,
            last_span_s=ended_s,
            trouble=trouble,
        )

    def show_on(self, part: pb.Part) -> None:
        """Adds this work to the part of its service: the service gets on while this work does."""
        if self.doing:
            part.doing = part.doing or self.doing
            part.still_s = min(part.still_s, time.monotonic() - self.moved_s)


Answer = Callable[[], Awaitable[pb.GetProgressResponse]]


def add_progress(server: Server, answer: Answer) -> None:
    """Adds GetProgress to a server."""
    servicer = SimpleNamespace(GetProgress=lambda request, context: answer())
    server.add(progress_pb2_grpc.add_ProgressServiceServicer_to_server, servicer, SERVICE_NAME)


async def ask_progress(connection: Any, deadline_s: float = ASK_S) -> pb.GetProgressResponse:
    """The progress of the service at the other end. Raises PacelineError if it does not answer."""
    stub = progress_pb2_grpc.ProgressServiceStub(connection)  # type: ignore[no-untyped-call]
    with rpc_errors():
        answer: pb.GetProgressResponse = await stub.GetProgress(
            pb.GetProgressRequest(), timeout=deadline_s
        )
    return answer


@asynccontextmanager
async def while_moving(connection: Any, deadline_s: float) -> AsyncIterator[float]:
    """A block of calls to the service at the other end of a connection, which may take as long as
    the service reports progress. The block gets the timeout of its calls, seconds.

    Raises DeadlineExceeded where the service has reported no progress for `deadline_s` seconds; the
    block is cancelled then.
    """
    try:
        async with asyncio.timeout(None) as limit:
            watch = asyncio.create_task(_end_when_still(limit, connection, deadline_s))
            try:
                yield LONGEST_S
            finally:
                watch.cancel()
    except TimeoutError as error:
        if not limit.expired():
            raise
        text = "the service makes no progress"
        raise DeadlineExceeded(text, seen=f"{deadline_s:.0f} s") from error


async def _end_when_still(limit: asyncio.Timeout, connection: Any, deadline_s: float) -> None:
    moved_s = time.monotonic()
    while (left_s := moved_s + deadline_s - time.monotonic()) > 0:
        await asyncio.sleep(left_s)
        moved_s = max(moved_s, time.monotonic() - await _still_s(connection))
    limit.reschedule(asyncio.get_running_loop().time())


async def _still_s(connection: Any) -> float:
    """Seconds since the last progress of a service; infinite where it does not answer."""
    try:
        parts = (await ask_progress(connection, _LOOK_S)).parts
    except PacelineError:
        return float("inf")
    return parts[0].still_s


def wait_chain(parts: Sequence[pb.Part], first: str) -> list[pb.Part]:
    """The chain from `first` to the part that waits for no other; each part once, even in
    a circle.
    """
    by_name = {part.name: part for part in parts}
    chain: dict[str, pb.Part] = {}
    name = first
    while name and name not in chain:
        chain[name] = by_name.get(name) or pb.Part(name=name)
        name = chain[name].waits_for
    return list(chain.values())


def chain_text(chain: Sequence[pb.Part]) -> str:
    """The chain in words: waiting parts, their activity and its start, and the last span of the
    last part that has one.
    """
    words = [_link(part) for part in chain]
    spans = [part for part in chain if part.last_span]
    if spans:
        last = spans[-1]
        words.append(f"last span of {last.name}: {last.last_span}, {last.last_span_s:.0f} s ago")
    return "; ".join(words)


def _link(part: pb.Part) -> str:
    work = f"{part.doing}, {part.doing_s:.0f} s" if part.doing else ""
    about = ", ".join(filter(None, (part.trouble, work)))
    verb = f" waits for {part.waits_for}" if part.waits_for else ""
    return f"{part.name}{verb}{f' ({about})' if about else ''}"
