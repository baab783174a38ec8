"""One request inside SGLang as we see it: what was drawn for it and what was told.

Owns no SGLang object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.arm_names import OFF
from paceline.errors import InternalError
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish, Request
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy, RunningSequence

RID_PREFIX = "paceline-"
Alternatives = tuple[tuple[int, float], ...]


def rid_of(request_id: int, number: int) -> str:
    """SGLang's id of our request. Of one length, because SGLang aborts by prefix.

    number: of the enqueued one: a request that was ended and goes on must not be taken for what the
    running round still holds of it.
    """
    return f"{RID_PREFIX}{request_id:020d}-{number:012d}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """One draw: token, behavior log-prob, perturbed top-two gap, what drew it."""

    token: int
    logprob: float
    gap: float
    origin: DrawnBy
    alternatives: Alternatives = ()
    accepted: bool = False  # it was a draft


@dataclass(eq=False, slots=True)
class Tracked:
    """A request of ours that has not ended.

    `sequence` holds what SGLang has taken, and decides when it ends.
    """

    sequence: RunningSequence
    # serving when it was enqueued: drafts for it come from states of that drafter
    drafter_version: int
    rid: str = ""  # SGLang's name of it
    # response index -> draw, until SGLang takes it
    draws: dict[int, Drawn] = field(default_factory=dict)

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.sequence.request

    def record(self, position: int, drawn: Drawn) -> None:
        """A draw for an absolute position.

        Positions already taken (a prefill that repeats them) are left out.
        """
        index = position - len(self.request.prompt)
        if index >= len(self.sequence.tokens):
            self.draws[index] = drawn

    def ahead(self, position: int) -> list[int]:
        """Tokens drawn before an absolute position and not taken by SGLang yet; none for a draw
        that repeats one.
        """
        return [
            self.draws[i].token
            for i in range(len(self.sequence.tokens), position - len(self.request.prompt))
        ]

    def confirm(self, output_ids: Sequence[int], *, strict: bool) -> None:
        """SGLang's response tokens from the first on, which are those behind what the request went
        on from; those after the end of the request are not taken.

        strict: raises InternalError when they are not our draws. Ranks that follow rank 0's choice
        are not strict: a near-tie may have fallen otherwise there, and they tell nobody.
        """
        sequence, before = self.sequence, len(self.request.response)
        first = len(sequence.tokens)
        for index in range(first, before + len(output_ids)):
            drawn, token = self.draws.pop(index, None), output_ids[index - before]
            if not strict:
                drawn = Drawn(token, 0.0, 0.0, DrawnBy(0, OFF, ""))
            elif drawn is None or drawn.token != token:
                raise InternalError(
                    f"SGLang's token {index} of request {self.request.request_id} is not the draw",
                    seen=token,
                    allowed=drawn,
                )
            assert drawn is not None
            if self.request.sampling.top_logprobs:
                sequence.alternatives.append(drawn.alternatives)
            values = ([drawn.token], [drawn.logprob], [drawn.gap])
            sequence.take(*values, drawn.origin, drawn.accepted, begins=index == first)
            if sequence.finish is not None:
                break

        self.draws = {
            index: drawn for index, drawn in self.draws.items() if index >= len(sequence.tokens)
        }

    def end(self, finish: Finish, error: str = "") -> Chunk:
        """The last chunk of a request that ends before its own end."""
        self.sequence.finish = finish
        return replace(self.sequence.chunk(), error=error)
