"""Which trained kinds an engine may draft with, their arms, and which of them a version on disk is.

Owns names and lookups; which kind serves is drafters.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.arm_names import OFF
from paceline.errors import ConfigError, InvalidInput
from paceline.speculators import (
    SPECULATORS,
    DraftNet,
    SpeculatorKind,
    find_kind,
    net_of,
    trained_net,
)
from rollout_gateway.engines.embedded.arms import Arm, parse_arm
from rollout_gateway.engines.embedded.rows import WITHOUT_WEIGHTS, drafter_directory
from rollout_gateway.engines.embedded.spec import EmbeddedSpec

NGRAM, NGRAM_ARM = "ngram", "ngram:4_1_5"
CHAINS = {"eagle": (3, 5, 7), "eagle3": (3, 5, 7)}
"""Steps of the chains that a kind drafts when no arms are named."""
OTHER_CHAINS = (3, 5)


@dataclass(frozen=True, slots=True)
class Kinds:
    """The trained kinds of one engine."""

    trained: Mapping[str, SpeculatorKind]
    """By the name in their arms; the configured one first."""
    configured: str
    """The kind that serves before any version is committed; empty: none does."""
    directory: Path | None
    """Its checkpoint; None: fresh from the seed."""

    def of(self, directory: Path) -> str:
        """The kind of a version; the configured one where there is no config.json, as in spools of
        tensors alone.

        Raises InvalidInput for a kind that this engine does not have.
        """
        if self.configured and not (directory / "config.json").is_file():
            return self.configured
        return _net(find_architecture(directory, self.trained.values())).speculator


def engine_kinds(spec: EmbeddedSpec) -> Kinds:
    """Kinds that the settings name.

    Raises ConfigError or InvalidInput for one that cannot be trained or found.
    """
    more = [_trained_kind(name) for name in spec.more_drafters]
    directory = drafter_directory(spec.drafter)
    kinds = more
    configured = ""
    if directory is not None:
        kinds = [find_architecture(directory, [*SPECULATORS.values(), *more]), *more]
    elif spec.drafter not in WITHOUT_WEIGHTS:
        kinds = [_trained_kind(spec.drafter), *more]
    if len(kinds) > len(more):
        configured = _net(kinds[0]).speculator
    trained: dict[str, SpeculatorKind] = {}
    for kind in kinds:
        name = _net(kind).speculator
        if name == NGRAM or trained.setdefault(name, kind) is not kind:
            raise ConfigError(
                "two speculators have one name", seen=name, allowed="names that differ"
            )
    return Kinds(trained, configured, directory)


def find_architecture(directory: Path, kinds: Iterable[SpeculatorKind]) -> SpeculatorKind:
    """The kind that reads a checkpoint directory.

    Raises InvalidInput naming the directory when none does.
    """
    by_net = {kind.net: kind for kind in kinds if kind.net is not None}
    try:
        return by_net[net_of(directory, list(by_net))]
    except InvalidInput as error:
        message = (
            f"{error.message} (gateway.drafter and engine.embedded.more_drafters name those "
            f"there are)"
        )
        raise InvalidInput(message, seen=error.seen, allowed=error.allowed) from error


def engine_arms(spec: EmbeddedSpec, kinds: Kinds) -> dict[str, Arm]:
    """Arms by name, `off` first. Raises ConfigError for one that this engine cannot draft."""
    ngram = spec.drafter != OFF
    names = spec.arms
    if not names:
        trained = [
            f"{kind}:{n}_1_{n + 1}"
            for kind in kinds.trained
            for n in CHAINS.get(kind, OTHER_CHAINS)
        ]
        names = (*trained, NGRAM_ARM) if ngram else tuple(trained)
    speculators = (*kinds.trained, NGRAM) if ngram else tuple(kinds.trained)
    chains_only = spec.verification == "rejection"
    wanted = (OFF, *(name for name in names if name != OFF))
    return {name: parse_arm(name, speculators, chains_only=chains_only) for name in wanted}


def _trained_kind(name: str) -> SpeculatorKind:
    trained_net(name)
    return find_kind(name)


def _net(kind: SpeculatorKind) -> type[DraftNet]:
    assert kind.net is not None
    return kind.net
