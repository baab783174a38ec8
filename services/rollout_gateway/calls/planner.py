"""Plans generations: finds the session and turn that a request extends, and checks the request.

A plan changes no state: a refused request leaves no trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

from paceline.errors import FailedPrecondition, InvalidInput, MissingCapability, TrainabilityError
from paceline.services.rollout_gateway.background import LargeRequests
from paceline.services.rollout_gateway.calls.call import UNASKED, Plan, generation_seed
from paceline.services.rollout_gateway.chat.messages import ChatRequest, ToolChoice
from paceline.services.rollout_gateway.chat.prompts import ChatPrompt, ChatPrompts, Known
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines.nouns import SETTINGS, Capability
from paceline.services.rollout_gateway.engines.requests import control, structures
from paceline.services.rollout_gateway.engines.sampling import (
    UNSEEDED,
    Sampling,
    check_length,
    check_prompt,
    check_sampling,
    untrainable,
)
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.sessions import Assignment, SessionState
from paceline.services.rollout_gateway.sessions.registry import Sessions
from paceline.services.rollout_gateway.sessions.session import Caller, Session
from paceline.services.rollout_gateway.sessions.tree import Turn, overridden
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

_PARAMETERS = (*(field.name for field in fields(Sampling)), *structures.FIELDS.values())
CHECKED_FIELDS = (*_PARAMETERS, "prompt", "messages", "tools", "tool_choice")
"""Fields of a request that an error message may begin with."""


def check_request(
    ready: pb.WorkerReady, prompt: Sequence[int], sampling: Sampling, forced_arm: str = ""
) -> None:
    """Raises InvalidInput with the field that the engine would refuse, or MissingCapability."""
    check_prompt(tuple(prompt), ready.vocab_size, ready.max_sequence_tokens)
    check_sampling(sampling, ready.vocab_size)
    for capability, seen in control.demands(sampling).items():
        if seen and capability not in ready.capabilities:
            message = f"the engine lacks the capability {capability}"
            raise MissingCapability(message, seen=seen, allowed=SETTINGS[capability])
    room = ready.max_sequence_tokens - len(prompt)
    if sampling.min_tokens > room:
        message = "min_tokens does not fit behind the prompt"
        raise InvalidInput(message, seen=sampling.min_tokens, allowed=room)
    structures.structure_of(sampling)
    control.check_arm(forced_arm, ready.arms)


AskedSampling = Callable[[int], tpb.SamplingParams]
"""Maps the tokens left in the sequence to the first choice's sampling, as the caller's API spells
it.
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """The caller of a request and its sampling."""

    caller: Caller
    sampling: AskedSampling
    completion_id: str
    count: int = 1  # choices per prompt; with a seed, choice i draws with seed + i
    forced_arm: str = ""
    size: int = 0  # bytes of the request
    special: bool = True  # the tokenizer adds its special tokens around a text prompt


@dataclass(eq=False)
class Planner:
    """Plans the generations of requests."""

    _config: GatewayConfig
    _codec: TextCodec
    _sessions: Sessions
    _ready: Callable[[], pb.WorkerReady]
    _aside: LargeRequests

    @cached_property
    def prompts(self) -> ChatPrompts:
        """Prompts of conversations."""
        return ChatPrompts(self._config.chat, self._codec)

    async def chat(self, asked: Asked, request: ChatRequest) -> list[Plan]:
        """Plan the answers to one conversation.

        Raises InvalidInput for a conversation that cannot be rendered, drawn or trained.
        """
        if request.tool_choice.mode == "none":
            request = replace(request, tools=(), tool_choice=ToolChoice())
        digests = await self._aside.run(asked.size, request.digests)
        given = asked.caller.session
        session = given or self._sessions.by_conversation(digests)
        found = session.tree.extended_by_messages(digests) if session is not None else None
        turn, count = found or (None, 0)
        known = None if turn is None else Known(count, turn.token_ids, turn.response_ids)
        longest = self._longest
        answer = asked.sampling(1).json_schema if self._holds_calls(given) else None
        render = partial(self.prompts.prompt, request, known, longest, answer)
        prompt = await self._aside.run(asked.size, render)
        parent, digest = turn if prompt.goes_on else None, digests[-1]
        plan = Plan(prompt.ids, "", UNASKED, None, parent, digest, prompt.parser, prompt.unread)
        own = self._own(session, implicit=given is None)
        draw = partial(self._drawn, asked, [plan], own, prompt)
        plans = await self._aside.run(asked.size, draw)
        return self._within(session, plans, implicit=given is None)

    def _holds_calls(self, session: Session | None) -> bool:
        """Whether a grammar constrains tool calls when the request wants it. Tokens that may be
        trained stay the policy's own choice, in a given session or an implicit one.
        """
        where = self._config.chat.tool_grammars
        if where == "never" or Capability.GRAMMARS not in self._ready().capabilities:
            return False
        implicit = bool(self._config.trajectories)
        trained = implicit if session is None else session.assignment.trainable
        return where == "always" or not trained

    async def completions(self, asked: Asked, prompts: Sequence[str | Sequence[int]]) -> list[Plan]:
        """Plan the continuations of each prompt, text or token ids."""
        found = [await self._continued(asked, prompt) for prompt in prompts]
        own = self._own(asked.caller.session, implicit=False)
        plans = await self._aside.run(asked.size, lambda: self._drawn(asked, found, own, None))
        return self._within(asked.caller.session, plans, implicit=False)

    @property
    def _longest(self) -> int:
        """Longest prompt in tokens; one token is left for the answer."""
        return self._ready().max_sequence_tokens - 1

    def _own(self, session: Session | None, *, implicit: bool) -> float | None:
        """The run's temperature if the session overrides the request's temperature, else None."""
        about = session.assignment if session is not None else self._implicit(implicit)
        if about is None or not (about.trainable and about.override):
            return None
        return about.temperature

    async def _continued(self, asked: Asked, prompt: str | Sequence[int]) -> Plan:
        session, longest = asked.caller.session, self._longest
        tree = session.tree if session is not None else None
        parent: Turn | None = None
        if isinstance(prompt, str):
            found = tree.extended_by_text(prompt) if tree is not None else None
            if found is None:
                encode = partial(self._codec.encode, prompt, longest, special=asked.special)
                ids = await self._aside.run(asked.size, encode)
            else:
                parent, rest = found
                encode = partial(self._codec.encode_piece, rest, longest)
                ids = (*parent.token_ids, *await self._aside.run(asked.size, encode))
            text = prompt if tree is not None else ""
            return Plan(ids, parent=parent, prompt_text=text)
        check_length(len(prompt), longest)
        ids = tuple(prompt)
        return Plan(ids, parent=tree.extended_by_tokens(ids) if tree is not None else None)

    def _drawn(
        self, asked: Asked, plans: Sequence[Plan], own: float | None, prompt: ChatPrompt | None
    ) -> list[Plan]:
        """One plan per choice. Each choice has its own id, so that it can be rewarded.

        own: see `_own`. prompt: the rendered prompt of a conversation.
        """
        ready, single = self._ready(), len(plans) * asked.count == 1
        drawn: list[Plan] = []
        for plan in plans:
            room = max(ready.max_sequence_tokens - len(plan.prompt), 1)
            sampling = wire.sampling_from(asked.sampling(room))
            if prompt is not None:
                sampling = _formed(sampling, prompt)
            changed: tuple[str, ...] = ()
            if own is not None:
                sampling, changed = overridden(sampling, own)
            arm, key = asked.forced_arm, asked.caller.queue_key
            check_request(ready, plan.prompt, sampling, arm)
            plan = replace(plan, overridden=changed, forced_arm=arm, queue_key=key)
            for index in range(asked.count):
                name = asked.completion_id if single else f"{asked.completion_id}:{len(drawn)}"
                if index and sampling.seed != UNSEEDED:
                    sampling = replace(sampling, seed=sampling.seed + 1)
                drawn.append(replace(plan, sampling=sampling, completion_id=name))

        return drawn

    def _within(self, session: Session | None, plans: list[Plan], *, implicit: bool) -> list[Plan]:
        """The plans within their session, given or implicit.

        An implicit session may have ended while the prompt was prepared, or may refuse to train
        with this sampling. Its plans then start another session.
        """
        if session is not None:
            try:
                for ahead, plan in enumerate(plans):
                    session.check(plan.sampling, ahead)
            except (TrainabilityError, FailedPrecondition) as error:
                quota = session.state is SessionState.OPEN and isinstance(error, FailedPrecondition)
                if quota or not implicit:
                    raise
                session, plans = None, [replace(plan, parent=None) for plan in plans]

        if session is None and (opened := self._implicit(implicit)) is not None:
            trainable = not any(untrainable(plan.sampling) for plan in plans)
            session = self._sessions.open(replace(opened, trainable=trainable))
        if session is None:
            return plans
        about, found = session.assignment, []
        for number, plan in enumerate(plans, session.numbered(len(plans))):
            sampling = plan.sampling
            if sampling.seed == UNSEEDED and about.seed is not None:
                sampling = replace(sampling, seed=generation_seed(about.seed, number))
            plan = replace(plan, session=session, sampling=sampling, capture=about.capture)
            found.append(replace(plan, forced_arm=plan.forced_arm or about.forced_arm))
        return found

    def _implicit(self, asked: bool) -> Assignment | None:
        """The assignment of a session that the gateway opens itself; None if it opens none."""
        sessions = self._config.sessions
        if not asked:
            return None
        override, temperature = sessions.untrainable == "override", sessions.temperature
        run_id = self._config.run.id
        return Assignment(run_id, implicit=True, override=override, temperature=temperature)


def _formed(sampling: Sampling, prompt: ChatPrompt) -> Sampling:
    """The sampling with the prompt's stop tokens and the grammar of its tool calls. The grammar
    contains a requested JSON schema.
    """
    if prompt.stop_ids and not sampling.ignore_eos:
        stops = (*sampling.stop_token_ids, *prompt.stop_ids)
        sampling = replace(sampling, stop_token_ids=stops)
    if prompt.grammar:
        return replace(sampling, json_schema="", tool_grammar=prompt.grammar)
    return replace(sampling, free_until=prompt.free_until) if sampling.structured else sampling
