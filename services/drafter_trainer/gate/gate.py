"""Judges candidates on fresh rows, promotes a candidate that is faster and does not slow the
engine, and freezes training that gains nothing.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.gate import comparison, evaluate, freeze, round
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.learn.membership import announce
from paceline.services.drafter_trainer.rows.sample import FeatureSample, PolicyHead
from paceline.services.drafter_trainer.rows.store import RowStore
from paceline.telemetry import get_logger

log = get_logger("drafter_trainer")


class PublishGate:
    """Judges candidates against the serving drafter, on fresh rows of the newest policy version."""

    def __init__(
        self,
        config: DrafterTrainerConfig,
        learner: DrafterLearner,
        rows: RowStore,
        candidates: round.Candidates,
    ) -> None:
        self._config, self._settings = config, config.gate
        self._learner = learner
        self._rows = rows
        self._candidates = candidates
        self._warm_start = Path(config.drafter).is_dir()
        self._round: round.GateRound | None = None
        self._freeze = freeze.Freeze(config.gate.freeze_after, config.gate.freeze_gain)
        self._handed_over = False  # whether this activation has promoted a candidate
        self._last_judged_step = learner.total_steps
        # newest policy version with rows that measured the serving drafter while frozen
        self._checked_policy = 0
        self._promoted: m.Judged | None = None  # the newest promotion
        self._untold: list[m.Judged] = []  # decisions between activations
        self._taken_back: round.DrafterState | None = None
        self._on_its_way: round.DrafterState | None = None
        self.costs = comparison.MeasuredCosts(config.gate)
        self.serving = round.DrafterState(0, learner.snapshot())
        self._first = self.serving.net if self._warm_start else None
        self._served = (math.nan, 0.0)  # length and noise at the serving drafter's last judgement
        self._hurry = freeze.Hurry()
        self.next_version = max([0, *candidates.versions]) + 1

    @property
    def frozen(self) -> bool:
        """Whether training does not pay now."""
        return self._freeze.frozen

    @property
    def judging(self) -> bool:
        """Whether a round is in progress."""
        return self._round is not None

    def begin(self, command: m.Activate) -> list[m.Judged]:
        """Starts an activation; returns the decisions since the last one."""
        self.on_serving(command.drafter_version)
        self.costs.update(command.round_costs)
        self._hurry.rolled_out(command.accept_lengths)
        self._handed_over = False
        untold, self._untold = self._untold, []
        return untold

    def due(self) -> bool:
        """Whether a round should start: of candidates, or of the serving drafter alone while
        frozen.
        """
        if self.frozen:
            samples = self._fresh()
            return self._enough(samples) and samples[-1].policy_version > self._checked_policy
        if self._handed_over:
            return False
        fresh = self._fresh() if self._hurry.lasts else []
        if self._enough(fresh) and self._hurry.due(fresh[-1].policy_version):
            return True
        return self._learner.total_steps - self._last_judged_step >= self._settings.interval_steps

    def start(self) -> None:
        """Starts a round, unless there are too few fresh rows; snapshots are collectives of all
        ranks.
        """
        self._last_judged_step = self._learner.total_steps
        samples = self._fresh()
        if not self._enough(samples):
            return
        self._hurry.begun(samples[-1].policy_version)
        heads = dict(self._rows.heads)
        candidates = list[round.DrafterState]()
        if not self.frozen and self._learner.total_steps:
            announce("snapshot", self._learner.members)
            candidates = [
                round.DrafterState(self.next_version, self._learner.snapshot(self._rows.counts))
            ]
        self._round = self._round_of(samples, heads, candidates)

    def _round_of(
        self,
        samples: Sequence[FeatureSample],
        heads: Mapping[str, PolicyHead],
        candidates: Sequence[round.DrafterState],
    ) -> round.GateRound:
        """Candidates are compared with the serving drafter, the last one rolled back, and one that
        was promoted by rows of the same policy version and will serve next.
        """
        if self._promoted and samples[-1].policy_version > self._promoted.policy_version:
            self._on_its_way = None  # a set has been committed since, with or without it
        others = (self._taken_back, self._on_its_way) if candidates else ()
        rivals = [self.serving, *(one for one in others if one is not None)]
        window, generator = self._config.buffer.window, np.random.default_rng
        # The judged part of each sample is a stretch, the same for a session each time.
        parts = [one.window(window, generator(zlib.crc32(one.session.encode()))) for one in samples]
        job = evaluate.GateJob(
            [one.net for one in (*rivals, *candidates)],
            parts,
            heads,
            self._settings,
            window,
            evaluate.Pace(),
        )
        steps = self._learner.total_steps
        return round.GateRound(job, tuple(samples), tuple(candidates), tuple(rivals), steps)

    def advance(self) -> list[m.Judged]:
        """Measures a piece of the round; returns the decisions after the last piece."""
        now = self._round
        assert now is not None
        now.job.advance()
        if not now.job.done and not self._decided(now):
            return []
        decisions = [] if now.candidates else self._check_drift(now)
        self._round = None if self.frozen else self._looked_back(now)
        if self._round is None:
            with self._rows.locked() as buffer:
                buffer.release(now.samples)
            decisions = self._decide(now) if now.candidates else decisions
        for decision in decisions:
            round.log_decision(decision)
        return decisions

    def on_serving(self, version: int) -> None:
        """Records the drafter that now serves: a committed promotion, or an older one after a
        rollback.
        """
        self._candidates.serves(version)
        if version == self.serving.version:
            return
        net = self._candidates.load(version)
        if net is None:
            log.warning(
                "the serving drafter is not kept here", seen=version, kept=self._candidates.versions
            )
            return

        before, self.serving = self.serving, round.DrafterState(version, net)
        self.next_version = max(self.next_version, version + 1)
        self._round = None  # the round compared with another drafter
        self._taken_back = self._on_its_way = None
        if version < before.version:
            self._rolled_back(before)

    def state(self) -> dict[str, Any]:
        """The state for a later process; the drafters themselves are among the candidates
        on disk.
        """
        taken_back = self._taken_back.version if self._taken_back else 0
        return {
            "serving_version": self.serving.version,
            "taken_back_version": taken_back,
            "freeze": self._freeze.state(),
            "checked_policy": self._checked_policy,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores `state`."""
        if (net := self._candidates.load(state["serving_version"])) is not None:
            self.serving = round.DrafterState(state["serving_version"], net)
        self._candidates.serves(state["serving_version"])
        taken_back = state["taken_back_version"]
        if taken_back and (net := self._candidates.load(taken_back)) is not None:
            self._taken_back = round.DrafterState(taken_back, net)
        self._freeze.load_state(state["freeze"])
        self._checked_policy = state["checked_policy"]
        self._last_judged_step = self._learner.total_steps

    # --- a round ----------------------------------------------------------------------------------

    def _fresh(self) -> list[FeatureSample]:
        settings, known = self._settings, self._rows.heads
        with self._rows.locked() as buffer:
            if self.frozen:  # looks are steps apart, and a step keeps few groups for judging
                found = buffer.newest(known)
            else:
                found = buffer.fresh(known, settings.min_positions, settings.min_groups)
        return found[-settings.samples :]

    def _enough(self, samples: list[FeatureSample]) -> bool:
        return (
            sum(sample.targets for sample in samples) >= self._settings.min_positions
            and len({sample.siblings for sample in samples}) >= self._settings.min_groups
        )

    def _looked_back(self, now: round.GateRound) -> round.GateRound | None:
        """The same round with the run's first drafter, if the serving drafter has fallen: the first
        drafter may be better on tasks that its successors have forgotten.
        """
        first = self._first
        if first is None or any(one.net is first for one in now.candidates):
            return None
        itself, _ = now.serving_alone(self.costs)
        before, self._served = self._served, (itself.serving, itself.serving_noise)
        fallen = freeze.has_fallen(before, self._served)
        if not fallen or not self.serving.version:
            return None
        again = round.DrafterState(self.next_version, first)
        return self._round_of(now.samples, now.job.heads, (again, *now.candidates))

    def _decided(self, now: round.GateRound) -> bool:
        """Whether the remaining rows need no measurement."""
        few = (
            now.job.positions < self._settings.min_positions
            or now.job.groups < self._settings.min_groups
        )
        if few or not now.candidates:
            return False
        found, _ = now.judgements(self.costs)
        return all(one.decided for against in found for one in against)

    def _decide(self, now: round.GateRound) -> list[m.Judged]:
        head = now.job.head
        found, measured = now.judgements(self.costs)
        ranks = [
            (all(one.better for one in against), against[0].candidate_speedup, -number)
            for number, against in enumerate(found)
        ]
        promoted, _, negative = max(ranks)
        drafter, judgement = now.candidates[-negative], found[-negative][0]
        decision = replace(
            round.judged(drafter, judgement, now, costs_measured=measured),
            optimizer_steps=0 if drafter.net is self._first else now.steps,
            over=self.serving.version,
        )
        if promoted:
            decision = self._promote(drafter, decision)
        # A fresh drafter that is not yet better is no reason to freeze. Neither is a drafter that
        # has just met new tasks.
        learning = self._hurry.judged() or not (self.serving.version or self._warm_start)
        if not self._freeze.judged(judgement, head.policy_version, promoted=promoted or learning):
            return [decision]

        self._checked_policy = head.policy_version
        return [decision, replace(decision, decision="frozen")]

    def _promote(self, drafter: round.DrafterState, decision: m.Judged) -> m.Judged:
        path = str(self._candidates.save(drafter.version, drafter.net))
        self._handed_over, self._on_its_way = True, drafter
        self.next_version = drafter.version + 1
        self._promoted = replace(decision, decision="promoted", path=path)
        if drafter.net is self._first:  # training continues from it, not from the worse weights
            announce("again", self._learner.members)
            self._learner.begin_again(self._first)
        return self._promoted

    def _check_drift(self, now: round.GateRound) -> list[m.Judged]:
        """Measures the serving drafter on rows of a newer policy, while training is frozen."""
        head = now.job.head
        self._checked_policy = head.policy_version
        itself, measured = now.serving_alone(self.costs)
        frozen_at = self._freeze.baseline
        if not self._freeze.measured(itself.serving, itself.serving_noise):
            log.info(
                "still frozen",
                policy_version=head.policy_version,
                serving=itself.serving,
                at_freeze=frozen_at,
            )
            return []

        return [round.reopened(self.serving, itself, now, costs_measured=measured)]

    def _rolled_back(self, taken_back: round.DrafterState) -> None:
        """Records a rollback after a fall of live acceptance.

        A later candidate must also beat the drafter that was rolled back.
        """
        self._taken_back = taken_back
        if self.frozen:
            self._freeze.reopen()
        known = self._promoted
        if known is None or known.drafter_version != taken_back.version:
            known = m.Judged("rolled_back", taken_back.kind, taken_back.version)
        decision = replace(known, decision="rolled_back", path="")
        round.log_decision(decision)
        self._untold.append(decision)
