"""Converts the gateway's requests to SGLang's, and follows their draws and reported tokens.

Holds no SGLang object.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.arm_names import OFF
from paceline.errors import InternalError
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish, Request
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy, RunningSequence
from paceline.trajectory import VersionSet

Alternatives = tuple[tuple[int, float], ...]


def rid_of(request_id: int, number: int) -> str:
    """SGLang's id of a gateway's request. All ids have one length, because SGLang aborts by prefix.

    number: counts the enqueued requests. A request that was ended and continues has another id, so
    the running round's results for the earlier id are not attributed to it.
    """
    return f"paceline-{request_id:020d}-{number:012d}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """One draw: token, behavior log-prob, perturbed top-two gap, origin."""

    token: int
    logprob: float
    gap: float
    origin: DrawnBy
    alternatives: Alternatives = ()
    accepted: bool = False  # the token was a draft


@dataclass(eq=False, slots=True)
class Tracked:
    """A gateway's request that has not ended.

    `sequence` holds the tokens that SGLang has taken, and decides when the request ends.
    """

    sequence: RunningSequence
    # serving when the request was enqueued: its drafts start from states of that drafter
    drafter_version: int
    rid: str = ""  # SGLang's request id
    # response index -> draw, until SGLang takes it
    draws: dict[int, Drawn] = field(default_factory=dict)

    @property
    def request(self) -> Request:
        """The gateway's request."""
        return self.sequence.request

    def record(self, position: int, drawn: Drawn) -> None:
        """Record a draw for an absolute position.

        Positions already taken, which a prefill may repeat, are ignored.
        """
        index = position - len(self.request.prompt)
        if index >= len(self.sequence.tokens):
            self.draws[index] = drawn

    def ahead(self, position: int) -> list[int]:
        """Tokens drawn before an absolute position and not yet taken by SGLang.

        Empty for a draw that repeats a position.
        """
        return [
            self.draws[i].token
            for i in range(len(self.sequence.tokens), position - len(self.request.prompt))
        ]

    def confirm(self, output_ids: Sequence[int], *, strict: bool) -> None:
        """Take SGLang's response tokens, up to the end of the request.

        output_ids: tokens behind the response that the request was enqueued with. strict: raise
        InternalError when a token is not the plugin's draw. Ranks that follow rank 0 are not
        strict: a near-tie may differ there, and these ranks report nothing.
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
            sequence.append_tokens(*values, drawn.origin, drawn.accepted, begins=index == first)
            if sequence.finish is not None:
                break

        self.draws = {
            index: drawn for index, drawn in self.draws.items() if index >= len(sequence.tokens)
        }

    def end(self, finish: Finish, error: str = "") -> Chunk:
        """The last chunk of a request that ends before its own end."""
        self.sequence.finish = finish
        return replace(self.sequence.chunk(), error=error)


def cache_key(versions: VersionSet) -> str:
    """Namespace of the prefix cache for a version set.

    Keys and values of another policy or drafter are therefore never reused.
    """
    return str(versions)


def as_sglang_request(tracked: Tracked, key: str) -> Any:
    """A TokenizedGenerateReqInput; `key`: its namespace of the prefix cache.

    The plugin draws tokens and applies stop conditions, so SGLang gets only the token limit. SGLang
    treats the start of a continued response as the end of the prompt. A request that generates
    nothing still draws one token, which the plugin drops. Without that token SGLang would bypass
    its drafters and CUDA graphs.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = tracked.request
    left = tracked.sequence.token_limit - len(request.response)
    params = SamplingParams(max_new_tokens=max(left, 1), ignore_eos=True)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=tracked.rid,
        input_text=None,
        input_ids=array("q", request.known),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        extra_key=key,
    )
