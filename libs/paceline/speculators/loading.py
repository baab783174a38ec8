"""Loads the networks and drafters listed in kinds.py by import path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.plugins import import_object
from paceline.speculators.base import Speculator, SpeculatorSetup
from paceline.speculators.kinds import (
    SPECULATORS,
    SpeculatorKind,
    find_kind,
    kind_of_checkpoint,
)
from paceline.speculators.net import DraftNet


def net_of(kind: SpeculatorKind) -> type[DraftNet]:
    """The network of a kind.

    Raises ConfigError for a kind without weights, and for a network of another kind.
    """
    if not kind.trained:
        raise ConfigError(
            "a speculator without weights is not trained",
            seen=kind.name,
            allowed="one with weights",
        )
    net: type[DraftNet] = import_object(kind.net)
    if net.kind is not kind:
        raise ConfigError("a network names another kind", seen=net.kind.name, allowed=kind.name)
    return net


def trained_net(name: str) -> type[DraftNet]:
    """The network of a speculator, named as in `find_kind`.

    Raises ConfigError for a speculator without weights.
    """
    return net_of(find_kind(name))


def build_drafter(kind: SpeculatorKind, setup: SpeculatorSetup) -> Speculator:
    """The embedded engine's drafter. Raises the errors of the drafter's class."""
    drafter = import_object(kind.drafter) if isinstance(kind.drafter, str) else kind.drafter
    built: Speculator = drafter(setup)
    return built


def read_drafter(
    directory: Path, target: ModelConfig, own: Iterable[SpeculatorKind] = ()
) -> DraftNet:
    """The network of a checkpoint directory, of any kind; `own`: kinds besides the table's.

    Raises InvalidInput, WeightsError or DataLoss, each naming the directory.
    """
    kind = kind_of_checkpoint(directory, [*SPECULATORS.values(), *own])
    return net_of(kind).read(directory, target)
