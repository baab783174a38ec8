"""Tracks the gateway's requests inside SGLang, and chooses the arm of each round.

A tracked request becomes a request of SGLang, and follows its draws and reported tokens. SGLang is
launched with the smallest shape that covers all arms, because this shape sizes its reservation of
KV slots. Every round runs one arm: one shape for the whole batch. `off` is a tree of the root
alone, and nothing is drafted. The drafter reads the verified tokens when a round drafts again, see
slot_rows.py; where no rows are kept it reads them at once. rounds.py and runtimes.py apply a shape
to SGLang's workers. Imports torch nowhere, and SGLang only where a request is made.
"""

from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.arm_names import OFF, ArmName, TreeSize, parse_arm
from paceline.errors import ConfigError, InternalError
from paceline.services.rollout_gateway.bandits import base, build_bandit
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish, Request
from paceline.services.rollout_gateway.engines.requests.control import check_arm, situation_of
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy, RunningSequence
from paceline.speculators.kinds import SGLANG, SPECULATORS
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target, VersionSet
from paceline.v1.engine_pb2 import ArmStats

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
        indices = range(len(self.sequence.tokens), position - len(self.request.prompt))
        return [self.draws[index].token for index in indices]

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
                request = f"request {self.request.request_id}"
                message = f"SGLang's token {index} of {request} is not the draw"
                raise InternalError(message, seen=token, allowed=drawn)
            assert drawn is not None
            if self.request.sampling.top_logprobs:
                sequence.alternatives.append(drawn.alternatives)
            values = ([drawn.token], [drawn.logprob], [drawn.gap])
            sequence.append_tokens(*values, drawn.origin, drawn.accepted, begins=index == first)
            if sequence.finish is not None:
                break

        taken = len(sequence.tokens)
        self.draws = {index: one for index, one in self.draws.items() if index >= taken}

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


def parse_arms(names: Sequence[str]) -> dict[str, ArmName]:
    """Arms by name. Raises ConfigError when one SGLang process cannot serve them together."""
    served = {name: support.trees for name, support in SGLANG.items()}
    arms = {name: parse_arm(name, served) for name in names}
    if not names or names[0] != OFF or len(arms) != len(names):
        message = "arms begin with off and none comes twice"
        raise ConfigError(message, seen=", ".join(names), allowed=f"{OFF}, ...")
    speculators = sorted({arm.speculator for arm in arms.values() if arm.speculator})
    if len(speculators) > 1:
        message = "one SGLang engine serves one speculator"
        raise ConfigError(message, seen=", ".join(speculators), allowed="one of them")
    return arms


@dataclass(frozen=True, slots=True)
class ChosenArm:
    """The arm of a round."""

    arm: ArmName
    explored: bool
    teaches: bool  # False: the bandit does not observe the round
    era: int  # number of new drafters before the choice
    situation: base.Situation | None = None  # set on the choosing rank only


class ArmChooser:
    """Arms and bandit of one engine."""

    def __init__(self, names: Sequence[str], bandit: base.BanditSettings, seed: int) -> None:
        self.arms = parse_arms(names)
        self.forced = ""
        self.barred: Set[str] = frozenset()  # in quarantine
        self.bandit = build_bandit(bandit, tuple(names), seed)
        self._groups = bandit.groups
        self._warm: set[tuple[str, int]] = set()
        self._era = 0  # number of new drafters so far
        self._learned_era = 0  # era of the drafter that the bandit models
        # change of acceptance from that drafter to the newest drafter
        self._shift: AcceptanceShift | None = None

    @property
    def maximum(self) -> TreeSize:
        """Shape to launch SGLang with: it covers every arm; ROOT when nothing drafts."""
        shapes = [arm.shape for arm in self.arms.values()]
        numbers = ((shape.steps, shape.topk, shape.draft_tokens) for shape in shapes)
        return TreeSize(*map(max, zip(*numbers, strict=True)))

    def force(self, name: str) -> None:
        """Force one arm for all requests; "" lets the bandit choose again. Raises InvalidInput."""
        check_arm(name, self.arms)
        self.forced = name

    def choose(self, forced: str, tracked: Sequence[Tracked | None], drafter: int = 0) -> ChosenArm:
        """The arm of the next round: `forced`, else the arm that the requests force, else the
        bandit's.

        tracked: the batch's requests, None for a request that has ended; drafter: the serving
        version. Rounds teach the bandit nothing while a request's drafter state stems from an older
        version. The bandit switches to the new version in the first round without such a request.
        """
        fresh = all(one is None or one.drafter_version == drafter for one in tracked)
        if fresh and self._learned_era < self._era:
            self.bandit.renew(self._drafting, Target.DRAFTER, self._shift)
            self._learned_era = self._era
        sequences = [one.sequence if one is not None else None for one in tracked]
        situation = situation_of(sequences)
        name = forced or asked_arm(tracked)
        if name:
            probed = any(one is not None and one.request.probe for one in tracked)
            name = OFF if name in self.barred else name
            return ChosenArm(self.arms[name], False, fresh and not probed, self._era, situation)
        served = tuple(name for name in self.arms if name not in self.barred or name == OFF)
        choice = self.bandit.choose(situation, served)
        return ChosenArm(self.arms[choice.arm], choice.explored, fresh, self._era, situation)

    def observe(self, plan: ChosenArm, taken: Sequence[int], seconds: float) -> None:
        """Report a round to the bandit.

        taken: tokens of each row, 0 for a row that had ended before; seconds: draft, verification
        and the drafter's catch-up. The first round of an arm in each batch-size group is ignored,
        because it compiles and allocates.
        """
        if not plan.teaches or plan.era < self._era or plan.situation is None:
            return
        key = (plan.arm.name, base.group_of(self._groups, len(taken)))
        if key not in self._warm:
            self._warm.add(key)
            return
        about = plan.situation, taken, seconds, plan.explored
        self.bandit.observe(base.RoundOutcome(plan.arm.name, *about))

    def renew(self, changed: Target, shift: AcceptanceShift | None = None) -> None:
        """Record that new weights serve.

        The bandit learns of a new policy at once. It learns of a new drafter later, see `choose`,
        with the shift from the drafter that it models.
        """
        if changed is Target.DRAFTER:
            self._shift = shift if self._learned_era == self._era else None
            self._era += 1
        else:
            self.bandit.renew(self._drafting, Target.POLICY)

    def learn(self, reports: Sequence[ArmStats]) -> None:
        """Give the bandit the statistics of other engines, if it models the newest drafter."""
        if self._learned_era == self._era:
            self.bandit.learn(reports)

    @property
    def _drafting(self) -> set[str]:
        return {arm.name for arm in self.arms.values() if arm.speculator}


def trained(arm: ArmName) -> bool:
    """Whether the arm's drafter has weights."""
    return bool(arm.speculator) and SPECULATORS[arm.speculator].trained


def asked_arm(tracked: Sequence[Tracked | None]) -> str:
    """The arm that requests of a batch force; empty when no request forces an arm.

    The batch has one shape, so its other requests use the same arm. When requests disagree, the
    round is off.
    """
    asked = {one.request.forced_arm for one in tracked if one is not None} - {""}
    return OFF if len(asked) > 1 else next(iter(asked), "")


def first_nodes(
    drafts: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], nodes: int, kept: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The first `kept` nodes of trees of `nodes` nodes each.

    drafts: flat [B * nodes]; mask: flat [B * nodes * nodes]. Nodes are ordered level by level. A
    row of the mask marks a node's ancestors, which have smaller indices. The first nodes of a tree
    are therefore a tree.
    """
    tokens = drafts.reshape(-1, nodes)[:, :kept]
    ancestors = mask.reshape(-1, nodes, nodes)[:, :kept, :kept]
    return np.ascontiguousarray(tokens).reshape(-1), np.ascontiguousarray(ancestors).reshape(-1)


def taken_tokens(accepted: int, output_tokens: int, finished_tokens: int | None) -> int:
    """Tokens of a row's round up to its end: accepted tokens, less tokens past the stop.

    output_tokens: response tokens, this round's included. finished_tokens: length of an ended
    response, None while it continues.
    """
    past = output_tokens - finished_tokens if finished_tokens is not None else 0
    return max(accepted - max(past, 0), 0)
