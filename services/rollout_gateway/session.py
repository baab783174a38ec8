"""Sessions: the exact tokens of what a model saw and said, who generated them, and what they earned.

Owns states, branches, loss masks and time-outs. It neither generates nor sends anything.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.errors import FailedPrecondition, InvalidInput, NotFound, ResourceExhausted, TrainabilityError
from paceline.trajectory import BranchKey, SpeculationStats, Trajectory, VersionSpan
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.engines import wire

ENDED_REMEMBERED = 4096
FINISH_NAMES = {
    tpb.FINISH_REASON_UNSPECIFIED: "",
    tpb.FINISH_REASON_STOP: "stop",
    tpb.FINISH_REASON_LENGTH: "length",
    tpb.FINISH_REASON_ABORT: "abort",
    tpb.FINISH_REASON_ERROR: "error",
}


class State(StrEnum):
    """Life of a session."""

    OPEN = "open"
    FINAL = "final"
    UNSCORED = "unscored"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a session answers."""

    run_id: str
    step: int = 0
    task_id: str = ""
    group_id: str = ""
    group_size: int = 1
    task_index: int = 0
    sample_index: int = 0
    trainable: bool = True


@dataclass
class Branch:
    """One line of tokens. T grows with every generation; what a fork shares with its origin is masked out in it."""

    branch_id: str
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    finish: str = ""
    seed: int = 0
    temperature: float = 1.0
    busy: bool = False

    def append(self, prompt: Sequence[int], sampling: tpb.SamplingParams, chunk: pb.TokenChunk) -> None:
        """Record a generation whose prompt extends this branch."""
        fresh = prompt[len(self.token_ids) :]
        self.token_ids += [*fresh, *chunk.token_ids]
        self.loss_mask += [0] * len(fresh) + [1] * len(chunk.token_ids)
        self.behavior_logprobs += [0.0] * len(fresh) + list(chunk.behavior_logprobs)
        self.version_spans += wire.spans_from(chunk.version_spans, shift=len(prompt))
        self.speculation += wire.stats_from(chunk.speculation)
        self.finish = FINISH_NAMES[chunk.finish_reason]
        self.seed, self.temperature = sampling.seed, sampling.temperature


class Session:
    """Generations that become one trajectory per branch."""

    def __init__(self, session_id: str, assignment: Assignment, now_s: float = 0.0) -> None:
        self.session_id = session_id
        self.assignment = assignment
        self.state = State.OPEN
        self.reward: float | None = None
        self.branches: list[Branch] = []
        self.worker_index: int | None = None  # holds the prefix in its cache
        self.touched_s = now_s

    def begin(self, prompt: Sequence[int], sampling: tpb.SamplingParams) -> Branch:
        """The branch a generation goes to: one that the prompt extends, else a new one. Call `end` afterwards.

        Raises FailedPrecondition when the session has ended, TrainabilityError for sampling that cannot be trained.
        """
        self.require_open()
        if self.assignment.trainable:
            check_trainable(sampling)
            if any(branch.token_ids and branch.temperature != sampling.temperature for branch in self.branches):
                raise TrainabilityError(
                    "a session to be trained keeps one temperature",
                    seen=sampling.temperature,
                    allowed=self.branches[0].temperature,
                )
        head = list(prompt)
        fits = [
            branch
            for branch in self.branches
            if not branch.busy and branch.token_ids and head[: len(branch.token_ids)] == branch.token_ids
        ]
        branch = max(fits, key=lambda one: len(one.token_ids), default=None)
        if branch is None:
            branch = Branch(str(len(self.branches)))
            self.branches.append(branch)
        branch.busy = True
        return branch

    def end(
        self, branch: Branch, prompt: Sequence[int], sampling: tpb.SamplingParams, chunk: pb.TokenChunk | None
    ) -> None:
        """Record the generation; one that failed or was cancelled (None) leaves the branch as it was."""
        branch.busy = False
        if chunk is not None and chunk.finish_reason in (tpb.FINISH_REASON_STOP, tpb.FINISH_REASON_LENGTH):
            branch.append(prompt, sampling, chunk)

    @property
    def busy(self) -> bool:
        """True while a generation runs."""
        return any(branch.busy for branch in self.branches)

    def score(self, value: float) -> None:
        """Give the reward. The same value again changes nothing; another or a late one raises FailedPrecondition."""
        if not math.isfinite(value):
            raise InvalidInput("a reward is a finite number", seen=value)
        if self.reward == value:
            return
        self.require_open()
        if self.reward is not None:
            raise FailedPrecondition(
                f"session {self.session_id} has another reward",
                reason="REWARD_CONFLICT",
                seen=value,
                allowed=self.reward,
            )
        self.reward = value

    def close(self, *, abort: bool = False) -> bool:
        """End: final with a reward, unscored without one, aborted on request. False when it had ended before."""
        if self.state is not State.OPEN:
            return False
        scored = State.UNSCORED if self.reward is None else State.FINAL
        self.state = State.ABORTED if abort else scored
        return True

    def require_open(self) -> None:
        """Raises FailedPrecondition naming the state."""
        if self.state is not State.OPEN:
            raise FailedPrecondition(
                f"session {self.session_id} has ended", reason="SESSION_ENDED", seen=self.state, allowed=State.OPEN
            )

    def trajectories(self) -> list[Trajectory]:
        """A trajectory for each branch that has generated tokens."""
        return [self._trajectory(branch) for branch in self.branches if any(branch.loss_mask)]

    def _trajectory(self, branch: Branch) -> Trajectory:
        about = self.assignment
        return Trajectory(
            key=BranchKey(about.run_id, self.session_id, branch.branch_id),
            step=about.step,
            task_id=about.task_id,
            group_id=about.group_id or self.session_id,
            group_size=about.group_size,
            task_index=about.task_index,
            sample_index=about.sample_index,
            token_ids=tuple(branch.token_ids),
            loss_mask=tuple(branch.loss_mask),
            behavior_logprobs=tuple(branch.behavior_logprobs),
            version_spans=tuple(branch.version_spans),
            reward=self.reward,
            seed=branch.seed,
            temperature=branch.temperature,
            finish_reason=branch.finish,
            speculation=branch.speculation,
        )


def check_trainable(sampling: tpb.SamplingParams) -> None:
    """Raises TrainabilityError for sampling whose log-probs the trainer cannot recompute.

    With a JSON schema the behavior log-probs are of the distribution its grammar masks, which no trainer knows.
    """
    refused = {
        "top_p": sampling.top_p if 0 < sampling.top_p < 1 else None,
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty not in (0, 1) else None,
        "entries of logit_bias": len(sampling.logit_bias) or None,
        "bytes of json_schema": len(sampling.json_schema) or None,
        "temperature": None if sampling.temperature > 0 else sampling.temperature,
    }
    found = {name: value for name, value in refused.items() if value is not None}
    if found:
        raise TrainabilityError(
            "these samples cannot be trained; open the session with trainable=false or leave the setting out",
            seen=", ".join(f"{name}={value:g}" for name, value in found.items()),
            allowed="temperature > 0, top_p=1, top_k=0, min_p=0, no penalty, no logit_bias, no response_format",
        )


class Sessions:
    """Sessions of callers. Bounded in number; silent ones end by time-out."""

    def __init__(self, limit: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._clock = clock
        self._open: OrderedDict[str, Session] = OrderedDict()  # longest silent first
        self._ended: OrderedDict[str, State] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, assignment: Assignment) -> Session:
        """A new session. Raises ResourceExhausted when too many are open."""
        if len(self._open) >= self._limit:
            raise ResourceExhausted("too many sessions are open", seen=len(self._open), allowed=self._limit)
        session = Session(uuid.uuid4().hex, assignment, self._clock())
        self._open[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """An open session, now touched. Raises NotFound, or FailedPrecondition naming the state of an ended one."""
        session = self._open.get(session_id)
        if session is None:
            if session_id in self._ended:
                raise FailedPrecondition(
                    f"session {session_id} has ended",
                    reason="SESSION_ENDED",
                    seen=self._ended[session_id],
                    allowed="open",
                )
            raise NotFound("no such session", seen=session_id)
        session.touched_s = self._clock()
        self._open.move_to_end(session_id)
        return session

    def ended(self, session_id: str) -> State | None:
        """State of a session that ended lately."""
        return self._ended.get(session_id)

    def remove(self, session: Session) -> None:
        """Forget an ended session but for its state."""
        self._open.pop(session.session_id, None)
        self._ended[session.session_id] = session.state
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def expired(self) -> list[Session]:
        """Sessions silent for longer than the time-out; generating counts as a sign of life."""
        now = self._clock()
        silent = [one for one in self._open.values() if one.touched_s <= now - self._timeout_s]
        for session in silent:
            if session.busy:
                session.touched_s = now
                self._open.move_to_end(session.session_id)
        return [session for session in silent if not session.busy]

    def next_expiry_s(self) -> float:
        """Seconds until a session may expire."""
        oldest = next(iter(self._open.values()), None)
        return self._timeout_s if oldest is None else max(oldest.touched_s + self._timeout_s - self._clock(), 0.05)
