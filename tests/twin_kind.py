"""Trained drafter kinds of a user, by import path: EAGLE's network under other names. DeepDrafter
reads an inner state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch import Tensor

from paceline.config import Config
from paceline.models.config import ModelConfig
from paceline.speculators.base import CaptureSpec, DraftBatch, Drafts, DraftShape, SpeculatorSetup
from paceline.speculators.eagle import ARCHITECTURES, EagleDrafter, EagleNet
from paceline.speculators.kinds import SpeculatorKind, last_state_only

KIND = SpeculatorKind(
    "twin",
    drafter=f"{__name__}:TwinDrafter",
    net=f"{__name__}:TwinNet",
    architectures=("TwinDrafter",),
)
DEEP = SpeculatorKind(
    "deep",
    drafter=f"{__name__}:DeepDrafter",
    net=f"{__name__}:DeepNet",
    architectures=("DeepDrafter",),
    inner_layers=lambda config_json, num_layers: (1,),
)


SILENT = replace(
    DEEP,
    name="silent",
    drafter=f"{__name__}:SilentDrafter",
    net=f"{__name__}:SilentNet",
    architectures=("SilentDrafter",),
    inner_layers=last_state_only,
)
"""Reads an inner state but does not declare it."""


class TwinNet(EagleNet):
    """EAGLE by another name."""

    kind: ClassVar[SpeculatorKind] = KIND

    @classmethod
    def parse(cls, raw: Mapping[str, Any], target: ModelConfig, options: Config) -> Self:
        """See DraftNet.parse."""
        return super().parse(
            {**raw, "architectures": [ARCHITECTURES[target.family]]}, target, options
        )

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json."""
        return super().config_json() | {"architectures": list(self.kind.architectures)}


class DeepNet(TwinNet):
    """TwinNet for the kind DEEP."""

    kind: ClassVar[SpeculatorKind] = DEEP


class TwinDrafter(EagleDrafter):
    """Drafts with a TwinNet."""

    net = TwinNet


class DeepDrafter(TwinDrafter):
    """Requests the input of layer 1 and notes the states it receives, [n - 1, W] with their tokens
    [n].
    """

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


class SilentNet(DeepNet):
    """DeepNet for the kind SILENT."""

    kind: ClassVar[SpeculatorKind] = SILENT


class SilentDrafter(DeepDrafter):
    """Drafts with a SilentNet."""

    net = SilentNet
