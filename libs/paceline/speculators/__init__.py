"""Draft models behind one protocol (base.py), the same module in engine and trainer."""

from collections.abc import Callable

from paceline.speculators.base import (
    CaptureSpec,
    DraftBatch,
    Drafts,
    DraftSampler,
    DraftShape,
    Speculator,
    SpeculatorSetup,
)
from paceline.speculators.eagle_drafter import EagleDrafter
from paceline.speculators.ngram import NgramSpeculator

SPECULATORS: dict[str, Callable[[SpeculatorSetup], Speculator]] = {
    "eagle": EagleDrafter,
    "ngram": NgramSpeculator,
}

__all__ = [
    "SPECULATORS",
    "CaptureSpec",
    "DraftBatch",
    "DraftSampler",
    "DraftShape",
    "Drafts",
    "Speculator",
    "SpeculatorSetup",
]
