"""Follows a request that the scripted engine answers: its tokens so far, its end, its news."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from paceline.trajectory import SpeculationStats, VersionSpan
from rollout_gateway.engines.nouns import Chunk, Finish, Request
from rollout_gateway.testing.scripted.replies import TOKENS_PER_CHARACTER, ScriptedAnswer
from rollout_gateway.testing.scripted.script import scripted_logprob


@dataclass(eq=False)
class ScriptedRun:
    """A request being answered."""

    request: Request
    answer: ScriptedAnswer
    limit: int  # response tokens at most
    end_tokens: frozenset[int]
    enqueued_s: float
    versions: list[int] = field(default_factory=list)  # policy version of each token emitted
    told: int = 0  # tokens already reported
    rows_written: int = 0  # positions whose rows are out
    credit: float = 0.0  # fraction of accepted tokens carried to the next round
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    first_token_s: float = 0.0
    matched_stop: str = ""

    @property
    def emitted(self) -> int:
        """Response tokens so far."""
        return len(self.versions)

    def emit(self, wanted: int, version: int, tokenizer: Tokenizer | None) -> Finish | None:
        """At most so many further tokens under a policy version; the finish if they end the
        request.
        """
        finish = None
        for _ in range(wanted):
            self.versions.append(version)
            finish = self._finish(tokenizer)
            if finish is not None:
                break
        return finish

    def tokens(self, start: int = 0) -> tuple[int, ...]:
        """What was emitted from `start` on; a response that must go on after its end starts
        again.
        """
        script = self.answer.token_ids
        if self.emitted <= len(script):
            return script[start : self.emitted]
        return tuple(script[index % len(script)] for index in range(start, self.emitted))

    def unwritten(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Tokens and positions whose rows are due: all but the last token, whose state the next
        round would compute.
        """
        sequence = np.array((*self.request.prompt, *self.tokens()), dtype=np.uint32)
        start, end = self.rows_written, len(sequence) - 1
        self.rows_written = end
        return sequence[start:end], np.arange(start, end, dtype=np.uint32)

    def news(self, finish: Finish | None) -> Chunk:
        """The tokens not reported yet, and with a finish what is said once."""
        tokens = self.tokens(self.told)
        count = self.request.sampling.top_logprobs
        chunk = Chunk(
            self.request.request_id,
            tokens,
            tuple(scripted_logprob(token) for token in tokens),
            _spans(self.versions, self.told),
            top_logprobs=tuple(_alternatives(token, count) for token in tokens),
        )
        self.told = self.emitted
        if finish is None:
            return chunk
        return replace(
            chunk,
            finish=finish,
            speculation=self.stats,
            smallest_gap=1.0,
            time_to_first_token_s=self.first_token_s,
            matched_stop=self.matched_stop,
        )

    def _finish(self, tokenizer: Tokenizer | None) -> Finish | None:
        script = self.answer.token_ids
        if script[(self.emitted - 1) % len(script)] in self.end_tokens or self._stopped_by_text(
            tokenizer
        ):
            return Finish.STOP
        if self.emitted >= self.limit:
            return Finish.LENGTH
        if self.emitted >= len(script) and not self.request.sampling.ignore_eos:
            return Finish.STOP
        return None

    def _stopped_by_text(self, tokenizer: Tokenizer | None) -> bool:
        """Whether the newest token completes a stop string; it was looked for after every token
        before.
        """
        stops = self.request.sampling.stop
        if tokenizer is None or not stops:
            return False
        window = TOKENS_PER_CHARACTER * (max(map(len, stops)) + 1)
        text = tokenizer.decode(list(self.tokens(max(self.emitted - window, 0))))
        self.matched_stop = next((stop for stop in stops if stop in text), "")
        return bool(self.matched_stop)


def _alternatives(token: int, count: int) -> tuple[tuple[int, float], ...]:
    return tuple((token + rank, scripted_logprob(token) - rank) for rank in range(count))


def _spans(versions: list[int], start: int) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    for index in range(start, len(versions)):
        if spans and spans[-1].policy_version == versions[index]:
            spans[-1] = VersionSpan(spans[-1].start, index + 1, versions[index])
        else:
            spans.append(VersionSpan(index, index + 1, versions[index]))
    return tuple(spans)
