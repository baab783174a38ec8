"""One session's tree, state and rewards; refuses calls that its state does not permit.

An agent calls at any time, and its samples belong to the trace of the RL step that takes them. The
session's span connects both. It is below the request that opened the session, and so below the
agent's own span. Each generation's `engine.request` and each sample's `trajectory.append` link it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from opentelemetry.trace import Span, set_span_in_context

from paceline import errors
from paceline.services.rollout_gateway import config, sessions
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.sessions import tree as trees
from paceline.telemetry import inject, names, open_span
from paceline.trajectory import REWARD_RANGE, Trajectory, is_reward

PARALLEL, QUOTA = "SESSION_PARALLEL", "SESSION_QUOTA"
OWN_LIMITS = (PARALLEL, QUOTA)
"""Error reasons for a session's own limits, as opposed to a shortage of the gateway."""


@dataclass(frozen=True, slots=True)
class Grant:
    """One posted reward."""

    value: float
    completion_id: str = ""  # of the rewarded turn; empty: the session
    accumulate: bool = False
    idempotency_key: str = ""  # names it among accumulated rewards
    parts: Mapping[str, float] = field(default_factory=dict)
    """Reward by each rule of a mixture, for a session's reward."""


@dataclass(eq=False, repr=False)
class Session:
    """Generations of one attempt at one task."""

    session_id: str
    assignment: sessions.Assignment
    _limits: config.SessionsConfig
    api_key: str = ""
    """Of a session that an agent opens in the current request; empty for another session, which has
    no span.
    """
    touched_s: float = 0.0
    traceparent: str = ""
    """Of the session's span; empty without one."""
    state: sessions.SessionState = sessions.SessionState.OPEN
    fail_reason: sessions.FailReason | None = None
    tree: trees.MessageTree = field(default_factory=trees.MessageTree)
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    worker_index: int | None = None  # has the prefix in its cache
    generations: int = 0  # planned generations, including ones that never began
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    active: int = 0  # running generations
    _span: Span | None = None
    _active_tokens: int = 0
    _temperature: float | None = None  # of everything generated, in a trained session
    _added: dict[str, Grant] = field(default_factory=dict)  # by idempotency key
    _ended_with: list[Trajectory] | None = None

    def __post_init__(self) -> None:
        if self.api_key:
            labels = dict.fromkeys((names.SESSION_ID, names.GEN_AI_CONVERSATION), self.session_id)
            if self.assignment.task_id:
                labels[names.TASK] = self.assignment.task_id
            self._span = open_span(names.AGENT_SESSION, labels)
            self.traceparent = inject(set_span_in_context(self._span)).get("traceparent", "")

    @property
    def group_id(self) -> str:
        """Its siblings' group, or a group of its own."""
        return self.assignment.group_id or self.session_id

    @property
    def outcome(self) -> str:
        """The state with the reason of a failure, in the ledger's form."""
        return f"{self.state}:{self.fail_reason}" if self.fail_reason else str(self.state)

    @property
    def scored(self) -> bool:
        """Whether the session or a turn has a reward."""
        return self.reward is not None or any(turn.reward is not None for turn in self.tree.turns)

    def check(self, sampling: Sampling, ahead: int = 0) -> None:
        """Raises the errors that `begin` would raise for this sampling after `ahead` other
        generations.
        """
        self.require_open()
        if self.assignment.trainable:
            trees.check_trainable(sampling)
            used = self._temperature
            if used is not None and sampling.temperature != used:
                message = "a session to be trained keeps one temperature"
                raise errors.TrainabilityError(message, seen=sampling.temperature, allowed=used)

        limits, active = self._limits, self.active + ahead
        if active >= limits.max_parallel:
            message, allowed = "too many requests of one session are under way", limits.max_parallel
            raise errors.ResourceExhausted(message, reason=PARALLEL, seen=active, allowed=allowed)
        if len(self.tree.turns) + active >= limits.max_turns:
            raise self._spent("generations", limits.max_turns)
        if self.tree.tokens + self._active_tokens >= limits.max_tokens:
            raise self._spent("tokens", limits.max_tokens)

    def begin(self, sampling: Sampling, new_tokens: int) -> None:
        """Starts a generation with `new_tokens` prompt tokens after its parent's; call `end` once
        afterwards.

        Raises FailedPrecondition when the session has ended or has used up a quota,
        TrainabilityError for sampling that cannot be trained, ResourceExhausted when too many
        generations run.
        """
        self.check(sampling)
        self.active += 1
        self._active_tokens += new_tokens
        self._temperature = sampling.temperature

    def end(self, new_tokens: int, turn: trees.Turn | None, text: str = "") -> None:
        """Ends a generation; a failed or cancelled one (None) leaves no trace."""
        self.active -= 1
        self._active_tokens -= new_tokens
        if turn is not None and self.state is sessions.SessionState.OPEN:
            self.tree.add(turn, text)
        if not self.active and not self.tree.turns:
            self._temperature = None

    def numbered(self, count: int) -> int:
        """The first of `count` numbers reserved for planned generations."""
        first = self.generations
        self.generations += count
        return first

    def score(self, grant: Grant) -> None:
        """Records a reward. A repetition changes nothing.

        Raises InvalidInput for a value that is no reward, FailedPrecondition for a different second
        reward or a late one, NotFound for an unknown completion.
        """
        if not is_reward(grant.value):
            message = "a reward is a finite number"
            raise errors.InvalidInput(message, seen=grant.value, allowed=REWARD_RANGE)
        turn = self._turn(grant.completion_id)
        if turn is not None and grant.parts:
            raise errors.InvalidInput("parts of a turn's reward", allowed="of a session's reward")
        known = self.reward if turn is None else turn.reward
        if grant.accumulate:
            known = self._accumulated(grant, known)
        elif known == grant.value:
            return
        else:
            self.require_open()
            if known is not None:
                raise self._conflict(grant.value, known)
            known = grant.value

        if turn is None:
            self.reward = known
            self.reward_parts = grant.parts or self.reward_parts
        else:
            turn.reward = known

    def close(self, *, abort: bool = False, fail: sessions.FailReason | None = None) -> bool:
        """Ends the session: final with a reward, unscored without one, aborted or failed on
        request.

        Returns False if it had already ended.
        """
        if self.state is not sessions.SessionState.OPEN:
            return False
        self.fail_reason, states = fail, sessions.SessionState
        ended = states.FINAL if self.scored else states.UNSCORED
        self.state = states.FAILED if fail is not None else states.ABORTED if abort else ended
        if self._span is not None:
            self._span.set_attribute(names.SESSION_STATE, self.outcome)
            self._span.set_attribute(names.SESSION_TURNS, len(self.tree.turns))
            if self.reward is not None:
                self._span.set_attribute(names.REWARD, self.reward)
            self._span.end()
        self.ended.set()
        return True

    def require_open(self) -> None:
        """Raises FailedPrecondition with the state unless the session is open."""
        if self.state is not sessions.SessionState.OPEN:
            raise ended_error(self.session_id, self.state, self.fail_reason)

    def trajectories(self) -> list[Trajectory]:
        """Training samples of all generations; samples without a reward are never trained."""
        if self._ended_with is not None:
            return self._ended_with
        found = trees.samples(self.session_id, self.assignment, self.tree, self.reward)
        if parts := self.reward_parts:
            found = [replace(one, reward_parts=parts) for one in found]
        if self.state is not sessions.SessionState.OPEN:
            self._ended_with = found
        return found

    def _turn(self, completion_id: str) -> trees.Turn | None:
        if not completion_id:
            return None
        turn = self.tree.by_id(completion_id)
        if turn is None:
            known = ", ".join(turn.completion_id for turn in self.tree.turns[-8:])
            message = "the session has no such completion"
            raise errors.NotFound(message, seen=completion_id, allowed=known or None)
        return turn

    def _accumulated(self, grant: Grant, known: float | None) -> float:
        if not grant.idempotency_key:
            message = "an accumulated reward needs an idempotency_key"
            raise errors.InvalidInput(message, allowed="a name of its own")

        before = self._added.get(grant.idempotency_key)
        if before == grant and known is not None:
            return known
        self.require_open()
        if before is not None:
            raise self._conflict(grant.value, before.value)
        if len(self._added) >= 2 * self._limits.max_turns:
            raise errors.ResourceExhausted("too many rewards in one session", seen=len(self._added))
        total = (known or 0.0) + grant.value
        if not is_reward(total):
            message, seen = "accumulated rewards stay finite", f"{known:g} + {grant.value:g}"
            raise errors.InvalidInput(message, seen=seen, allowed=REWARD_RANGE)

        self._added[grant.idempotency_key] = grant
        return total

    def _conflict(self, seen: float, allowed: float) -> errors.FailedPrecondition:
        message = f"session {self.session_id} has another reward"
        reason = "REWARD_CONFLICT"
        return errors.FailedPrecondition(message, reason=reason, seen=seen, allowed=allowed)

    def _spent(self, what: str, limit: int) -> errors.FailedPrecondition:
        """The error for a used-up quota, which waiting does not renew."""
        message = f"session {self.session_id} has used up its {what}"
        return errors.FailedPrecondition(message, reason=QUOTA, seen=limit)


def ended_error(
    session_id: str, state: sessions.SessionState, reason: sessions.FailReason | None = None
) -> errors.FailedPrecondition:
    """The error for a call on an ended session."""
    seen, allowed = f"{state}: {reason}" if reason else str(state), sessions.SessionState.OPEN
    message, code = f"session {session_id} has ended", "SESSION_ENDED"
    return errors.FailedPrecondition(message, reason=code, seen=seen, allowed=allowed)


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request: the session of a key, or a caller without one."""

    session: Session | None = None

    @property
    def queue_key(self) -> str:
        """Key for the fair queue, in which keys take turns."""
        return "" if self.session is None else self.session.session_id
