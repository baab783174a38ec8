"""All sessions of one gateway: by id, by key, by completion, by conversation; and their JSON.

The registry bounds their number and ends silent ones.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from paceline.errors import FailedPrecondition, NotFound, ResourceExhausted
from paceline.services.rollout_gateway.config import SessionsConfig
from paceline.services.rollout_gateway.sessions import Assignment, FailReason, SessionState
from paceline.services.rollout_gateway.sessions.names import GatewayNames
from paceline.services.rollout_gateway.sessions.session import Session, ended_error
from paceline.services.rollout_gateway.sessions.tree import Turn
from paceline.streams import api_key_hash
from paceline.tagged_json import to_object
from paceline.trajectory import Trajectory

_SHOWN_OF_ASSIGNMENT = ("task_id", "group_size", "sample_index", "trainable", "turn_discount")


def session_json(session: Session) -> dict[str, Any]:
    """The answer of GET /v1/sessions/{id}."""
    about, turns = session.assignment, session.tree.turns
    return {
        "id": session.session_id,
        "object": "session",
        "state": session.state,
        "group_id": session.group_id,
        **{name: getattr(about, name) for name in _SHOWN_OF_ASSIGNMENT},
        "override_sampling": about.trainable and about.override,
        "reward": session.reward,
        "fail_reason": session.fail_reason,
        "turns": len(turns),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
        "completion_tokens": sum(len(turn.response_ids) for turn in turns),
        "task": None,
    }


def tree_json(session: Session) -> dict[str, Any]:
    """The message tree, turn by turn in the order of their ends; parents are given by completion
    id.
    """
    return {**session_json(session), "tree": [_turn_json(turn) for turn in session.tree.turns]}


def samples_json(session: Session) -> dict[str, Any]:
    """The samples for training."""
    found = session.trajectories()
    samples = [to_object(one) | _spans_json(one) for one in found]
    return {**session_json(session), "samples": samples}


def _turn_json(turn: Turn) -> dict[str, Any]:
    lists = ("prompt_ids", "response_ids", "behavior_logprobs")
    return {
        "completion_id": turn.completion_id,
        "parent": None if turn.parent is None else turn.parent.completion_id,
        **{name: list(getattr(turn, name)) for name in lists},
        **_spans_json(turn),
        "finish_reason": turn.finish,
        "seed": turn.seed,
        "temperature": turn.temperature,
        "smallest_gap": turn.smallest_gap if math.isfinite(turn.smallest_gap) else None,
        "message": None if turn.message is None else turn.message.shown(),
        "reward": turn.reward,
    }


def _spans_json(of: Turn | Trajectory) -> dict[str, list[list[Any]]]:
    own: dict[str, Sequence[Any]] = {"version_spans": of.version_spans, "draw_spans": of.draw_spans}
    return {name: [list(astuple(one)) for one in spans] for name, spans in own.items()}


KEY_PREFIX = "sk-pl-"
ENDED_REMEMBERED = 4096
LEAST_WAIT_S = 0.25
"""Minimum seconds between two checks of all sessions."""


@dataclass(eq=False, slots=True)
class Ended:
    """The record of an ended session."""

    session_id: str
    state: SessionState
    reason: FailReason | None = None
    hashed_key: str = ""  # hash of the session's API key
    # state at its end; without turns for a former process's session
    shown: Mapping[str, Any] = field(default_factory=dict)
    # the session's turns; None once later sessions have replaced them
    session: Session | None = field(default=None, repr=False)

    def json(self) -> dict[str, Any]:
        """The record as JSON."""
        return {
            "id": self.session_id,
            "object": "session",
            "state": self.state,
            "fail_reason": self.reason,
            **self.shown,
        }

    def error(self) -> FailedPrecondition:
        """The error for a call on it."""
        return ended_error(self.session_id, self.state, self.reason)


class Sessions:
    """Open sessions and the names of ended ones. Bounded in number; silent sessions end by
    time-out.
    """

    def __init__(
        self,
        config: SessionsConfig,
        clock: Callable[[], float] = time.monotonic,
        names: GatewayNames | None = None,
    ) -> None:
        """`names`: None draws the names of a single gateway."""
        self._config = config
        self._names = names or GatewayNames()
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._implicit: OrderedDict[str, Session] = OrderedDict()  # longest silent first
        self._completions: dict[str, Session] = {}
        self._conversations: dict[bytes, Session] = {}  # of implicit sessions
        # Hash of the API key -> its session.
        self._keys: dict[str, Session] = {}
        self._ended_keys: OrderedDict[str, Ended] = OrderedDict()
        self._ended: OrderedDict[str, Ended] = OrderedDict()  # the last attempt of each id
        self._kept: deque[Ended] = deque()  # with their turns
        self._kept_tokens = 0
        self.opened_early = asyncio.Event()
        """Set when a session opens that may expire before the next check."""
        self._next_check_s = math.inf

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._open

    def open(self, assignment: Assignment, session_id: str = "") -> Session:
        """A new session with its own key. Raises ResourceExhausted when too many are open."""
        if len(self._open) >= self._config.limit and not self._drop_implicit():
            seen, allowed = len(self._open), self._config.limit
            raise ResourceExhausted("too many sessions are open", seen=seen, allowed=allowed)

        key = "" if assignment.implicit else self._names.draw(KEY_PREFIX, 24)
        session_id = session_id or self._names.draw()
        session = Session(session_id, assignment, self._config, key, touched_s=self._clock())
        self._ended.pop(session_id, None)  # another attempt under its id
        self._open[session_id] = session
        if key:
            self._keys[api_key_hash(key)] = session
        else:
            self._implicit[session_id] = session
        if self._deadline(session) < self._next_check_s:
            self.opened_early.set()
        return session

    def get(self, session_id: str) -> Session:
        """An open session; the call counts as a sign of life.

        Raises NotFound, or FailedPrecondition with the state of an ended session.
        """
        session = self._open.get(session_id)
        if session is None:
            if session_id in self._ended:
                raise self._ended[session_id].error()
            self._names.require_own(session_id)
            raise NotFound("no such session", seen=session_id)
        return self._touched(session)

    def by_key(self, api_key: str) -> Session | None:
        """The session of a key; None for an unknown key.

        Raises FailedPrecondition for an ended session.
        """
        hashed = api_key_hash(api_key)
        if hashed in self._ended_keys:
            raise self._ended_keys[hashed].error()
        session = self._keys.get(hashed)
        return None if session is None else self._touched(session)

    def owner(self, api_key: str) -> str | None:
        """Id of the open session or last ended attempt that owns a key; None for other keys."""
        hashed = api_key_hash(api_key)
        if hashed in self._keys:
            return self._keys[hashed].session_id
        ended = self._ended_keys.get(hashed)
        if ended is not None and self._ended.get(ended.session_id) is ended:
            return ended.session_id
        return None

    def by_completion(self, completion_id: str) -> Session:
        """The open session of a completion. Raises NotFound."""
        if completion_id not in self._completions:
            self._names.require_own(completion_id)
            raise NotFound("no open session has this completion", seen=completion_id)
        return self._touched(self._completions[completion_id])

    def by_conversation(self, digests: Sequence[bytes]) -> Session | None:
        """The implicit session with a model message that this conversation continues."""
        for digest in reversed(digests[1:]):
            if digest in self._conversations:
                return self._touched(self._conversations[digest])
        return None

    def record_turn(self, session: Session, turn: Turn) -> None:
        """A turn was added, which is a sign of life."""
        if self._open.get(session.session_id) is not session:
            return  # the session has ended, and a later attempt may have its name
        self._touched(session)
        self._completions[turn.completion_id] = session
        if turn.digest and session.assignment.implicit:
            self._conversations[turn.digest] = session

    def find(self, session_id: str) -> Session | Ended:
        """An open session, with a sign of life, or the record of a recently ended one.

        Raises NotFound.
        """
        return self._ended.get(session_id) or self.get(session_id)

    def remove(self, session: Session) -> None:
        """Removes an ended session but keeps its record."""
        self._open.pop(session.session_id, None)
        self._implicit.pop(session.session_id, None)
        for turn in session.tree.turns:
            self._completions.pop(turn.completion_id, None)
            if self._conversations.get(turn.digest) is session:
                del self._conversations[turn.digest]
        if session.assignment.implicit:
            return
        hashed = api_key_hash(session.api_key)
        self._keys.pop(hashed, None)
        reason, shown = session.fail_reason, session_json(session)
        ended = Ended(session.session_id, session.state, reason, hashed, shown, session)
        self.note_ended(ended)
        self._kept.append(ended)
        self._kept_tokens += session.tree.tokens
        while self._kept_tokens > self._config.ended_tokens or len(self._kept) > ENDED_REMEMBERED:
            oldest = self._kept.popleft()
            self._kept_tokens -= oldest.session.tree.tokens if oldest.session else 0
            oldest.session = None

    def note_ended(self, ended: Ended) -> None:
        """Records the end of a session, which may belong to a former process."""
        for known, name in ((self._ended, ended.session_id), (self._ended_keys, ended.hashed_key)):
            known[name] = ended
            known.move_to_end(name)
            if len(known) > ENDED_REMEMBERED:
                known.popitem(last=False)

    def expired(self) -> list[Session]:
        """Sessions silent for longer than their time-out; a running generation is a sign
        of life.
        """
        now = self._clock()
        for session in [one for one in self._open.values() if one.active]:
            self._touched(session)
        return [session for session in self._open.values() if self._deadline(session) <= now]

    def next_expiry_s(self) -> float:
        """Seconds until a session may expire."""
        now = self._clock()
        latest = now + min(self._config.timeout_s, self._config.implicit_timeout_s)
        due = min(map(self._deadline, self._open.values()), default=latest)
        self._next_check_s = min(max(due, now + LEAST_WAIT_S), latest)
        return self._next_check_s - now

    def _touched(self, session: Session) -> Session:
        session.touched_s = self._clock()
        if session.assignment.implicit:
            self._implicit.move_to_end(session.session_id)
        return session

    def _deadline(self, session: Session) -> float:
        """Time at which the session expires."""
        if session.assignment.implicit:
            return session.touched_s + self._config.implicit_timeout_s
        longest_s = self._config.timeout_s
        return session.touched_s + min(session.assignment.timeout_s or longest_s, longest_s)

    def _drop_implicit(self) -> bool:
        """Makes room by removing the implicit conversation that has been silent longest and has no
        reward.
        """
        for session in self._implicit.values():
            if not session.active and not session.scored:
                session.close()
                self.remove(session)
                return True
        return False
