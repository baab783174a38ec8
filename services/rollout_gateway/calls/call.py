"""Runs a planned generation through session, queue and engine, and records its turn.

Planned first, so that whatever is wrong with a request is said before the first byte of an answer;
then run. The tokens of a turn are recorded before its last piece is given out: an agent that
answers at once finds its history known.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from paceline.errors import DataLoss, InvalidInput, Unavailable
from paceline.messages import stats_from_proto
from paceline.telemetry import span
from paceline.trajectory import DrawSpan, VersionSpan
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.chat.messages import Delta, Message
from rollout_gateway.chat.parse import ChatParser, finish_name
from rollout_gateway.chat.text import TextCodec
from rollout_gateway.engines.sampling import UNSEEDED, Sampling
from rollout_gateway.engines.worker import wire
from rollout_gateway.sessions.session import Session
from rollout_gateway.sessions.tree import Turn
from rollout_gateway.workers.generation import Generation
from rollout_gateway.workers.metrics import describe

FINISH_NAMES = {
    value: name.removeprefix("FINISH_REASON_").removeprefix("UNSPECIFIED").lower()
    for name, value in tpb.FinishReason.items()
}
"""Why a completion ended, by its value on the wire; "" before its end."""
UNASKED = Sampling(UNSEEDED, 0)
"""Of a plan before it is known how to draw it."""
_RECORDED = (tpb.FINISH_REASON_STOP, tpb.FINISH_REASON_LENGTH)


@dataclass(frozen=True, slots=True)
class Piece:
    """News of a completion. chunk.finish_reason is set on the last piece."""

    chunk: pb.TokenChunk
    text: str  # text that has become certain
    delta: Delta | None = None  # of a conversation: what the text means
    finish: str = ""  # on the last piece: "stop" | "length" | "tool_calls" | "abort" | "error"
    start: int = 0  # characters that were said before it


@dataclass(frozen=True, slots=True)
class Plan:
    """One generation, checked."""

    prompt: tuple[int, ...]  # all tokens that the engine sees first
    completion_id: str = ""
    sampling: Sampling = UNASKED
    session: Session | None = None
    parent: Turn | None = None  # turn that the prompt extends
    digest: bytes = b""  # of the conversation before the answer; empty outside one
    parser: Callable[[], ChatParser] | None = None  # of a conversation: what parses the answer
    prompt_text: str = ""  # of a completion that was asked for as text in a session
    forced_arm: str = ""
    capture: bool = False
    worker: int | None = None  # the only one that may answer
    queue_key: str | None = None  # whose turn it takes in the queue; None enters at once

    @property
    def new_ids(self) -> tuple[int, ...]:
        """Tokens of the prompt behind those of the parent."""
        return self.prompt if self.parent is None else self.prompt[len(self.parent.token_ids) :]


class EngineAccess(Protocol):
    """What a call needs of the gateway."""

    codec: TextCodec

    def submit(self, plan: Plan, *, stream: bool) -> Generation:
        """Send the request to a worker."""
        ...

    def abort(self, generation: Generation) -> None:
        """Free what it still holds."""
        ...

    def place(self, key: str) -> AbstractAsyncContextManager[object]:
        """Wait for a place in the engine."""
        ...

    def recorded(self, plan: Plan, generation: Generation, turn: Turn) -> None:
        """A turn of a session has ended."""
        ...


@dataclass
class Call:
    """A planned generation as it runs, and what it has said so far."""

    engine: EngineAccess
    plan: Plan
    generation: Generation | None = field(default=None, init=False)
    text: str = field(default="", init=False)
    finish: str = field(default="", init=False)  # of the last piece
    _recorded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self._parser = plan.parser() if plan.parser is not None else None
        kept = self._parser.kept if self._parser is not None else ()
        self._decoder = self.engine.codec.stream(plan.sampling.stop, kept)

    @property
    def whole(self) -> pb.TokenChunk:
        """All that the engine has given out."""
        assert self.generation is not None
        return self.generation.whole

    @property
    def message(self) -> Message | None:
        """Of a conversation: what was said, a prefill included."""
        return None if self._parser is None else self._parser.message

    @property
    def deltas(self) -> list[Delta]:
        """Of a conversation: what was said, without a prefill."""
        return [] if self._parser is None else self._parser.deltas

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of a conversation's answer that were thought, not said."""
        if self._parser is None:
            return 0
        return self._parser.reasoning_tokens(self.whole.token_ids, self.engine.codec.decode_all)

    async def pieces(self, *, stream: bool) -> AsyncGenerator[Piece]:
        """Piece by piece; one piece when it does not stream.

        Closing the iterator frees the engine's slot.
        """
        plan, engine = self.plan, self.engine
        if plan.session is not None:
            plan.session.begin(plan.sampling, len(plan.new_ids))
        try:
            place: AbstractAsyncContextManager[object] = nullcontext()
            if plan.queue_key is not None:
                place = engine.place(plan.queue_key)
            async with place:
                with span("engine.request", prompt_tokens=len(plan.prompt)) as current:
                    self.generation = generation = engine.submit(plan, stream=stream)
                    async for chunk in generation.chunks():
                        _refuse(chunk)
                        piece = self._take(chunk)
                        if chunk.finish_reason:
                            describe(current, generation)
                            self._record(generation)
                        yield piece
        finally:
            if self.generation is not None and not self._recorded:
                engine.abort(self.generation)
            if plan.session is not None and not self._recorded:
                plan.session.end(len(plan.new_ids), None)

    async def run(self) -> Call:
        """To the end, without streaming."""
        async with aclosing(self.pieces(stream=False)) as pieces:
            async for _ in pieces:
                pass
        return self

    def _take(self, chunk: pb.TokenChunk) -> Piece:
        """The text of new tokens, and what it means."""
        news = self._decoder.push(chunk.token_ids)
        finish = FINISH_NAMES[chunk.finish_reason]
        if finish:
            news += self._decoder.finish(chunk.matched_stop)
        start, delta = len(self.text), None
        self.text += news
        if self._parser is not None:
            delta = self._parser.push(news)
            if finish:
                delta = Delta.of([delta, self._parser.finish()])
                finish = finish_name(self._parser.message, finish)
        self.finish = finish
        return Piece(chunk, news, delta, finish, start)

    def _record(self, generation: Generation) -> None:
        plan, chunk = self.plan, generation.whole
        if plan.session is None or chunk.finish_reason not in _RECORDED:
            return
        message = self.message
        turn = Turn(
            completion_id=plan.completion_id,
            parent=plan.parent,
            prompt_ids=plan.new_ids,
            response_ids=tuple(chunk.token_ids),
            behavior_logprobs=tuple(chunk.behavior_logprobs),
            version_spans=wire.spans_from(VersionSpan, chunk.version_spans, len(plan.prompt)),
            draw_spans=wire.spans_from(DrawSpan, chunk.draw_spans, len(plan.prompt)),
            accepted_drafts=tuple(chunk.accepted_drafts) if any(chunk.accepted_drafts) else (),
            finish=FINISH_NAMES[chunk.finish_reason],
            seed=generation.request.sampling.seed,
            temperature=generation.request.sampling.temperature,
            speculation=stats_from_proto(chunk.speculation),
            smallest_gap=chunk.smallest_gap,
            message=message,
            digest=message.digest(plan.digest) if message is not None else b"",
        )
        # With the stop string that the answer leaves out: a prompt is that of the tokens or it is
        # another history.
        seen = (
            plan.prompt_text + self.engine.codec.decode(turn.response_ids)
            if plan.prompt_text
            else ""
        )
        plan.session.worker_index = generation.worker_index
        plan.session.end(len(plan.new_ids), turn, seen)
        self._recorded = True
        self.engine.recorded(plan, generation, turn)


def _refuse(chunk: pb.TokenChunk) -> None:
    """Raises what the engine refused for the caller's reasons, or for now, and what its numbers
    make worthless.
    """
    for kind in (Unavailable, InvalidInput, DataLoss):
        if chunk.error.startswith(f"{kind.reason}: "):
            raise kind(chunk.error.partition(": ")[2])


def generation_seed(base: int, number: int) -> int:
    """Seed of a session's generation `number`, an unsigned 63-bit integer; the first one draws with
    the base itself.
    """
    if number == 0:
        return base
    return int.from_bytes(hashlib.sha256(f"{base}/{number}".encode()).digest()[:8], "little") >> 1
