"""One round of judgements: the compared drafters, their rows, the records of decisions, and the
promoted drafters on disk.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from paceline.errors import DataLoss
from paceline.models.config import ModelConfig
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.gate import comparison, evaluate
from paceline.services.drafter_trainer.rows.sample import FeatureSample
from paceline.speculators import kinds
from paceline.speculators.net import DraftNet, read_drafter
from paceline.telemetry import get_logger
from paceline.whole_files import check_hashes, write_hashes


@dataclass(frozen=True, slots=True)
class DrafterState:
    """A drafter version, whole and unsharded."""

    version: int
    net: DraftNet

    @property
    def kind(self) -> str:
        """Name of its speculator."""
        return self.net.kind.name


Judgements = list[list[comparison.Judgement]]
"""By candidate and rival."""


@dataclass(frozen=True, slots=True)
class GateRound:
    """`rivals` are the serving drafter, after a rollback the one rolled back, and a promoted one
    that does not serve yet. `candidates` include the run's first drafter if the serving one has
    fallen. While training is frozen there are none.
    """

    job: evaluate.GateJob
    samples: tuple[FeatureSample, ...]  # rows of the judgement
    candidates: tuple[DrafterState, ...]
    rivals: tuple[DrafterState, ...]
    steps: int  # optimiser steps behind the drafter in training

    def judgements(
        self, costs: comparison.MeasuredCosts
    ) -> tuple[list[list[comparison.Judgement]], bool]:
        """Each candidate against each rival by the measurements so far, and whether the costs are
        measured.
        """
        accepted, groups = self.job.measured()
        size_groups, known = costs.size_groups(self.rivals[0].kind)
        rivals, candidates = accepted[: len(self.rivals)], accepted[len(self.rivals) :]
        found = [
            [comparison.judge(one, rival, groups, size_groups) for rival in rivals]
            for one in candidates
        ]
        return found, known

    def serving_alone(self, costs: comparison.MeasuredCosts) -> tuple[comparison.Judgement, bool]:
        """The serving drafter against itself, and whether the costs are measured."""
        accepted, groups = self.job.measured()
        size_groups, known = costs.size_groups(self.rivals[0].kind)
        return comparison.judge(accepted[0], accepted[0], groups, size_groups), known


log = get_logger("drafter_trainer")

_FIGURES = {field.name for field in fields(m.Judged)} & {
    field.name for field in fields(comparison.Judgement)
}


def judged(
    drafter: DrafterState, judgement: comparison.Judgement, now: GateRound, *, costs_measured: bool
) -> m.Judged:
    """The record of a kept candidate."""
    return m.Judged(
        decision="kept",
        kind=drafter.kind,
        drafter_version=drafter.version,
        costs_measured=costs_measured,
        policy_version=now.job.head.policy_version,
        lm_head_hash=now.job.head.hash,
        temperature=now.samples[-1].temperature,
        **{name: getattr(judgement, name) for name in _FIGURES},
    )


def reopened(
    serving: DrafterState, itself: comparison.Judgement, now: GateRound, *, costs_measured: bool
) -> m.Judged:
    """The record of a serving drafter that has fallen while training was frozen."""
    return replace(
        judged(serving, itself, now, costs_measured=costs_measured),
        decision="reopened",
        candidate=0.0,
        candidate_speedup=0.0,
        noise=itself.serving_noise,
        speedup_noise=0.0,
        survival=(),
    )


def log_decision(decision: m.Judged) -> None:
    """Logs one line with the main numbers."""
    figures = (
        *("decision", "kind", "drafter_version", "policy_version", "candidate", "serving"),
        *("noise", "candidate_speedup", "serving_speedup", "speedup_noise", "positions"),
    )
    log.info("gate", **{name: getattr(decision, name) for name in figures})


KEPT = 4


class Candidates:
    """`<directory>/drafter-<version>`: the newest KEPT versions, the serving version and its
    predecessor.
    """

    def __init__(
        self, directory: Path, target: ModelConfig, own: Sequence[kinds.SpeculatorKind] = ()
    ) -> None:
        """`own`: a user's kinds outside the table of speculators."""
        self._directory, self._target, self._own = directory, target, tuple(own)
        self._needed: list[int] = []

    def path(self, version: int) -> Path:
        """Directory of a version."""
        return self._directory / f"drafter-{version}"

    @property
    def versions(self) -> list[int]:
        """Versions on disk, oldest first."""
        found = self._directory.glob("drafter-*/model.safetensors")
        return sorted(int(file.parent.name.removeprefix("drafter-")) for file in found)

    def save(self, version: int, net: DraftNet) -> Path:
        """Writes a version, and removes old versions."""
        path = self.path(version)
        net.save(path)
        write_hashes(path)
        for old in self.versions[:-KEPT]:
            if old not in self._needed:
                shutil.rmtree(self.path(old))
        return path

    def load(self, version: int) -> DraftNet | None:
        """The drafter of a version, ready for inference; None if it is absent or damaged."""
        if version not in self.versions:
            return None
        try:
            check_hashes(self.path(version))
        except DataLoss as error:
            log.error("drafter is damaged", drafter_version=version, error=str(error))
            return None
        return read_drafter(self.path(version), self._target, self._own).eval()

    def serves(self, version: int) -> None:
        """Keeps this version and its predecessor in service."""
        if version not in self._needed[-1:]:
            self._needed = [*self._needed[-1:], version]
