"""The message tree of a session, and its cut into training samples.

A turn's tokens are its parent's, then the new ones of its prompt, then the model's answer. An
answer is never tokenised again: a request that extends a known history adds only the tokens after
it, and a changed history begins a fork.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.errors import TrainabilityError
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.services.rollout_gateway.engines.sampling import OVERRIDABLE, Sampling, untrainable
from paceline.services.rollout_gateway.sessions import Assignment
from paceline.trajectory import BranchKey, DrawSpan, SpeculationStats, Trajectory, VersionSpan


@dataclass(eq=False, slots=True)
class Turn:
    """One generation. Token counts: P of `prompt_ids`, R of `response_ids`."""

    completion_id: str  # the completion's name for the agent
    parent: Turn | None
    prompt_ids: tuple[int, ...]  # [P] read by the engine after the parent's tokens
    response_ids: tuple[int, ...]  # [R] drawn by the model
    behavior_logprobs: tuple[float, ...]  # [R]
    version_spans: tuple[VersionSpan, ...]  # counted from the first token of the path
    draw_spans: tuple[DrawSpan, ...]  # likewise
    finish: str  # "stop" | "length"
    seed: int
    temperature: float
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    smallest_gap: float = math.inf  # between the two best draws of any of its tokens
    message: Message | None = None  # as sent to the agent, in a conversation
    digest: bytes = b""  # of the conversation up to this message
    accepted_drafts: tuple[bool, ...] = ()  # [R]; empty: no accepted draft
    reward: float | None = None
    children: list[Turn] = field(default_factory=list)

    @property
    def path(self) -> list[Turn]:
        """Turns from the root to this one."""
        found = [self]
        while (turn := found[-1].parent) is not None:
            found.append(turn)
        return found[::-1]

    @property
    def token_ids(self) -> list[int]:
        """[T] all tokens up to the end of this answer."""
        return [one for turn in self.path for one in (*turn.prompt_ids, *turn.response_ids)]

    @property
    def tokens(self) -> int:
        """Number of tokens that this turn added."""
        return len(self.prompt_ids) + len(self.response_ids)


class MessageTree:
    """Turns of one session in the order of their ends."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.tokens = 0
        self._roots: list[Turn] = []
        self._by_digest: dict[bytes, Turn] = {}
        # characters -> sha256 of that much text -> turn
        self._by_text: dict[int, dict[bytes, Turn]] = {}

    def add(self, turn: Turn, text: str = "") -> None:
        """Adds a finished generation. `text`: of prompt and response, if the prompt was text."""
        (self._roots if turn.parent is None else turn.parent.children).append(turn)
        self.turns.append(turn)
        self.tokens += turn.tokens
        if turn.digest:
            self._by_digest[turn.digest] = turn
        if text:
            self._by_text.setdefault(len(text), {})[_hash(text)] = turn

    def by_id(self, completion_id: str) -> Turn | None:
        """The turn of that name."""
        return next((turn for turn in self.turns if turn.completion_id == completion_id), None)

    def extended_by_messages(self, digests: Sequence[bytes]) -> tuple[Turn, int] | None:
        """The deepest turn that a conversation continues, and the number of messages that it
        covers.
        """
        for count in range(len(digests) - 1, 0, -1):
            if (turn := self._by_digest.get(digests[count])) is not None:
                return turn, count
        return None

    def extended_by_text(self, prompt: str) -> tuple[Turn, str] | None:
        """The turn with the longest known text at the beginning of a prompt, and the rest of the
        prompt.
        """
        for length in sorted((one for one in self._by_text if one <= len(prompt)), reverse=True):
            if (turn := self._by_text[length].get(_hash(prompt[:length]))) is not None:
                return turn, prompt[length:]
        return None

    def extended_by_tokens(self, prompt: tuple[int, ...]) -> Turn | None:
        """The deepest turn with tokens at the beginning of a prompt."""
        best, longest = None, 0
        open_turns = [(turn, 0) for turn in self._roots]
        while open_turns:
            turn, start = open_turns.pop()
            end = start + turn.tokens
            if prompt[start:end] != turn.prompt_ids + turn.response_ids:
                continue
            if end > longest:
                best, longest = turn, end
            open_turns.extend((child, end) for child in turn.children)
        return best

    def branches(self) -> Iterator[Branch]:
        """Every path from a root to a leaf; each turn is trained in the first path that contains
        it.
        """
        trained: set[int] = set()
        for leaf in (turn for turn in self.turns if not turn.children):
            path = leaf.path
            yield Branch(path, [turn for turn in path if id(turn) not in trained])
            trained.update(id(turn) for turn in path)


class Branch(NamedTuple):
    """A path of turns as one training sample."""

    path: Sequence[Turn]
    # turns with loss here; the other turns have theirs in an earlier branch
    trained: Sequence[Turn]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


SHOWN_CHARACTERS = 40
_OFF = Sampling(seed=0, max_tokens=1)


def samples(
    session_id: str, about: Assignment, tree: MessageTree, reward: float | None
) -> list[Trajectory]:
    """Samples with every generated token once. Samples without a reward have reward None;
    branch_count counts the rest.

    Without turn_discount a branch is one sample, and its reward is the session's plus its turns'.
    With turn_discount every turn is one sample: R_t = r_t + turn_discount * R_(t+1), where the
    session's reward is added to the last turn.
    """
    lines = list(tree.branches())
    if about.turn_discount is None:
        found = [(line, _total([reward, *(turn.reward for turn in line.path)])) for line in lines]
    else:
        found = [one for line in lines for one in _turns(line, reward, about.turn_discount)]

    scored = sum(value is not None for _, value in found)
    keys = [BranchKey(about.run_id, session_id, str(index)) for index in range(len(found))]
    pairs = zip(keys, found, strict=True)
    return [_trajectory(key, about, line, value, scored) for key, (line, value) in pairs]


def check_trainable(sampling: Sampling) -> None:
    """Raises TrainabilityError for sampling under which the trainer, which uses the temperature
    alone, would find other log-probs.
    """
    if found := untrainable(sampling):
        advice = "open the session with trainable=false or leave the setting out"
        seen = ", ".join(f"{name}={_short(value)}" for name, value in found.items())
        allowed = "temperature > 0, and neutral values of the parameters that change draws"
        message = f"these samples cannot be trained; {advice}"
        raise TrainabilityError(message, seen=seen, allowed=allowed)


def overridden(sampling: Sampling, temperature: float) -> tuple[Sampling, tuple[str, ...]]:
    """The sampling with the run's values for parameters that change the drawn token, and the
    changes as "name=value used".

    Sampling that stays untrainable is returned unchanged: requirements on an answer are never
    overridden.
    """
    own = {name: getattr(_OFF, name) for name in OVERRIDABLE} | {"temperature": temperature}
    drawn = replace(sampling, **own)
    if untrainable(drawn):
        return sampling, ()
    changes = (
        f"{name}={used:g}" if isinstance(used, int | float) else f"{name}=none"
        for name, used in own.items()
        if not _same(getattr(sampling, name), used)
    )
    return drawn, tuple(changes)


def _same(asked: object, used: object) -> bool:
    """Whether two values are equal within a wire's precision."""
    if isinstance(asked, int | float) and isinstance(used, int | float):
        return math.isclose(asked, used, rel_tol=1e-6)
    return asked == used


def _total(rewards: Sequence[float | None]) -> float | None:
    given = [value for value in rewards if value is not None]
    return sum(given) if given else None


def _turns(
    line: Branch, reward: float | None, discount: float
) -> list[tuple[Branch, float | None]]:
    """A sample for each turn that this branch trains, with its return."""
    following, found = reward, []
    for index, turn in reversed(list(enumerate(line.path))):
        factor = 1.0 if turn is line.path[-1] else discount
        if turn.reward is not None or following is not None:
            following = (turn.reward or 0.0) + factor * (following or 0.0)
        if turn in line.trained:
            found.append((Branch(line.path[: index + 1], [turn]), following))
    return found[::-1]


def _trajectory(
    key: BranchKey, about: Assignment, line: Branch, reward: float | None, scored: int
) -> Trajectory:
    mask, logprobs, accepted = list[int](), list[float](), list[int]()
    for turn in line.path:
        bit, asked, said = turn in line.trained, len(turn.prompt_ids), len(turn.response_ids)
        mask += [0] * asked + [int(bit)] * said
        logprobs += [0.0] * asked
        logprobs += turn.behavior_logprobs if bit else [0.0] * said
        told = turn.accepted_drafts if bit else ()
        accepted += [0] * asked + [*map(int, told or [0] * said)]

    last = line.path[-1]
    return Trajectory(
        key=key,
        step=about.step,
        task_id=about.task_id,
        group_id=about.group_id or key.session_id,
        group_size=about.group_size,
        task_index=about.task_index,
        sample_index=about.sample_index,
        token_ids=tuple(last.token_ids),
        loss_mask=tuple(mask),
        behavior_logprobs=tuple(logprobs),
        version_spans=tuple(span for turn in line.trained for span in turn.version_spans),
        draw_spans=tuple(span for turn in line.trained for span in turn.draw_spans),
        reward=reward,
        seed=last.seed,
        temperature=last.temperature,
        finish_reason=last.finish,
        speculation=sum((turn.speculation for turn in line.trained), SpeculationStats()),
        branch_count=max(scored, 1),
        accepted_drafts=tuple(accepted) if any(accepted) else (),
    )


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
