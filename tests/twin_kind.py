"""Trained kinds of a user's own, by import path: EAGLE's network under other names; one reads an
inner state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from paceline.config import Config
from paceline.models.config import ModelConfig
from paceline.speculators import (
    CaptureSpec,
    DraftBatch,
    Drafts,
    DraftShape,
    SpeculatorKind,
    SpeculatorSetup,
)
from paceline.speculators.eagle.checkpoint import ARCHITECTURES
from paceline.speculators.eagle.drafter import EagleDrafter
from paceline.speculators.eagle.net import EagleNet


class TwinNet(EagleNet):
    """EAGLE by another name."""

    speculator: ClassVar[str] = "twin"
    architectures: ClassVar[frozenset[str]] = frozenset({"TwinDrafter"})

    @classmethod
    def parse(cls, raw: Mapping[str, Any], target: ModelConfig, options: Config) -> Self:
        """See DraftNet.parse."""
        return super().parse(
            {**raw, "architectures": [ARCHITECTURES[target.family]]}, target, options
        )

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json."""
        return super().config_json() | {"architectures": sorted(self.architectures)}


class DeepNet(TwinNet):
    """The same once more."""

    speculator: ClassVar[str] = "deep"
    architectures: ClassVar[frozenset[str]] = frozenset({"DeepDrafter"})


class TwinDrafter(EagleDrafter):
    """Drafts with a TwinNet."""

    name = "twin"
    net = TwinNet


class DeepDrafter(TwinDrafter):
    """Asks for the input of layer 1 and notes the states it is given, [n - 1, W] with their tokens
    [n].
    """

    name = "deep"
    net = DeepNet
    capture = CaptureSpec(inner=(1,))
    noted: ClassVar[list[tuple[Tensor, Tensor]]] = []
    layers: ClassVar[str] = ""

    def __init__(self, setup: SpeculatorSetup) -> None:
        super().__init__(setup)
        type(self).layers = setup.layers

    def propose(self, batch: DraftBatch, shape: DraftShape) -> Drafts:
        """See Speculator.propose."""
        for slot, n in zip(batch.slots, batch.lengths, strict=True):
            self.noted.append(
                (batch.hidden[slot, : n - 1].clone(), batch.token_ids[slot, :n].clone())
            )
        return super().propose(batch, shape)


KIND = SpeculatorKind(TwinDrafter, TwinNet)
DEEP = SpeculatorKind(DeepDrafter, DeepNet)
