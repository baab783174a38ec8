"""Draft models behind one protocol (base.py), the same module in engine and trainer (net.py).

To add one: a file with its network and its drafter, and a line in SPECULATORS.
"""

from paceline.speculators.base import (
    CaptureSpec,
    DraftBatch,
    Drafts,
    DraftSampler,
    DraftShape,
    Speculator,
    SpeculatorSetup,
)
from paceline.speculators.net import DraftNet, Objective
from paceline.speculators.packed import PackedRow
from paceline.speculators.table import (
    SPECULATORS,
    SpeculatorKind,
    find_kind,
    net_of,
    read_drafter,
    trained_net,
)

__all__ = [
    "SPECULATORS",
    "CaptureSpec",
    "DraftBatch",
    "DraftNet",
    "DraftSampler",
    "DraftShape",
    "Drafts",
    "Objective",
    "PackedRow",
    "Speculator",
    "SpeculatorKind",
    "SpeculatorSetup",
    "find_kind",
    "net_of",
    "read_drafter",
    "trained_net",
]
