"""One round of judgements: the compared drafters and their rows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.services.drafter_trainer.gate.comparison import (
    Chain,
    Judgement,
    MeasuredCosts,
    judge,
)
from paceline.services.drafter_trainer.gate.evaluate import GateJob
from paceline.services.drafter_trainer.rows.sample import FeatureSample
from paceline.speculators.net import DraftNet


@dataclass(frozen=True, slots=True)
class DrafterState:
    """A drafter version, whole and unsharded."""

    version: int
    net: DraftNet

    @property
    def kind(self) -> str:
        """Name of its speculator."""
        return self.net.kind.name


@dataclass(frozen=True, slots=True)
class GateRound:
    """`rivals` are the serving drafter, after a rollback the one rolled back, and a promoted one
    that does not serve yet. `candidates` include the run's first drafter if the serving one has
    fallen. While training is frozen there are none.
    """

    job: GateJob
    samples: tuple[FeatureSample, ...]  # rows of the judgement
    candidates: tuple[DrafterState, ...]
    rivals: tuple[DrafterState, ...]
    steps: int  # optimiser steps behind the drafter in training

    def judgements(self, costs: MeasuredCosts) -> tuple[list[list[Judgement]], bool]:
        """Each candidate against each rival by the measurements so far, and whether the costs are
        measured.
        """
        measured = self.job.measured()
        drafters = (*self.rivals, *self.candidates)
        size_groups, known = costs.size_groups({one.kind for one in drafters})
        chains = [
            Chain(one.kind, measured.accepted[index], size_groups[one.kind])
            for index, one in enumerate(drafters)
        ]
        rivals, candidates = chains[: len(self.rivals)], chains[len(self.rivals) :]
        found = [[judge(one, rival, measured.groups) for rival in rivals] for one in candidates]
        return found, known

    def serving_alone(self, costs: MeasuredCosts) -> tuple[Judgement, bool]:
        """The serving drafter against itself, and whether the costs are measured."""
        measured, kind = self.job.measured(), self.rivals[0].kind
        size_groups, known = costs.size_groups({kind})
        chain = Chain(kind, measured.accepted[0], size_groups[kind])
        return judge(chain, chain, measured.groups), known


def judged_parts(samples: Sequence[FeatureSample], window: int) -> list[FeatureSample]:
    """The judged part of each sample: a stretch, the same for a session each time."""
    return [
        one.window(window, np.random.default_rng(zlib.crc32(one.session.encode())))
        for one in samples
    ]
