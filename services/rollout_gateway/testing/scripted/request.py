"""The state of a request in the scripted engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.arm_names import OFF
from paceline.services.rollout_gateway.engines.nouns import Finish, Request
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy, RunningSequence
from paceline.services.rollout_gateway.testing.scripted.replies import ScriptedAnswer
from paceline.services.rollout_gateway.testing.scripted.script import scripted_logprob


@dataclass(eq=False, slots=True)
class ScriptedRun:
    """A running request."""

    sequence: RunningSequence
    answer: ScriptedAnswer
    rows_written: int = 0  # positions with written rows
    credit: float = 0.0  # fraction of accepted tokens carried to the next round
    nan_token: int | None = None

    @property
    def request(self) -> Request:
        """The engine's request."""
        return self.sequence.request

    def ends_within(self, tokens: int) -> bool:
        """Whether `tokens` further tokens would end the response."""
        whole = self.sequence.token_limit
        if not self.request.sampling.ignore_eos:
            whole = min(whole, len(self.answer.token_ids))
        return whole - len(self.sequence.tokens) <= tokens

    def emit(self, wanted: int, origin: DrawnBy, *, nan: bool = False) -> int:
        """Emit at most `wanted` further tokens; returns their number. nan: all log-probs are NaN.

        A response that must continue after its end starts again.
        """
        sequence, script = self.sequence, self.answer.token_ids
        start, endless = len(sequence.tokens), self.request.sampling.ignore_eos
        count = wanted if endless else min(wanted, len(script) - start)
        tokens = [script[index % len(script)] for index in range(start, start + count)]
        logprobs = [
            math.nan if nan or one == self.nan_token else scripted_logprob(one) for one in tokens
        ]
        drafted = origin.arm != OFF
        taken = sequence.take(tokens, logprobs, [1.0] * count, origin, count - 1 if drafted else 0)
        asked = self.request.sampling.top_logprobs
        sequence.alternatives += [_alternatives(token, asked) for token in tokens[:taken]]
        if sequence.finish is None and not endless and len(sequence.tokens) == len(script):
            sequence.finish = Finish.STOP
        return taken

    def unwritten(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Tokens and positions with rows to write. The last token is missing, because the next
        round would compute its state.
        """
        sequence = np.array((*self.request.prompt, *self.sequence.tokens), dtype=np.uint32)
        start, end = self.rows_written, len(sequence) - 1
        self.rows_written = end
        return sequence[start:end], np.arange(start, end, dtype=np.uint32)


def _alternatives(token: int, count: int) -> tuple[tuple[int, float], ...]:
    return tuple((token + rank, scripted_logprob(token) - rank) for rank in range(count))
