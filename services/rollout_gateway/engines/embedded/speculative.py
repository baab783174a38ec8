"""Drafting in the embedded engine: which arm a round uses, what is proposed, what bandit and budget
learn of it.

Owns the choice; not the speculators (drafters.py), not verification.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.arm_names import OFF, ArmName
from paceline.errors import InvalidInput
from paceline.models.decoder import DecoderWeights
from paceline.models.sampling import DrawParams
from paceline.services.rollout_gateway.bandits import build_bandit
from paceline.services.rollout_gateway.bandits.base import RoundOutcome, Situation
from paceline.services.rollout_gateway.engines.embedded.budget import Budget, row_drafts
from paceline.services.rollout_gateway.engines.embedded.drafters import Drafters, DrafterVersion
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore
from paceline.services.rollout_gateway.engines.embedded.nodes import Nodes, arrange, merge_drafts
from paceline.services.rollout_gateway.engines.embedded.sampled import ChainSampler, draft_probs
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.embedded.stopwatch import Stopwatch
from paceline.services.rollout_gateway.engines.embedded.verify import Verdict
from paceline.services.rollout_gateway.engines.requests.arms import check_arm, situation_of
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.speculators.base import DraftBatch, Drafts, DraftShape, Speculator
from paceline.speculators.shift import shift_over
from paceline.trajectory import Target


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Which rows of a round draft with which arm."""

    arms: dict[str, list[int]]  # arm -> rows
    situation: Situation
    explored: bool = False

    @property
    def single(self) -> str:
        """The arm of all rows; empty when they differ."""
        return next(iter(self.arms)) if len(self.arms) == 1 else ""


@dataclass(frozen=True, slots=True)
class DraftPart:
    """Rows that draft with one arm, and what they verify."""

    members: list[int]
    arm: ArmName
    speculator: Speculator
    batch: DraftBatch
    drafts: Drafts | None = None


class Speculation:
    """Speculators, arms and the bandit of one engine.

    There are arms of every trained kind that may serve; those of kinds that rest are not chosen.
    """

    def __init__(self, spec: EmbeddedSpec, arms: dict[str, ArmName], drafters: Drafters) -> None:
        self.arms = arms
        self.drafters = drafters
        self._barred: Set[str] = frozenset()
        self.served = self._served()
        self._build_bandit = lambda: build_bandit(spec.bandit, tuple(arms), spec.seed)
        self.bandit = self._build_bandit()
        self.rejection = spec.verification == "rejection"
        # Drafts that were drawn may not be left out afterwards: that would bias what is emitted.
        self.budget = Budget() if spec.verify_budget and not self.rejection else None
        self.measuring = False  # rounds of made-up requests: they teach costs and nothing else
        self.forced = ""

    def _served(self) -> tuple[str, ...]:
        return tuple(
            name
            for name, arm in self.arms.items()
            if not self.drafters.rests(arm.speculator) and name not in self._barred
        )

    def bar(self, arms: Set[str]) -> None:
        """These arms draft nothing from the next round on, whoever asks for them; but "off"."""
        self._barred = arms - {OFF}
        self.served = self._served()

    def check_arm(self, name: str) -> None:
        """Raises InvalidInput for an arm that is not served, now or at all; empty is fine."""
        check_arm(name, self.arms)
        if name and name not in self.served and name not in self._barred:
            message = "no drafter of this arm's kind is committed; it rests"
            raise InvalidInput(message, seen=name, allowed=", ".join(self.served))

    def choose(self, rows: Sequence[RunningSequence]) -> RoundPlan:
        """Forced arm of the engine, else of the request, else the bandit's for all others together.

        A forced arm drafts nothing while its kind rests or while the arm is barred.
        """
        situation = situation_of(rows)
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
        store: SlotStore,
        version: int,
    ) -> list[DraftPart]:
        """Who drafts for which rows, under a policy's version; drafters that were off have caught
        up when this returns.
        """
        parts = []
        for name, members in plan.arms.items():
            arm = self.arms[name]
            if arm.speculator:
                batch = draft_batch(
                    [slots[row] for row in members], [rows[row] for row in members], store, version
                )
                speculator = self.drafters.live[arm.speculator]
                speculator.catch_up(batch)
                parts.append(DraftPart(members, arm, speculator, batch))
        return parts

    def draft(
        self, parts: Sequence[DraftPart], last: Tensor, params: DrawParams
    ) -> tuple[Nodes, list[DraftPart]]:
        """What the round verifies, and the parts with their drafts; last int64 [B, 1]: last known
        tokens.

        params: B rows, how requests draw.
        """
        if self.rejection:
            parts = [_sampling(part, params, last.device) for part in parts]
        drafted = [replace(part, drafts=self._propose(part)) for part in parts]
        drafts = merge_drafts(
            len(last), [(part.members, part.drafts) for part in drafted if part.drafts is not None]
        )
        if drafts is None or not bool((drafts.tokens >= 0).any()):
            return Nodes(last), []
        return arrange(last, drafts, whole=self.rejection), drafted

    def draft_probs(self, parts: Sequence[DraftPart], nodes: Nodes, vocab: int) -> Tensor:
        """What the drafts of a round were drawn from, see sampled.draft_probs."""
        drawn = [
            (
                part.members,
                part.drafts,
                part.batch.sampler if isinstance(part.batch.sampler, ChainSampler) else None,
            )
            for part in parts
            if part.drafts is not None
        ]
        return draft_probs(nodes, drawn, vocab)

    def _propose(self, part: DraftPart) -> Drafts:
        arm, budget = part.arm, self.budget
        shape = DraftShape(arm.shape.steps, arm.shape.topk, arm.drafted)
        if budget is None or self.measuring:
            return part.speculator.propose(part.batch, shape)
        proposed = part.speculator.propose(part.batch, replace(shape, floor=budget.floor(arm.name)))
        return budget.prune(proposed, arm.speculator, arm.name)

    def learn_drafts(self, parts: Sequence[DraftPart], verdict: Verdict) -> None:
        """Which drafts were followed, for the budget's calibration."""
        if self.budget is None or self.measuring or not parts:
            return
        reached = _followed(verdict)
        for part in parts:
            if part.drafts is not None:
                drawn = [reached[row] for row in part.members]
                self.budget.learn(
                    part.arm.speculator, zip(row_drafts(part.drafts), drawn, strict=True)
                )

    def learn_costs(
        self, plan: RoundPlan, taken: Sequence[int], nodes: int, stopwatch: Stopwatch
    ) -> None:
        """Tokens of each row of a round and its seconds, for the bandit; those of the forward over
        `nodes` tokens and its draws, and of all else, for the budget.

        A round with several arms teaches nothing about any.
        """
        laps = stopwatch.laps
        if plan.single:
            self.bandit.observe(
                RoundOutcome(plan.single, plan.situation, taken, stopwatch.seconds, plan.explored)
            )
        if self.budget is not None:
            self.budget.cost.learn(nodes, laps["forward"] + laps["sample"])
            if plan.single:
                self.budget.spend(plan.single, laps["draft"] + laps["keep"])

    def serve_drafter(self, version: DrafterVersion, over: int) -> None:
        """Draft with a new version in place of `over` from the next round on; the arms of its kind
        inherit what is known of that one's, or are tried anew.
        """
        same_kind = version.kind == self.drafters.serving
        shift = shift_over(version.shift, over) if same_kind else None
        self.drafters.serve(version)
        self.served = self._served()
        if self.budget is not None and shift is None:
            self.budget.forget(version.kind)
        self.bandit.renew(
            {arm.name for arm in self.arms.values() if arm.speculator == version.kind},
            Target.DRAFTER,
            shift,
        )

    def forget_rounds(self) -> None:
        """Reset bandit, budget and drafters after rounds that only measured thread counts."""
        if self.budget is not None:
            self.budget = Budget()
        self.bandit = self._build_bandit()
        self.drafters.flush()
        self.measuring = False

    def ended(
        self, slots: Sequence[int], rows: Sequence[RunningSequence], store: SlotStore, version: int
    ) -> None:
        """These sequences are complete under a policy's version; speculators that learn from text
        read them.
        """
        self.drafters.ended(draft_batch(slots, rows, store, version))

    def bind(self, target: DecoderWeights) -> None:
        """Draft for new target weights; the bandit looks again how much they accept."""
        self.drafters.bind(target)
        self.policy_changed()

    def policy_changed(self) -> None:
        """The bandit looks again how much is accepted."""
        self.bandit.renew({arm.name for arm in self.arms.values() if arm.speculator}, Target.POLICY)


def draft_batch(
    slots: Sequence[int], rows: Sequence[RunningSequence], store: SlotStore, version: int
) -> DraftBatch:
    """What speculators are told of these rows, under a policy's version."""
    return DraftBatch(
        slots,
        [sequence.length for sequence in rows],
        store.token_ids,
        store.hidden,
        prompts=[len(sequence.request.prompt) for sequence in rows],
        policy_version=version,
    )


def _sampling(part: DraftPart, params: DrawParams, device: torch.device) -> DraftPart:
    """The part, its drafts to be drawn as its requests draw."""
    members = torch.tensor(part.members, device=device)
    sampler = ChainSampler(params.rows(members), torch.tensor(part.batch.lengths, device=device))
    return replace(part, batch=replace(part.batch, sampler=sampler))


def _followed(verdict: Verdict) -> list[Set[int]]:
    """Of each row the nodes that were drawn, its root included."""
    accepted = verdict.accepted.tolist()
    if verdict.path is None:
        return [set(range(count + 1)) for count in accepted]
    return [
        set(path[: count + 1]) for path, count in zip(verdict.path.tolist(), accepted, strict=True)
    ]
