"""A planner over a codec and an engine with scripted answers, without a process or event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.services.rollout_gateway.background import LargeRequests
from paceline.services.rollout_gateway.calls.call import Call, Plan
from paceline.services.rollout_gateway.calls.planner import Asked, Planner
from paceline.services.rollout_gateway.chat.messages import ChatRequest
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines.nouns import Capability
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.sessions.registry import Sessions
from paceline.services.rollout_gateway.sessions.tree import Turn
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

T = TypeVar("T")
LONGEST = 1 << 20
FINISH = {
    "stop": tpb.FINISH_REASON_STOP,
    "length": tpb.FINISH_REASON_LENGTH,
    "error": tpb.FINISH_REASON_ERROR,
}


@dataclass(frozen=True)
class Saying:
    """The engine's next answer."""

    ids: tuple[int, ...]
    finish: str = "stop"
    cuts: tuple[int, ...] = ()  # sizes of the first chunks


@dataclass
class DialogueEngine:
    """Implements calls.Engine. Every token has a unique log-prob, which identifies it."""

    codec: TextCodec
    model = "dialogue"
    first_worker = 0
    sessions: Sessions
    saying: Saying = Saying(())
    seen: list[tuple[int, ...]] = field(default_factory=list)  # prompts
    said: list[tuple[float, ...]] = field(default_factory=list)  # log-probs
    recorded_turns: list[Turn] = field(default_factory=list)
    aborted: int = 0
    _marks: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def submit(self, plan: Plan, *, stream: bool) -> Generation:
        self.seen.append(plan.prompt)
        request = pb.EngineRequest(
            request_id=1,
            prompt_token_ids=plan.prompt,
            sampling=wire.sampling_to(plan.sampling),
            stream=stream,
        )
        generation = Generation(request, worker_index=1)
        ids, marks = self.saying.ids, tuple(-float(next(self._marks)) for _ in self.saying.ids)
        if self.saying.finish in ("stop", "length"):
            self.said.append(marks)
        start = 0
        for size in [*self.saying.cuts, len(ids)]:
            end = min(start + size, len(ids))
            span = tpb.VersionSpan(start=start, end=end, policy_version=0)
            news = pb.TokenChunk(
                token_ids=ids[start:end], behavior_logprobs=marks[start:end], version_spans=[span]
            )
            generation.accept(news)
            start = end
        generation.accept(pb.TokenChunk(finish_reason=FINISH[self.saying.finish], error=""))
        return generation

    def abort(self, generation: Generation) -> None:
        self.aborted += 1

    def place(self, key: str) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    def recorded(self, plan: Plan, generation: Generation, turn: Turn) -> None:
        assert plan.session is not None
        self.recorded_turns.append(turn)
        self.sessions.record_turn(plan.session, turn)


class Desk:
    """A planner and its engine."""

    def __init__(self, codec: TextCodec, vocab_size: int, **settings: Any) -> None:
        self.config = GatewayConfig.model_validate(settings)
        self.sessions = Sessions(self.config.sessions)
        self.ready = pb.WorkerReady(
            vocab_size=vocab_size,
            max_sequence_tokens=LONGEST,
            capabilities=[str(one) for one in Capability],
        )
        self.planner = Planner(
            self.config, codec, self.sessions, lambda: self.ready, LargeRequests()
        )
        self.engine = DialogueEngine(codec, self.sessions)
        self._names = itertools.count()

    @property
    def name(self) -> str:
        """A completion id that no completion has used."""
        return f"c{next(self._names)}"

    def chat(self, asked: Asked, request: ChatRequest) -> list[Plan]:
        """Plans of one conversation."""
        return done(self.planner.chat(asked, request))

    def completions(self, asked: Asked, prompts: Sequence[str | Sequence[int]]) -> list[Plan]:
        """Plans of text completions."""
        return done(self.planner.completions(asked, prompts))

    def answer(self, plan: Plan, saying: Saying) -> Call:
        """Runs the plan."""
        self.engine.saying = saying
        return done(Call(self.engine, plan).run())


def sampling(**change: Any) -> Callable[[int], tpb.SamplingParams]:
    """Sampling parameters that are trainable by default."""
    return lambda room: tpb.SamplingParams(
        **{"temperature": 1.0, "max_tokens": min(room, 64), **change}
    )


def done(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that never has to wait."""
    return asyncio.run(work)


def logprobs(turns: Sequence[Turn]) -> list[tuple[float, ...]]:
    """Log-probs of all turns, which identify their tokens."""
    return [turn.behavior_logprobs for turn in turns]
