"""Runs a planned generation through session, queue and engine, and records its turn.

The plan exists before the run, so that a faulty request is refused before the first byte of an
answer. The turn's tokens are recorded before its last piece is returned. An agent that replies at
once therefore finds its history in the session.
"""

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.util.types import AttributeValue

from paceline.errors import DataLoss, InvalidInput, Unavailable
from paceline.services.rollout_gateway.chat import messages, parse
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.engines.sampling import UNSEEDED, Sampling
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.sessions.session import Session
from paceline.services.rollout_gateway.sessions.tree import Turn
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.metrics import describe
from paceline.telemetry import link_current, names, past_span, span
from paceline.trajectory import DrawSpan, VersionSpan
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

_REASONS = {one: name.removeprefix("FINISH_REASON_") for name, one in tpb.FinishReason.items()}
FINISH_NAMES = {one: name.lower() for one, name in _REASONS.items()} | {0: ""}
"""Name of each finish reason by its value on the wire; "" before the end."""
UNASKED = Sampling(UNSEEDED, 0)
"""Placeholder for a plan before its sampling is decided."""
_RECORDED = (tpb.FINISH_REASON_STOP, tpb.FINISH_REASON_LENGTH)


class Piece(NamedTuple):
    """New output of a completion. chunk.finish_reason is set on the last piece."""

    chunk: pb.TokenChunk
    text: str  # text that can no longer change
    delta: messages.Delta | None = None  # of a conversation: the parsed text
    finish: str = ""  # on the last piece: "stop" | "length" | "tool_calls" | "abort" | "error"

    @property
    def content(self) -> str | None:
        """The text of a piece with nothing but content; None on the last piece and on a piece with
        reasoning or calls.
        """
        delta = self.delta
        if self.finish or (delta is not None and (delta.reasoning or delta.tool_calls)):
            return None
        return self.text if delta is None else delta.content


@dataclass(frozen=True, slots=True)
class Plan:
    """One checked generation."""

    prompt: tuple[int, ...]  # all tokens of the prompt
    completion_id: str = ""
    sampling: Sampling = UNASKED
    session: Session | None = None
    parent: Turn | None = None  # turn that the prompt extends
    digest: bytes = b""  # of the conversation before the answer; empty outside one
    # of a conversation: makes the parser of the answer
    parser: Callable[[], parse.ChatParser] | None = None
    unread: tuple[str, ...] = ()  # parts of messages (name, reasoning) that no prompt shows
    # sampling values that the session has changed, "name=value used"
    overridden: tuple[str, ...] = ()
    prompt_text: str = ""  # of a text completion within a session
    forced_arm: str = ""
    capture: bool = False
    worker: int | None = None  # index of the only worker that may answer
    queue_key: str | None = None  # key in the fair queue; None enters at once

    @property
    def new_ids(self) -> tuple[int, ...]:
        """The prompt's tokens after the parent turn's tokens."""
        return self.prompt if self.parent is None else self.prompt[len(self.parent.token_ids) :]


class EngineAccess(Protocol):
    """The part of the gateway that a call uses."""

    codec: TextCodec
    model: str  # served model name
    first_worker: int  # number of this gateway's first worker within the run

    def submit(self, plan: Plan, *, stream: bool) -> Generation:
        """Send the request to a worker."""

    def abort(self, generation: Generation) -> None:
        """Free the engine's resources of the generation."""

    def place(self, key: str) -> AbstractAsyncContextManager[object]:
        """Wait for a place in the engine."""

    def recorded(self, plan: Plan, generation: Generation, turn: Turn) -> None:
        """Called when a turn of a session has ended."""


class Call:
    """A planned generation as it runs, with its output so far."""

    def __init__(self, engine: EngineAccess, plan: Plan) -> None:
        self.engine = engine
        self.plan = plan
        self.generation: Generation | None = None
        self.finish = ""  # of the last piece
        self._recorded = False
        self._decoded = 0  # decoded tokens
        self._texts: list[str] = []  # a list, since one growing string would be copied
        self._parser = plan.parser() if plan.parser is not None else None
        kept = self._parser.kept if self._parser is not None else ()
        self._decoder = engine.codec.stream(plan.sampling.stop, kept)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._texts)

    @property
    def whole(self) -> pb.TokenChunk:
        """The engine's whole output so far."""
        assert self.generation is not None
        return self.generation.whole

    @property
    def message(self) -> messages.Message | None:
        """The answer so far in a conversation, with its prefill."""
        return None if self._parser is None else self._parser.message

    @property
    def deltas(self) -> list[messages.Delta]:
        """The answer's parts in a conversation, without its prefill."""
        return [] if self._parser is None else self._parser.deltas

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning in a conversation's answer."""
        if self._parser is None:
            return 0
        return self._parser.reasoning_tokens(self.whole.token_ids, self.engine.codec.decode_all)

    async def pieces(self, *, stream: bool) -> AsyncGenerator[Piece]:
        """Yield pieces as they arrive, or a single piece without streaming.

        Closing the iterator frees the engine's slot.
        """
        plan, engine = self.plan, self.engine
        if plan.session is not None:
            plan.session.begin(plan.sampling, len(plan.new_ids))
        try:
            key = plan.queue_key
            async with nullcontext() if key is None else engine.place(key):
                with span(names.ENGINE_REQUEST, self._labels()) as current:
                    if plan.session is not None:
                        link_current([plan.session.traceparent])
                    self.generation = generation = engine.submit(plan, stream=stream)
                    async for chunk in generation.chunks():
                        _refuse(chunk)
                        piece = self._take(chunk)
                        if chunk.finish_reason:
                            self._describe(current, generation)
                            self._record(generation)
                        yield piece
        finally:
            if self.generation is not None:
                self.generation.set_direct_reader(None)
                if not self._recorded:
                    engine.abort(self.generation)
            if plan.session is not None and not self._recorded:
                plan.session.end(len(plan.new_ids), None)

    def tell_at_once(self, ready: Callable[[], bool], give: Callable[[Piece], None]) -> None:
        """Pass pieces to `give` as the engine returns them, without a task's wake-up.

        This holds while `ready` returns True and no piece waits in `pieces`. Other pieces, and
        always the last piece, are returned by `pieces`. Call this method between two pieces.
        """
        assert self.generation is not None

        def take(chunk: pb.TokenChunk) -> bool:
            if not ready():
                return False
            give(self._take(chunk))
            return True

        self.generation.set_direct_reader(take)

    async def run(self) -> Self:
        """Run to the end without streaming."""
        async with aclosing(self.pieces(stream=False)) as pieces:
            async for _ in pieces:
                pass
        return self

    def _take(self, chunk: pb.TokenChunk) -> Piece:
        """Decode and parse the new tokens."""
        finish = FINISH_NAMES[chunk.finish_reason]
        news, delta = self._text(chunk), None
        self._texts.append(news)
        if self._parser is not None:
            delta = self._parser.push(news)
            if finish:
                delta = messages.Delta.of([delta, self._parser.finish()])
                if finish == "stop" and any(one.tool_calls for one in self.deltas):
                    finish = "tool_calls"
        self.finish = finish
        return Piece(chunk, news, delta, finish)

    def _labels(self) -> Mapping[str, AttributeValue]:
        """Attributes of `engine.request` at its start."""
        plan, sampling = self.plan, self.plan.sampling
        labels: dict[str, AttributeValue] = {
            names.GEN_AI_OPERATION: names.CHAT if plan.parser else names.TEXT_COMPLETION,
            names.GEN_AI_PROVIDER: names.PROVIDER,
            names.GEN_AI_MODEL: self.engine.model,
            names.GEN_AI_TEMPERATURE: sampling.temperature,
            names.GEN_AI_TOP_P: sampling.top_p,
            names.GEN_AI_MAX_TOKENS: sampling.max_tokens,
            names.GEN_AI_INPUT_TOKENS: len(plan.prompt),
        }
        if plan.completion_id:
            labels[names.GEN_AI_RESPONSE_ID] = plan.completion_id
        if plan.session is not None:
            labels[names.GEN_AI_CONVERSATION] = plan.session.session_id
        return labels

    def _describe(self, current: Span, generation: Generation) -> None:
        current.set_attribute(names.GEN_AI_FINISH_REASONS, [self.finish])
        describe(current, generation)
        number = self.engine.first_worker + generation.worker_index
        STAGE_SPANS.show(current, number, generation.whole)

    def _text(self, chunk: pb.TokenChunk) -> str:
        """Text that a chunk has made final. Stop strings count from min_tokens on."""
        sampling, shown = self.plan.sampling, list(chunk.token_ids)
        keep = sampling.include_stop_str_in_output
        if chunk.finish_reason and not keep and self._stopping_token(chunk) is not None:
            shown.pop()
        early = sampling.min_tokens - 1 - self._decoded
        self._decoded += len(shown)
        text = ""
        if early > 0:
            text = self._decoder.push(shown[:early], early=True)
            shown = shown[early:]
        text += self._decoder.push(shown)
        if chunk.finish_reason:
            text += self._decoder.finish(chunk.matched_stop, keep=keep)
        return text

    @property
    def stopped_by(self) -> int | str | None:
        """The caller's stop token or stop string that ended the response; None without either."""
        token = self._stopping_token(self.whole)
        return token if token is not None else self.whole.matched_stop or None

    def _stopping_token(self, chunk: pb.TokenChunk) -> int | None:
        """The last token if it is a stop token that ended the response."""
        stopped = chunk.finish_reason == tpb.FINISH_REASON_STOP and chunk.token_ids
        last = chunk.token_ids[-1] if stopped and not chunk.matched_stop else None
        return last if last in self.plan.sampling.stop_token_ids else None

    def _record(self, generation: Generation) -> None:
        plan, chunk = self.plan, generation.whole
        nothing = not chunk.token_ids  # the engine only scored the prompt
        if plan.session is None or nothing or chunk.finish_reason not in _RECORDED:
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
            speculation=generation.speculation,
            smallest_gap=chunk.smallest_gap,
            message=message,
            digest=message.digest(plan.digest) if message is not None else b"",
        )
        # The text includes a stop string that the answer leaves out, because a later prompt has to
        # match all tokens of the turn.
        seen = plan.prompt_text and plan.prompt_text + self.engine.codec.decode(turn.response_ids)
        plan.session.worker_index = generation.worker_index
        plan.session.end(len(plan.new_ids), turn, seen)
        self._recorded = True
        self.engine.recorded(plan, generation, turn)


def _refuse(chunk: pb.TokenChunk) -> None:
    """Raise the engine's error: a fault of the request, a temporary refusal, or invalid numbers."""
    for kind in (Unavailable, InvalidInput, DataLoss):
        if chunk.error.startswith(f"{kind.reason}: "):
            raise kind(chunk.error.partition(": ")[2])


def generation_seed(base: int, number: int) -> int:
    """Seed of a session's generation `number`, an unsigned 63-bit integer.

    Generation 0 uses the base itself.
    """
    if number == 0:
        return base
    return int.from_bytes(hashlib.sha256(f"{base}/{number}".encode()).digest()[:8], "little") >> 1


Clock = Callable[[], float]
REQUESTS_PER_S = 25.0
"""Requests per second with a span for each stage; further requests only get `engine.request`."""


class StageSpans:
    """Makes spans of requests' stages, up to a rate of requests per second."""

    def __init__(self, rate: float = REQUESTS_PER_S, clock: Clock = time.monotonic) -> None:
        """`rate`: requests per second."""
        self._rate = self._left = rate
        self._clock, self._at = clock, clock()

    def show(self, request: Span, worker: int, whole: pb.TokenChunk) -> None:
        """Record a child span for each stage of the request."""
        if not request.is_recording() or not whole.stages or not self._may():
            return
        parent = set_span_in_context(request)
        for one in whole.stages:
            labels: dict[str, AttributeValue] = {names.WORKER: worker, names.TOKENS: one.tokens}
            labels[names.BUSY_S] = one.busy_s
            if one.arm:
                labels |= {names.ARM: one.arm, names.ROUNDS: one.rounds}
                labels[names.POLICY_VERSION] = one.policy_version
            past_span(names.engine_stage(one.stage), labels, one.start_ns, one.end_ns, parent)

    def _may(self) -> bool:
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._rate, self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


STAGE_SPANS = StageSpans()
"""The limiter of this process."""
