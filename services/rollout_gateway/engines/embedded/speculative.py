"""Arms and drafters of the embedded engine: which arm a round uses, what it proposes, what the bandit learns.

Owns the speculators and the choice; not verification. Arm syntax `<speculator>:<steps>_<topk>_<draft tokens>`; this
engine drafts chains, so topk is 1 and draft tokens = steps + 1 (the root counts).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ConfigError, InvalidInput
from paceline.models.decoder import DecoderWeights
from paceline.speculators import SPECULATORS, DraftBatch, Speculator, SpeculatorSetup
from rollout_gateway.bandits import CostSample, Outcome, RowFacts, Situation, build_bandit
from rollout_gateway.engines.base import ArmReport, Capability, Target, missing
from rollout_gateway.engines.embedded.kv_cache import SlotStore
from rollout_gateway.engines.embedded.spec import EmbeddedSpec
from rollout_gateway.engines.evidence import Evidence
from rollout_gateway.engines.sequence import RunningSequence

OFF = "off"
MAX_STEPS = 15
_ARM = re.compile(r"(?P<speculator>[a-z]+):(?P<steps>\d+)_(?P<topk>\d+)_(?P<tokens>\d+)")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to draft."""

    name: str
    speculator: str  # empty: off
    steps: int  # drafts per round


def parse_arm(name: str, speculators: Sequence[str]) -> Arm:
    """An arm from its name. Raises ConfigError naming what this engine can do."""
    if name == OFF:
        return Arm(OFF, "", 0)
    found = _ARM.fullmatch(name)
    if found is None:
        raise ConfigError("not an arm", seen=name, allowed="off or <speculator>:<steps>_1_<steps + 1>")
    steps = int(found["steps"])
    if found["speculator"] not in speculators:
        raise ConfigError(f"arm {name} needs a speculator that is not loaded", seen=name, allowed=list(speculators))
    if not 1 <= steps <= MAX_STEPS or int(found["topk"]) != 1 or int(found["tokens"]) != steps + 1:
        raise ConfigError("this engine drafts chains", seen=name, allowed=f"steps 1-{MAX_STEPS}, topk 1, steps + 1")
    return Arm(name, found["speculator"], steps)


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
    """Rows that draft with one arm."""

    members: list[int]
    arm: Arm
    speculator: Speculator
    batch: DraftBatch


class Speculation:
    """Speculators, arms and the bandit of one engine."""

    def __init__(self, spec: EmbeddedSpec, target: DecoderWeights, slots: int, capacity: int) -> None:
        names = {"off": (), "ngram": ("ngram",)}.get(spec.drafter, ("eagle", "ngram"))
        self.arms = {name: parse_arm(name, names) for name in spec.arm_names}
        used = {arm.speculator for arm in self.arms.values() if arm.speculator}
        directory = Path(spec.drafter_dir) if spec.drafter_dir else None
        setup = SpeculatorSetup(target, slots, capacity, target.head.dtype, spec.seed, directory)
        self.speculators: dict[str, Speculator] = {name: SPECULATORS[name](setup) for name in names if name in used}
        if spec.drafter_path:
            trained = self.trained
            trained.commit_state(trained.load_state(Path(spec.drafter_path)))
        self._build_bandit = lambda: build_bandit(spec.bandit, tuple(self.arms), spec.seed)
        self._bandit = self._build_bandit()
        self.forced = ""

    @property
    def needs_hidden(self) -> bool:
        """True when a speculator reads the target's hidden states."""
        return any(speculator.capture.layers for speculator in self.speculators.values())

    @property
    def trainable(self) -> bool:
        """True when drafter weights can be swapped."""
        return any(speculator.trainable for speculator in self.speculators.values())

    @property
    def trained(self) -> Speculator:
        """The speculator whose weights are swapped. Raises MissingCapability."""
        for speculator in self.speculators.values():
            if speculator.trainable:
                return speculator
        raise missing("embedded", Capability.DRAFTER_UPDATE)

    def check_arm(self, name: str) -> None:
        """Raises InvalidInput for an arm that is not served; empty is fine."""
        if name and name not in self.arms:
            raise InvalidInput("unknown arm", seen=name, allowed=", ".join(self.arms))

    def choose(self, rows: Sequence[RunningSequence], *, draining: bool) -> RoundPlan:
        """Forced arm of the engine, else of the request, else the bandit's for all others together.

        draining: no request waits for a slot or for its prefill.
        """
        facts = [RowFacts(one.request.request_id, len(one.tokens), one.token_limit) for one in rows]
        situation = Situation(facts, max(one.length for one in rows), draining)
        if self.forced:
            return RoundPlan({self.forced: list(range(len(rows)))}, situation)
        arms: dict[str, list[int]] = {}
        for row, sequence in enumerate(rows):
            arms.setdefault(sequence.request.forced_arm, []).append(row)
        free = arms.pop("", [])
        if not free:
            return RoundPlan(arms, situation)
        choice = self._bandit.choose(situation)
        arms.setdefault(choice.arm, []).extend(free)
        return RoundPlan(arms, situation, choice.explored)

    def parts(
        self, plan: RoundPlan, slots: Sequence[int], rows: Sequence[RunningSequence], store: SlotStore
    ) -> list[DraftPart]:
        """Who drafts for which rows; drafters that were off have caught up when this returns."""
        parts = []
        for name, members in plan.arms.items():
            arm = self.arms[name]
            if arm.steps:
                lengths = [rows[row].length for row in members]
                batch = DraftBatch([slots[row] for row in members], lengths, store.token_ids, store.hidden)
                speculator = self.speculators[arm.speculator]
                speculator.catch_up(batch)
                parts.append(DraftPart(members, arm, speculator, batch))
        return parts

    def draft(self, parts: Sequence[DraftPart], rows: int) -> Tensor:
        """Drafts int64 [B, K] for B = rows, -1 where a row has fewer; K = 0 when nobody proposes anything."""
        proposals = [part.speculator.propose(part.batch, part.arm.steps) for part in parts]
        if not proposals:
            return torch.empty(rows, 0, dtype=torch.int64)
        if len(parts) == 1 and len(parts[0].members) == rows:
            drafts = proposals[0]
        else:
            steps = max(proposal.shape[1] for proposal in proposals)
            drafts = torch.full((rows, steps), -1, dtype=torch.int64, device=proposals[0].device)
            for part, proposal in zip(parts, proposals, strict=True):
                drafts[part.members, : proposal.shape[1]] = proposal
        return drafts if bool((drafts[:, 0] >= 0).any()) else drafts[:, :0]

    def observe(self, plan: RoundPlan, taken: Sequence[int], seconds: float) -> None:
        """Tell the bandit of a round: tokens of each row. One with several arms teaches nothing about any."""
        if plan.single:
            self._bandit.observe(Outcome(plan.single, plan.situation, taken, seconds, plan.explored))

    def serve_drafter(self, state: object) -> None:
        """Draft with new weights from the next round on; the bandit tries their arms anew."""
        self.trained.commit_state(state)
        trained = {arm.name for arm in self.arms.values() if arm.speculator == self.trained.name}
        self._bandit.forget(trained, Target.DRAFTER)

    def prime(self, costs: Sequence[CostSample]) -> None:
        """Begin with a bandit that knows these costs and nothing of the rounds that gave them."""
        self._bandit = self._build_bandit()
        self._bandit.prime(costs)

    def reports(self) -> tuple[ArmReport, ...]:
        """Statistics of the arms."""
        return tuple(self._bandit.reports())

    def evidence(self) -> Evidence:
        """What the bandit has learned, for other engines."""
        return self._bandit.snapshot()

    def merge(self, evidence: Evidence) -> None:
        """What other engines have learned."""
        self._bandit.merge(evidence)

    def free(self, slot: int) -> None:
        """Nobody sits in the slot any more, or its states are to be rebuilt."""
        for speculator in self.speculators.values():
            speculator.free(slot)

    def move(self, source: int, destination: int, length: int) -> None:
        """A sequence changes its slot."""
        for speculator in self.speculators.values():
            speculator.move(source, destination, length)

    def bind(self, target: DecoderWeights) -> None:
        """Draft for new target weights; the bandit looks again how much they accept."""
        for speculator in self.speculators.values():
            speculator.bind(target)
        self._bandit.forget({arm.name for arm in self.arms.values() if arm.speculator}, Target.POLICY)
