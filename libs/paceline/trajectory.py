"""Nouns of a rollout as frozen dataclasses.

Owns their invariants; not their wire formats (streams, v1).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import zip_longest
from numbers import Real
from operator import attrgetter
from typing import Any, TypeVar

from paceline.errors import InvalidInput

LARGEST_REWARD = 1e15
"""Squares of larger ones leave the range of fp32 when a group's are summed."""
REWARD_RANGE = f"-{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"

ALIKE = 1e-6
"""Rewards that differ by less, relative to the larger, are equal: their difference is rounding."""

NEAR_TIE_GAP = 1e-5
"""A draw whose perturbed top-two gap is below this may flip with the batch composition."""

INT_LIMIT = 2**31
"""The wire's integers lie below it."""


@dataclass(frozen=True, slots=True)
class Range:
    """Values that a number may have; NaN is in none."""

    low: float
    high: float
    above: bool = False  # low itself is out
    or_zero: bool = False  # 0 is in as well, below low

    def holds(self, value: float) -> bool:
        """Whether a value may be used."""
        if self.or_zero and value == 0:
            return True
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        high = "" if self.high >= INT_LIMIT - 1 else f"{self.high:g}"
        if self.above:
            return f"above {self.low:g} and at most {high}"
        if self.or_zero:
            return f"0, or {self.low:g} to {high}"
        return f"{self.low:g} to {high}" if high else f"at least {self.low:g}"


TEMPERATURE = Range(9.999999682655225e-21, 10, or_zero=True)
"""Of the softmax; 0 is greedy. The least is 1e-20 in fp32, as the wire holds it: logits divided by
a smaller temperature above 0 may overflow.
"""


class Target(StrEnum):
    """Which weights of a version set."""

    POLICY = "policy"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True, order=True)
class VersionSet:
    """What serves together; only seq is monotone."""

    seq: int = 0
    policy: int = 0
    drafter: int = 0
    profile: str = ""  # that the policy is rounded to (models/profiles.py); "": not rounded

    def __str__(self) -> str:
        return f"p{self.policy}.d{self.drafter}" + (f".{self.profile}" if self.profile else "")


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) came from one policy version."""

    start: int
    end: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class DrawSpan:
    """Tokens [start, end) were drawn alike: in rounds of one arm, with one format of numbers, over
    keys and values that were made alike.
    """

    start: int
    end: int
    arm: str
    number_format: str  # "float32", "bfloat16", or the profile: "int8", "fp8_channel" ...
    reused: bool = False  # keys and values of the beginning were another sequence's
    stale: bool = False  # ... or were computed under an earlier policy


PLAIN_PATH, DRAFTED_PATH, REUSED_PATH, SWAPPED_PATH = "plain", "drafted", "reused", "swapped"
ARM_PATH, NUMBERS_PATH = "arm=", "numbers="
"""Names of the ways by which a token may have come, in an audit; the last two go before a name. See
proto AuditVerdict.
"""


Span = TypeVar("Span", VersionSpan, DrawSpan)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Neighbours that are alike but for their place as one."""
    listed = tuple(spans)
    if len(listed) < 2:
        return listed
    return tuple(
        one if one.end == end else replace(one, end=end)
        for one, end in runs(type(listed[0]), listed)
    )


def runs(kind: type[Any], spans: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """The first of neighbours that are alike but for their place, and where the last of them ends.

    spans: of this kind, or anything with its fields, such as messages: a streamed response brings
    two a chunk, and to make a noun of each costs more than to look at it.
    """
    about = _about(kind)
    first, seen, end = None, None, 0
    for span in spans:
        found = about(span)
        if first is None or span.start != end or found != seen:
            if first is not None:
                yield first, end
            first, seen = span, found
        end = span.end
    if first is not None:
        yield first, end


_ABOUT: dict[type[Any], Callable[[Any], Any]] = {}


def _about(kind: type[Any]) -> Callable[[Any], Any]:
    """Reads what a span says of its tokens."""
    if kind not in _ABOUT:
        names = [one.name for one in fields(kind) if one.name not in ("start", "end")]
        _ABOUT[kind] = attrgetter(*names)
    return _ABOUT[kind]


def added(one: Any, other: Any) -> Any:
    """The sum of two counters, of two lists of them place by place, or of two mappings by name."""
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
    if isinstance(one, Mapping):
        return {**one, **{name: one.get(name, 0) + count for name, count in other.items()}}
    return one + other


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters of draft, verify, accept; see proto SpeculationStats."""

    target_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_round_tokens: int = 0
    drafted_rounds: int = 0
    proposed_at: tuple[int, ...] = ()  # [K] rounds whose drafts reached position i + 1
    accepted_at: tuple[int, ...] = ()  # [K] rounds in which the draft there was accepted
    trained_rounds: int = 0
    trained_round_tokens: int = 0
    # drafted_rounds and drafted_round_tokens by arm
    arm_drafted_rounds: Mapping[str, int] = field(default_factory=dict)
    arm_round_tokens: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        return SpeculationStats(*map(added, _counters(self), _counters(other)))

    @property
    def accept_length(self) -> float:
        """Mean tokens per drafted round, bonus token included; 0 when nothing was drafted."""
        return self.drafted_round_tokens / self.drafted_rounds if self.drafted_rounds else 0.0


_counters = attrgetter(*(one.name for one in fields(SpeculationStats)))


@dataclass(frozen=True, slots=True)
class BranchKey:
    """A branch is appended once under this key."""

    run_id: str
    session_id: str
    branch_id: str = "0"

    def __str__(self) -> str:
        return f"{self.session_id}/{self.branch_id}"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished branch. T = prompt and response tokens together."""

    key: BranchKey
    step: int
    task_id: str
    group_id: str
    group_size: int
    task_index: int
    sample_index: int
    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[int, ...]  # [T] 1 where generated
    behavior_logprobs: tuple[float, ...]  # [T] 0 where the mask is 0
    version_spans: tuple[VersionSpan, ...]
    reward: float | None
    seed: int
    temperature: float
    finish_reason: str = "stop"  # "stop" | "length"
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    branch_count: int = 1  # branches of the session that are trained, this one included
    draw_spans: tuple[DrawSpan, ...] = ()
    # what each rule of a mixture gave the session, before its weight
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    accepted_drafts: tuple[int, ...] = ()  # [T] 1 where a draft was accepted; empty: nowhere

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.loss_mask), len(self.behavior_logprobs))
        if len(set(lengths)) != 1:
            raise InvalidInput(
                "token_ids, loss_mask and behavior_logprobs of a trajectory must be equally long",
                seen=lengths,
            )
        if any(bit not in (0, 1) for bit in self.loss_mask):
            raise InvalidInput("loss_mask holds 0 and 1 only", seen=sorted(set(self.loss_mask))[:4])
        if self.branch_count < 1:
            raise InvalidInput(
                "branch_count of a trajectory counts the branch itself", seen=self.branch_count
            )

    @property
    def finite(self) -> bool:
        """Whether every log-prob and the reward are numbers to compute with."""
        return all(map(math.isfinite, self.behavior_logprobs)) and is_reward(self.reward or 0.0)

    @property
    def trained_tokens(self) -> int:
        """Tokens with loss."""
        return sum(self.loss_mask)


def is_reward(value: object) -> bool:
    """Whether a value can be a reward: a real number that is neither NaN nor infinite nor beyond
    LARGEST_REWARD.
    """
    if not isinstance(value, Real):
        return False
    return bool(value <= LARGEST_REWARD) and not value < -LARGEST_REWARD


def equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether an advantage over these siblings is zero: they are equal but for rounding (ALIKE), or
    fewer than two.
    """
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= ALIKE * max(abs(low), abs(high))


def request_seed(run_seed: int, step: int, task_id: str, sample_index: int) -> int:
    """Seed of one request: a hash of (run seed, step, task, sample), never of time or request id.

    Returns an unsigned 63-bit integer.
    """
    text = f"{run_seed}/{step}/{task_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def tokens_hash(token_ids: Sequence[int]) -> str:
    """sha256 over little-endian int32 token ids, hex, first 16 characters."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).hexdigest()[:16]
