"""One round of judging: who is compared with whom, on which rows."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    """A drafter version whole and unsharded."""

    version: int
    net: DraftNet

    @property
    def kind(self) -> str:
        """Name of its speculator."""
        return self.net.kind.name


@dataclass(frozen=True, slots=True)
class GateRound:
    """`rivals` are the serving drafter, after a rollback the one that was taken back, and one that
    is promoted and not served yet. Of `candidates` the run's first drafter is one where what serves
    has fallen; while training is frozen there are none.
    """

    job: GateJob
    samples: tuple[FeatureSample, ...]  # that it judges by
    candidates: tuple[DrafterState, ...]
    rivals: tuple[DrafterState, ...]
    steps: Mapping[str, int]  # optimiser steps behind each candidate, by kind

    def judgements(self, costs: MeasuredCosts) -> tuple[list[list[Judgement]], bool]:
        """Of each candidate against each rival, by what is measured so far; and whether the costs
        are measured.
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
    """What of each sample judges: a stretch, always the same one of a session, without rejected
    drafts: nobody drew a token after them that a draft could be compared with.
    """
    return [
        replace(one, branches=None).window(
            window, np.random.default_rng(zlib.crc32(one.session.encode()))
        )
        for one in samples
    ]
