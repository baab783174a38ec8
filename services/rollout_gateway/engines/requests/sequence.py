"""Follows one request inside the engine: its tokens, its stages and its end.

Each stage has one entry, however many rounds it had, so the engine's report is bounded. Times are
from the machine's clock, which the gateway shares.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from paceline.services.rollout_gateway.engines import nouns
from paceline.services.rollout_gateway.engines.requests.stop_texts import StopText
from paceline.trajectory import DrawSpan, SpeculationStats, VersionSpan, merged
from paceline.v1 import engine_pb2 as pb

QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"
DECODE_STAGES = 12
"""Pairs of arm and policy version with an entry of their own. Rounds of further pairs are added to
the last entry.
"""


class Stages:
    """The stages of a request from its enqueueing on."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._enqueued = self._last = clock()
        self._admitted = self._cached = 0  # 0: not yet
        self._rounds: dict[tuple[str, int], list[int]] = {}  # start, end, busy, rounds, tokens

    def admitted(self) -> None:
        """The request has got a slot; only the first call counts."""
        self._admitted = self._admitted or self._clock()

    def cached(self) -> None:
        """The prompt is cached and rounds begin; only the first call counts.

        An engine that draws the first token with the prompt never calls this method.
        """
        if not self._cached:
            self._cached = self._last = self._clock()

    def round(self, arm: str, policy_version: int, tokens: int, *, begins: bool = True) -> None:
        """The request took tokens of a round that ends now. begins: they are the round's first
        tokens.
        """
        now = self._clock()
        if not self._cached:  # the prompt's own forward gave the tokens
            self._cached = self._last = now
        key = (arm, policy_version)
        if key not in self._rounds and len(self._rounds) >= DECODE_STAGES:
            key = next(reversed(self._rounds))
        stage = self._rounds.setdefault(key, [self._last, now, 0, 0, 0])
        stage[1] = now
        stage[2] += now - self._last
        stage[3] += begins
        stage[4] += tokens
        self._last = now

    def times(self, prompt_tokens: int) -> tuple[pb.StageTime, ...]:
        """All stages so far, ordered by their start.

        prompt_tokens: prompt tokens that were computed for the request, not copied.
        """
        found = []
        if self._admitted:
            found.append(_between(QUEUE, self._enqueued, self._admitted))
        if self._cached:
            start = self._admitted or self._enqueued
            found.append(_between(PREFILL, start, self._cached, prompt_tokens))
        for (arm, version), (start, end, busy, rounds, tokens) in self._rounds.items():
            one = pb.StageTime(stage=DECODE, arm=arm, policy_version=version, rounds=rounds)
            one.MergeFrom(pb.StageTime(start_ns=start, end_ns=end, tokens=tokens))
            one.busy_s = busy / 1e9
            found.append(one)
        return tuple(found)


def _between(stage: str, start_ns: int, end_ns: int, tokens: int = 0) -> pb.StageTime:
    one = pb.StageTime(stage=stage, start_ns=start_ns, end_ns=end_ns, tokens=tokens)
    one.busy_s = (end_ns - start_ns) / 1e9
    return one


class DrawnBy(NamedTuple):
    """Origin of a token: the policy version, arm and number format of its draw."""

    policy_version: int
    arm: str
    number_format: str
    reused: bool = False  # `reused` and `stale` as in DrawSpan
    stale: bool = False


@dataclass(eq=False, slots=True)
class RunningSequence:
    """A request that has a slot or waits for a slot."""

    request: nouns.Request
    stop_ids: frozenset[int]
    token_limit: int  # response tokens at most
    stop_text: StopText | None = None
    enqueued_s: float = field(default_factory=time.perf_counter)
    stages: Stages = field(default_factory=Stages)
    length: int = 0  # tokens of prompt and response
    # tokens with keys, values and state in the slot; decoding needs length - 1
    cached: int = 0
    captured: int = 0  # cached tokens with hidden rows that have left
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    # for each token, whether it was a draft
    accepted_drafts: list[bool] = field(default_factory=list)
    # first response token of each origin; it covers the tokens up to the next
    origins: list[tuple[int, DrawnBy]] = field(default_factory=list)
    copied: int = 0  # prompt tokens with a cache copied from another sequence
    stale: bool = False  # part of the cache was computed under an earlier policy
    reported: int = 0  # response tokens already reported
    # scores of the prompt's tokens from the second on, if requested; None once reported
    prompt_scores: list[pb.PromptScore] | None = field(default_factory=list)
    smallest_gap: float = float("inf")
    finish: nouns.Finish | None = None
    error: str = ""  # reason, when the request ends by a fault of its own
    matched_stop: str = ""
    first_token_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)  # by field of SpeculationStats
    proposed_at: list[int] = field(default_factory=list)  # see SpeculationStats
    accepted_at: list[int] = field(default_factory=list)
    arm_rounds: Counter[str] = field(default_factory=Counter)  # drafted rounds only
    arm_tokens: Counter[str] = field(default_factory=Counter)  # tokens of the drafted rounds

    @property
    def lacking(self) -> int:
        """Tokens to prefill before the sequence can decode."""
        return self.length - 1 - self.cached

    def append_tokens(
        self,
        tokens: list[int],
        logprobs: list[float],
        gaps: list[float],
        origin: DrawnBy,
        accepted: int,
        *,
        begins: bool = True,
    ) -> int:
        """Append a round's tokens up to the first end condition; returns the number of tokens
        taken.

        The first `accepted` tokens were drafts. begins: the tokens are the first tokens of their
        round.
        """
        if not self.tokens:
            self.first_token_s = time.perf_counter() - self.enqueued_s
        if self.copied or self.stale:
            origin = origin._replace(reused=self.copied > 0, stale=self.stale)
        taken = 0
        for token, logprob, gap in zip(tokens, logprobs, gaps, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.accepted_drafts.append(taken < accepted)
            self.smallest_gap = min(self.smallest_gap, gap)
            taken += 1
            if self._ended(token):
                break
        self.length += taken
        self.cached = self.length - 1
        if not self.origins or self.origins[-1][1] != origin:
            self.origins.append((len(self.tokens) - taken, origin))
        self.stages.round(origin.arm, origin.policy_version, taken, begins=begins)
        return taken

    def _ended(self, token: int) -> bool:
        least = self.request.sampling.min_tokens
        if token in self.stop_ids:
            self.finish = nouns.Finish.STOP
        elif self.stop_text is not None and (matched := self.stop_text.match(self.tokens, least)):
            self.matched_stop, self.finish = matched, nouns.Finish.STOP
        elif len(self.tokens) >= self.token_limit:
            self.finish = nouns.Finish.LENGTH
        return self.finish is not None

    def count(
        self, arm: str, drafted: int, taken: int, depth: int | None = None, *, trained: bool = False
    ) -> None:
        """Count an arm's round with `drafted` proposals on `depth` levels.

        depth None: a chain with one proposal per level. trained: the proposals are from a
        speculator with weights that are swapped.
        """
        counts = self.counts
        counts["target_steps"] += 1
        counts["drafted_tokens"] += drafted
        if not drafted:
            return
        counts["drafted_rounds"] += 1
        counts["drafted_round_tokens"] += taken
        counts["accepted_tokens"] += max(taken - 1, 0)  # 0 if the row ended before the round
        counts["trained_rounds"] += trained
        counts["trained_round_tokens"] += taken * trained
        self.arm_rounds[arm] += 1
        self.arm_tokens[arm] += taken
        depth = drafted if depth is None else depth
        missing = [0] * (depth - len(self.proposed_at))
        self.proposed_at += missing
        self.accepted_at += missing
        for position in range(depth):
            self.proposed_at[position] += 1
            self.accepted_at[position] += position < taken - 1

    def retract(self) -> None:
        """Forget the cache: everything is prefilled again."""
        self.cached = self.captured = self.copied = 0
        self.stale = False
        if self.prompt_scores is not None:
            self.prompt_scores.clear()

    def chunk(self) -> nouns.Chunk:
        """Results since the last chunk."""
        reported, self.reported = self.reported, len(self.tokens)
        ended, drawn = self.finish is not None, self._drawn(reported)
        scores = self._new_scores()
        return nouns.Chunk(
            request_id=self.request.request_id,
            token_ids=tuple(self.tokens[reported:]),
            behavior_logprobs=tuple(self.logprobs[reported:]),
            version_spans=merged(VersionSpan(*at, one.policy_version) for at, one in drawn),
            draw_spans=merged(
                DrawSpan(*at, one.arm, one.number_format, one.reused, one.stale)
                for at, one in drawn
            ),
            accepted_drafts=tuple(self.accepted_drafts[reported:]),
            finish=self.finish,
            error=self.error,
            speculation=self.speculation if ended else SpeculationStats(),
            cached_prompt_tokens=self.copied,
            smallest_gap=self.smallest_gap,
            top_logprobs=tuple(self.alternatives[reported:]),
            time_to_first_token_s=self.first_token_s,
            matched_stop=self.matched_stop,
            stages=self.stages.times(len(self.request.known) - self.copied) if ended else (),
            prompt_scores=scores,
        )

    def end_scored(self) -> None:
        """End a request that generates nothing; call it once the prompt is cached."""
        if self.token_limit == 0:
            self.finish = nouns.Finish.LENGTH

    @property
    def scoring(self) -> bool:
        """Whether log-probs of the prompt have yet to be computed or reported."""
        return self.request.sampling.scored and self.prompt_scores is not None

    def _new_scores(self) -> tuple[pb.PromptScore, ...]:
        """The prompt's scores, once they are complete."""
        scores = self.prompt_scores
        if scores is None or len(scores) < len(self.request.prompt) - 1:
            return ()
        self.prompt_scores = None
        return tuple(scores) if self.request.sampling.scored else ()

    def _drawn(self, reported: int) -> list[tuple[tuple[int, int], DrawnBy]]:
        """(start, end) of the tokens from this index on, and their origin."""
        bounds = [*(start for start, _ in self.origins), len(self.tokens)]
        return [
            ((max(start, reported), end), origin)
            for (start, end), (_, origin) in zip(pairwise(bounds), self.origins, strict=True)
            if end > reported
        ]

    @property
    def speculation(self) -> SpeculationStats:
        """Counters so far."""
        return SpeculationStats(
            **self.counts,
            proposed_at=tuple(self.proposed_at),
            accepted_at=tuple(self.accepted_at),
            arm_drafted_rounds=dict(self.arm_rounds),
            arm_round_tokens=dict(self.arm_tokens),
        )
