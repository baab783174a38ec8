"""Alternates between the drafters that learn from one stream: the primary one and its shadows.

All ranks hold the same students in the same order. Rank 0 chooses one and announces it
(sharing.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.learn.membership import Members
from paceline.speculators.base import CaptureSpec
from paceline.speculators.kinds import drafter_directory
from paceline.speculators.loading import read_drafter, trained_net
from paceline.speculators.net import DraftNet


@dataclass(slots=True)
class Student:
    """One drafter with its own optimiser."""

    index: int
    kind: str
    learner: DrafterLearner
    capture: CaptureSpec
    servable: bool
    seconds_per_token: float = 0.0  # of a micro-batch, smoothed; 0 before the first
    turns: int = 0

    def reads(self, layers: str) -> bool:
        """Whether rows of these layers contain the student's inputs; every row contains the last
        state.
        """
        return not self.capture.inner or self.capture.layers == layers

    def learn_speed(self, seconds_per_token: float) -> None:
        """Adds one micro-batch to the average."""
        old = self.seconds_per_token
        self.seconds_per_token = 0.8 * old + 0.2 * seconds_per_token if old else seconds_per_token


class Students(Sequence[Student]):
    """The primary drafter first; turns follow the shares."""

    def __init__(
        self, config: DrafterTrainerConfig, nets: Sequence[DraftNet], members: Members
    ) -> None:
        """`nets`: the network of `drafter`, then the networks of `shadows`. Raises ConfigError for
        two networks of one kind, or if no kind is servable.
        """
        kinds = [net.kind.name for net in nets]
        if len(set(kinds)) < len(kinds):
            raise ConfigError(
                "two drafters of one kind", seen=", ".join(kinds), allowed="one of each"
            )

        servable = config.servable or kinds[:1]
        if not set(servable) & set(kinds):
            raise ConfigError(
                "no drafter that is trained can be served", seen=servable, allowed=", ".join(kinds)
            )

        steps = config.micro_batches_per_step
        self._students = [
            Student(
                index,
                net.kind.name,
                DrafterLearner(net, config.optimizer, micro_batches=steps, members=members),
                net.capture,
                servable=net.kind.name in servable,
            )
            for index, net in enumerate(nets)
        ]
        share = config.shadow_share if len(nets) > 1 else 0.0
        self._shares = [1 - share, *(share / (len(nets) - 1) for _ in nets[1:])]

    def __len__(self) -> int:
        return len(self._students)

    def __getitem__(self, index: int) -> Student:  # type: ignore[override]
        return self._students[index]

    @property
    def primary(self) -> Student:
        """The configured drafter; judgements and limits count its steps."""
        return self._students[0]

    def take_turn(self, layers: str) -> Student:
        """The student for the next micro-batch of such rows: the one furthest behind its share, the
        primary on a tie.
        """
        able = [student for student in self._students if student.reads(layers)] or self._students[
            :1
        ]
        chosen = min(able, key=lambda student: (student.turns + 1) / self._shares[student.index])
        chosen.turns += 1
        return chosen

    def state(self) -> dict[str, Any]:
        """State of every shadow by kind. Collective over all ranks.

        The primary's state is separate.
        """
        return {student.kind: student.learner.state() for student in self._students[1:]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores `state`; new shadows start fresh, and states of removed shadows are ignored."""
        for student in self._students[1:]:
            if student.kind in state:
                student.learner.load_state(state[student.kind])


def initial_nets(config: DrafterTrainerConfig, target: ModelConfig) -> list[DraftNet]:
    """The networks at the start of a run: of `drafter`, then of `shadows`. Raises ConfigError."""
    shadows = (_initial(name, {}, target, config.run.seed) for name in config.shadows)
    return [_initial(config.drafter, config.options, target, config.run.seed), *shadows]


def _initial(drafter: str, options: Mapping[str, Any], target: ModelConfig, seed: int) -> DraftNet:
    if (directory := drafter_directory(drafter)) is not None:
        return read_drafter(directory, target)
    net = trained_net(drafter)
    return net.fresh(target, net.read_options(options), seed)
