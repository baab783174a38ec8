"""Arms of an SGLang engine: their names, their shapes, which one a round uses, what the bandit
learns of it.

Owns the choice and its arithmetic; what a shape means to SGLang's workers is in rounds.py and
runtimes.py. Imports neither torch nor SGLang.

SGLang is launched with the smallest shape that covers all arms, because KV slots are reserved by
it, and every round runs one of them: one shape for the whole batch. `off` is a tree of the root
alone: nothing is drafted, the drafter's state keeps in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.arm_names import OFF, read_arm
from paceline.errors import ConfigError, InvalidInput
from paceline.speculators.kinds import SGLANG, SPECULATORS
from paceline.trajectory import Target
from rollout_gateway.bandits import BanditSettings, RoundOutcome, RowFacts, Situation, build_bandit
from rollout_gateway.bandits.base import group_of
from rollout_gateway.bandits.evidence import ArmReport, Evidence
from rollout_gateway.engines.sglang.plugin.tracked import Tracked


@dataclass(frozen=True, slots=True)
class TreeSize:
    """A draft tree as SGLang counts it."""

    steps: int  # levels below the root
    topk: int  # children per node that drafting keeps
    draft_tokens: int  # nodes verified, the root included

    @property
    def capacity(self) -> int:
        """Most nodes a tree of these steps and topk can have, the root included."""
        return 1 + self.topk + max(self.steps - 1, 0) * self.topk**2


ROOT = TreeSize(steps=0, topk=1, draft_tokens=1)
"""The shape of `off`."""


@dataclass(frozen=True, slots=True)
class SGLangArm:
    """One way to draft."""

    name: str
    speculator: str  # empty: off
    shape: TreeSize

    @property
    def trained(self) -> bool:
        """Whether its drafter has weights."""
        return bool(self.speculator) and SPECULATORS[self.speculator].trained

    @property
    def drafted(self) -> int:
        """Tokens proposed to each row of a round."""
        return self.shape.draft_tokens - 1


def parse_arm(name: str) -> SGLangArm:
    """An arm from its name. Raises ConfigError for what SGLang cannot run."""
    if name == OFF:
        return SGLangArm(OFF, "", ROOT)
    found = read_arm(name)
    if found is None or found.speculator not in SGLANG:
        allowed = f"{OFF} or <{' | '.join(SGLANG)}>:<steps>_<topk>_<draft tokens>"
        raise ConfigError("not an arm of SGLang", seen=name, allowed=allowed)
    shape = TreeSize(found.steps, found.topk, found.draft_tokens)
    if shape.steps < 1 or shape.topk < 1:
        raise ConfigError(
            "an arm that drafts needs a step and a child",
            seen=name,
            allowed="steps and topk from 1 on",
        )
    if shape.topk == 1 and shape.draft_tokens != shape.steps + 1:
        raise ConfigError(
            "a chain has as many nodes as steps and root",
            seen=name,
            allowed=f"{shape.steps + 1} tokens",
        )
    if shape.topk != 1 and not SGLANG[found.speculator].trees:
        # SGLang's n-gram tree has no width: nodes alone bound it, so its depth is at most draft
        # tokens - 1.
        raise ConfigError(
            f"an {found.speculator} arm is a number of tokens",
            seen=name,
            allowed="topk 1, steps + 1 draft tokens",
        )
    if not 2 <= shape.draft_tokens <= shape.capacity:
        raise ConfigError(
            "no tree has so many nodes", seen=name, allowed=f"2 to {shape.capacity} draft tokens"
        )
    return SGLangArm(name, found.speculator, shape)


def parse_arms(names: Sequence[str]) -> dict[str, SGLangArm]:
    """Arms by name. Raises ConfigError when one SGLang process cannot serve them together."""
    arms = {name: parse_arm(name) for name in names}
    if not names or names[0] != OFF or len(arms) != len(names):
        raise ConfigError(
            "arms begin with off and none comes twice", seen=", ".join(names), allowed=f"{OFF}, ..."
        )
    speculators = sorted({arm.speculator for arm in arms.values() if arm.speculator})
    if len(speculators) > 1:
        raise ConfigError(
            "one SGLang engine serves one speculator",
            seen=", ".join(speculators),
            allowed="one of them",
        )
    return arms


@dataclass(frozen=True, slots=True)
class ChosenArm:
    """The arm of a round."""

    arm: SGLangArm
    explored: bool
    teaches: bool  # false: the bandit is not told how the round went
    era: int  # drafters that had served when it was chosen
    situation: Situation | None = None  # known to the rank that chose


class ArmChooser:
    """Arms and bandit of one engine."""

    def __init__(self, names: Sequence[str], bandit: BanditSettings, seed: int) -> None:
        self.arms = parse_arms(names)
        self.forced = ""
        self._bandit = build_bandit(bandit, tuple(names), seed)
        self._groups = bandit.groups
        self._warm: set[tuple[str, int]] = set()
        self._era = 0  # drafters that have served
        self._learned_era = 0  # the one the bandit knows of

    @property
    def maximum(self) -> TreeSize:
        """Shape to launch SGLang with: it covers every arm; ROOT when nothing drafts."""
        shapes = [arm.shape for arm in self.arms.values()]
        return TreeSize(
            max(shape.steps for shape in shapes),
            max(shape.topk for shape in shapes),
            max(shape.draft_tokens for shape in shapes),
        )

    def check(self, name: str) -> None:
        """Raises InvalidInput for an arm that is not served; empty is fine."""
        if name and name not in self.arms:
            raise InvalidInput("unknown arm", seen=name, allowed=", ".join(self.arms))

    def force(self, name: str) -> None:
        """One arm for all requests; "" gives the choice back to the bandit. Raises InvalidInput."""
        self.check(name)
        self.forced = name

    def choose(
        self,
        forced: str,
        tracked: Sequence[Tracked | None],
        drafter: int = 0,
        *,
        draining: bool = False,
    ) -> ChosenArm:
        """The arm of the next round: `forced`, else what the requests ask for, else the bandit's.

        tracked: the batch's requests, None for one that is not ours; drafter: the version that
        drafts; draining: no request waits. While a request is in the batch whose drafter state
        stems from an older drafter, rounds teach nothing and the bandit still chooses by what it
        knew of that drafter: it forgets with the first round that is all new.
        """
        fresh = all(one is None or one.drafter_version == drafter for one in tracked)
        if fresh and self._learned_era < self._era:
            self._bandit.forget(self._drafting, Target.DRAFTER)
            self._learned_era = self._era
        situation = situation_of(tracked, draining=draining)
        name = forced or asked_arm(tracked)
        if name:
            return ChosenArm(self.arms[name], False, fresh, self._era, situation)
        choice = self._bandit.choose(situation)
        return ChosenArm(self.arms[choice.arm], choice.explored, fresh, self._era, situation)

    def observe(self, plan: ChosenArm, taken: Sequence[int], seconds: float) -> None:
        """Tell the bandit of a round: tokens of each row (0 for one that had ended before), seconds
        of draft, verification and the drafter's catching up.

        The first round of an arm in each batch-size group compiles and allocates; it says nothing
        of the next ones.
        """
        if not plan.teaches or plan.era < self._era or plan.situation is None:
            return
        key = (plan.arm.name, group_of(self._groups, len(taken)))
        if key not in self._warm:
            self._warm.add(key)
            return
        self._bandit.observe(
            RoundOutcome(plan.arm.name, plan.situation, taken, seconds, plan.explored)
        )

    def forget(self, changed: Target) -> None:
        """New weights serve.

        A new drafter is forgotten about later, see `choose`; a new policy at once.
        """
        if changed is Target.DRAFTER:
            self._era += 1
        else:
            self._bandit.forget(self._drafting, Target.POLICY)

    @property
    def _drafting(self) -> set[str]:
        return {arm.name for arm in self.arms.values() if arm.speculator}

    def evidence(self) -> Evidence:
        """What the bandit has learned, for other engines."""
        return self._bandit.snapshot()

    def merge(self, evidence: Evidence) -> None:
        """What other engines have learned."""
        self._bandit.merge(evidence)

    def reports(self) -> tuple[ArmReport, ...]:
        """Statistics of the arms."""
        return tuple(self._bandit.reports())


def situation_of(tracked: Sequence[Tracked | None], *, draining: bool) -> Situation:
    """What the bandit is told of a batch.

    A request that is not ours (SGLang's own warm-up) has no facts: id -1.
    """
    rows = [
        RowFacts(one.request.request_id, len(one.sequence.tokens), one.sequence.token_limit)
        if one is not None
        else RowFacts(-1, 0, 1)
        for one in tracked
    ]
    context = max((one.sequence.length for one in tracked if one is not None), default=1)
    return Situation(rows, context, draining)


def asked_arm(tracked: Sequence[Tracked | None]) -> str:
    """The arm that requests of a batch are forced to; empty when none is.

    The batch has one shape, so the others go along; of requests that disagree none gets its arm and
    the round is off.
    """
    asked = {
        one.request.forced_arm for one in tracked if one is not None and one.request.forced_arm
    }
    return OFF if len(asked) > 1 else next(iter(asked), "")


def first_nodes(
    drafts: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], nodes: int, kept: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The first `kept` nodes of trees of `nodes` each: drafts [B * nodes], mask [B * nodes *
    nodes], both flat.

    Nodes come level by level and a row of the mask marks a node's ancestors, which have smaller
    indices, so that the first nodes of a tree are a tree.
    """
    tokens = drafts.reshape(-1, nodes)[:, :kept]
    ancestors = mask.reshape(-1, nodes, nodes)[:, :kept, :kept]
    return np.ascontiguousarray(tokens).reshape(-1), np.ascontiguousarray(ancestors).reshape(-1)


def taken_tokens(accepted: int, output_tokens: int, finished_tokens: int | None) -> int:
    """Tokens of a row's round up to its end: accepted, less those that lie past the stop.

    output_tokens: response tokens with this round's; finished_tokens: where the response ends, None
    while it goes on.
    """
    past = output_tokens - finished_tokens if finished_tokens is not None else 0
    return max(accepted - max(past, 0), 0)
