"""Drafting in the embedded engine: the choice of a round's arm, its drafts, and the updates of
bandit and budget.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.arm_names import OFF, ArmName
from paceline.errors import InvalidInput
from paceline.models import decoder, sampling
from paceline.services.rollout_gateway.bandits import build_bandit
from paceline.services.rollout_gateway.bandits.base import RoundOutcome, Situation
from paceline.services.rollout_gateway.engines.embedded import kv_cache, verify
from paceline.services.rollout_gateway.engines.embedded.budget import Budget, row_drafts
from paceline.services.rollout_gateway.engines.embedded.drafters import Drafters, DrafterVersion
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.requests import control, timing
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.speculators.base import DraftBatch, Drafts, DraftShape, Speculator
from paceline.speculators.shift import shift_over
from paceline.trajectory import Target

LOOKUP, LOOKUP_ROWS = "ngram", 20
"""Speculator that also drafts in the rounds of other arms, for rows that repeat earlier text, and
the most rows of such a round. A lookup takes 10 microseconds a row.
"""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The rows of each arm in a round."""

    arms: dict[str, list[int]]  # arm -> rows
    situation: Situation
    explored: bool = False

    @property
    def single(self) -> str:
        """The arm of all rows; empty if they differ."""
        return next(iter(self.arms)) if len(self.arms) == 1 else ""


@dataclass(frozen=True, slots=True)
class DraftPart:
    """Rows that draft with one arm, and their drafts."""

    members: list[int]
    arm: ArmName
    speculator: Speculator
    batch: DraftBatch
    forced: bool = False  # the arm is forced for at least one row
    drafts: Drafts | None = None


class Speculation:
    """Speculators, arms and the bandit of one engine.

    Every trained kind that may serve has arms; arms of a kind without a serving version are not
    chosen.
    """

    def __init__(self, spec: EmbeddedSpec, arms: dict[str, ArmName], drafters: Drafters) -> None:
        self.arms = arms
        self.drafters = drafters
        self._barred: Set[str] = frozenset()
        self._lookup = next((arm for arm in arms.values() if arm.speculator == LOOKUP), None)
        self.bandit = build_bandit(spec.bandit, tuple(arms), spec.seed)
        self.budget = Budget() if spec.verify_budget else None
        self.forced = ""

    @property
    def served(self) -> tuple[str, ...]:
        """Arms that may draft now."""
        allowed = [arm for name, arm in self.arms.items() if name not in self._barred]
        return tuple(arm.name for arm in allowed if not self.drafters.rests(arm.speculator))

    def bar(self, arms: Set[str]) -> None:
        """Disable the drafts of these arms, even if forced, from the next round on; "off" is always
        allowed.
        """
        self._barred = arms - {OFF}

    def check_arm(self, name: str) -> None:
        """Raises InvalidInput for an arm that does not exist or has no committed drafter; empty is
        valid.
        """
        control.check_arm(name, self.arms)
        if name and name not in self.served and name not in self._barred:
            message = "no drafter of this arm's kind is committed; it rests"
            raise InvalidInput(message, seen=name, allowed=", ".join(self.served))

    def choose(self, rows: Sequence[RunningSequence]) -> RoundPlan:
        """The engine's forced arm, else the request's forced arm, else one arm from the bandit for
        all remaining rows.

        A forced arm drafts nothing while its kind has no serving version or while the arm is
        disabled.
        """
        situation = control.situation_of(rows)
        if self.forced:
            arm = self.forced if self.forced in self.served else OFF
            return RoundPlan({arm: list(range(len(rows)))}, situation)
        arms: dict[str, list[int]] = {}
        for row, sequence in enumerate(rows):
            arms.setdefault(sequence.request.forced_arm, []).append(row)
        free = arms.pop("", [])
        for resting in [name for name in arms if name not in self.served]:
            arms.setdefault(OFF, []).extend(arms.pop(resting))
        if not free:
            return RoundPlan(arms, situation)
        choice = self.bandit.choose(situation, self.served)
        arms.setdefault(choice.arm, []).extend(free)
        return RoundPlan(arms, situation, choice.explored)

    def parts(
        self,
        plan: RoundPlan,
        slots: Sequence[int],
        rows: Sequence[RunningSequence],
        store: kv_cache.SlotStore,
        version: int,
    ) -> list[DraftPart]:
        """The speculator and batch of each arm's rows, under a policy version. Speculators that
        were idle have caught up on return.
        """
        parts = []
        for name, members in plan.arms.items():
            arm = self.arms[name]
            if arm.speculator:
                own, places = [rows[row] for row in members], [slots[row] for row in members]
                batch = draft_batch(places, own, store, version)
                speculator = self.drafters.live[arm.speculator]
                speculator.catch_up(batch)
                forced = self.forced or any(one.request.forced_arm for one in own)
                parts.append(DraftPart(members, arm, speculator, batch, bool(forced)))
        return parts

    def draft(
        self, parts: Sequence[DraftPart], last: Tensor, params: sampling.DrawParams
    ) -> tuple[verify.Nodes, list[DraftPart]]:
        """The nodes to verify, and the parts with their drafts.

        last int64 [B, 1]: last token of each row. params: B rows, the sampling of the requests.
        """
        divided = [one for part in parts for one in self._divide(part)]
        parts = [_with_noise(part, params, last.device) for part in divided]
        drafted = [replace(part, drafts=self._propose(part)) for part in parts]
        proposed = [(one.members, one.drafts) for one in drafted if one.drafts is not None]
        drafts = verify.merge_drafts(len(last), proposed)
        if drafts is None or not bool((drafts.tokens >= 0).any()):
            return verify.Nodes(last), []
        return verify.arrange(last, drafts), drafted

    def _divide(self, part: DraftPart) -> list[DraftPart]:
        """Splits off the rows for which n-grams promise at least as many accepted drafts as the
        arm's drafter had on average. Rows of a forced arm stay.
        """
        arm, budget, drafter = self._lookup, self.budget, part.arm.speculator
        if arm is None or budget is None or part.forced or drafter == LOOKUP:
            return [part]
        if len(part.members) > LOOKUP_ROWS or arm.name not in self.served:
            return [part]
        lookup = self.drafters.live[LOOKUP]
        found = lookup.propose(part.batch, DraftShape(part.arm.shape.steps))
        least, promised = budget.mean_accepted(drafter), budget.expected(found, LOOKUP)
        better = [place for place, count in enumerate(promised) if count >= least]
        if not better:
            return [part]
        others = [place for place, count in enumerate(promised) if count < least]
        drafts = Drafts(found.tokens[better], found.scores[better])
        looked_up = replace(_places(part, better), arm=arm, speculator=lookup, drafts=drafts)
        return [looked_up, *([_places(part, others)] if others else [])]

    def _propose(self, part: DraftPart) -> Drafts:
        arm, budget = part.arm, self.budget
        shape = DraftShape(arm.shape.steps, arm.shape.topk, arm.drafted)
        if budget is not None and part.drafts is not None:
            return budget.prune(part.drafts, arm.speculator, arm.name)
        if budget is None:
            return part.speculator.propose(part.batch, shape)
        proposed = part.speculator.propose(part.batch, replace(shape, floor=budget.floor(arm.name)))
        return budget.prune(proposed, arm.speculator, arm.name)

    def learn_drafts(self, parts: Sequence[DraftPart], verdict: verify.Verdict) -> None:
        """Record the followed drafts for the budget's calibration."""
        if self.budget is None:
            return
        reached = _followed(verdict)
        for part in parts:
            if part.drafts is not None:
                drawn = [reached[row] for row in part.members]
                became = zip(row_drafts(part.drafts), drawn, strict=True)
                self.budget.learn(part.arm.speculator, became)

    def learn_costs(
        self,
        plan: RoundPlan,
        parts: Sequence[DraftPart],
        taken: Sequence[int],
        nodes: int,
        stopwatch: timing.Stopwatch,
    ) -> None:
        """Record a round: tokens per row and total seconds for the bandit. The budget gets the
        seconds of the forward over `nodes` tokens with its draws, and, for each drafting arm, the
        seconds of all other work.

        A round with several arms teaches nothing about any arm.
        """
        laps = stopwatch.laps
        if plan.single:
            about, seconds = plan.situation, stopwatch.seconds
            self.bandit.observe(RoundOutcome(plan.single, about, taken, seconds, plan.explored))
        if self.budget is not None:
            self.budget.cost.learn(nodes, laps["forward"] + laps["sample"])
            if plan.single:
                for arm in {plan.single, *(part.arm.name for part in parts)}:
                    self.budget.spend(arm, laps["draft"] + laps["keep"])

    def serve_drafter(self, version: DrafterVersion, over: int) -> None:
        """Draft with a new version in place of `over` from the next round on. The arms of its kind
        inherit the statistics of version `over`, or are explored anew.
        """
        same_kind = version.kind == self.drafters.serving
        shift = shift_over(version.shift, over) if same_kind else None
        self.drafters.serve(version)
        if self.budget is not None and shift is None:
            self.budget.forget(version.kind)
        arms = {arm.name for arm in self.arms.values() if arm.speculator == version.kind}
        self.bandit.renew(arms, Target.DRAFTER, shift)

    def bind(self, target: decoder.DecoderWeights) -> None:
        """Draft for new target weights; the bandit measures their acceptance again."""
        self.drafters.bind(target)
        self.bandit.renew({arm.name for arm in self.arms.values() if arm.speculator}, Target.POLICY)


def draft_batch(
    slots: Sequence[int], rows: Sequence[RunningSequence], store: kv_cache.SlotStore, version: int
) -> DraftBatch:
    """Data of these rows for speculators, under a policy version."""
    return DraftBatch(
        slots,
        [sequence.length for sequence in rows],
        store.token_ids,
        store.hidden,
        prompts=[len(sequence.request.prompt) for sequence in rows],
        policy_version=version,
        kv=store.kv,
    )


def _places(part: DraftPart, places: Sequence[int]) -> DraftPart:
    """The part without other rows than those at these places among its members."""
    batch = part.batch
    batch = replace(
        batch,
        slots=[batch.slots[place] for place in places],
        lengths=[batch.lengths[place] for place in places],
        prompts=[batch.prompts[place] for place in places],
    )
    return replace(part, members=[part.members[place] for place in places], batch=batch)


def _with_noise(part: DraftPart, params: sampling.DrawParams, device: torch.device) -> DraftPart:
    if not part.speculator.uses_noise:
        return part
    own = params.rows(torch.tensor(part.members, device=device))
    return replace(part, batch=replace(part.batch, draws=own))


def _followed(verdict: verify.Verdict) -> list[Set[int]]:
    """Per row the drawn nodes, including its root."""
    accepted = verdict.accepted.tolist()
    if verdict.path is None:
        return [set(range(count + 1)) for count in accepted]
    paths = zip(verdict.path.tolist(), accepted, strict=True)
    return [set(path[: count + 1]) for path, count in paths]
