"""The drafter kinds that an engine's settings allow, and the kind of a version on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.arm_names import OFF, ArmName, TreeSize, parse_arm
from paceline.errors import ConfigError, InvalidInput
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.speculators.kinds import (
    SPECULATORS,
    SpeculatorKind,
    drafter_directory,
    find_kind,
    kind_of_checkpoint,
)
from paceline.speculators.net import net_of

LARGEST = TreeSize(steps=15, topk=16, draft_tokens=64)
"""Largest value of each number in an arm's name."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of one engine, by their name in arms."""

    trained: Mapping[str, SpeculatorKind]
    """The configured kind is first."""
    untrained: Mapping[str, SpeculatorKind]
    """Kinds that always serve."""
    configured: str
    """The trained kind that serves before the first commit; empty: none."""
    directory: Path | None
    """Checkpoint of the configured kind; None: initialised from the seed."""

    def of(self, directory: Path) -> str:
        """The kind of a version. Without a config.json, as in spools of only tensors, it is the
        configured kind.

        Raises InvalidInput for a kind that this engine does not have.
        """
        if self.configured and not (directory / "config.json").is_file():
            return self.configured
        return find_architecture(directory, self.trained.values()).name


def engine_kinds(spec: EmbeddedSpec) -> Kinds:
    """The kinds named in the settings.

    Raises ConfigError or InvalidInput for a kind that cannot be trained or does not exist.
    """
    more = [find_kind(name) for name in spec.more_drafters]
    for kind in more:
        net_of(kind)  # raises for a kind without weights
    directory = drafter_directory(spec.drafter)
    named = more
    if directory is not None:
        named = [find_architecture(directory, [*SPECULATORS.values(), *more]), *more]
    elif spec.drafter != OFF:
        named = [find_kind(spec.drafter), *more]

    if spec.drafter != OFF:
        named = [*named, SPECULATORS["ngram"]]  # has no weights to load: drafts beside any kind
    kinds: dict[str, SpeculatorKind] = {}
    for kind in named:
        if kinds.setdefault(kind.name, kind) is not kind:
            raise ConfigError(
                "two speculators have one name", seen=kind.name, allowed="names that differ"
            )

    trained = {name: kind for name, kind in kinds.items() if kind.trained}
    untrained = {name: kind for name, kind in kinds.items() if not kind.trained}
    configured = named[0].name if spec.drafter != OFF and named[0].trained else ""
    return Kinds(trained, untrained, configured, directory)


def find_architecture(directory: Path, kinds: Iterable[SpeculatorKind]) -> SpeculatorKind:
    """The kind that reads a checkpoint directory.

    Raises InvalidInput naming the directory if no kind reads it.
    """
    try:
        return kind_of_checkpoint(directory, kinds)
    except InvalidInput as error:
        message = (
            f"{error.message} (gateway.drafter and engine.embedded.more_drafters name those "
            f"there are)"
        )
        raise InvalidInput(message, seen=error.seen, allowed=error.allowed) from error


def engine_arms(spec: EmbeddedSpec, kinds: Kinds) -> dict[str, ArmName]:
    """Arms by name, `off` first.

    Raises ConfigError for an arm that this engine cannot draft.
    """
    speculators = {**kinds.trained, **kinds.untrained}
    names = spec.arms or tuple(arm for kind in speculators.values() for arm in kind.arms)
    trees = dict.fromkeys(speculators, spec.verification != "rejection")
    wanted = (OFF, *(name for name in names if name != OFF))
    return {name: parse_arm(name, trees, LARGEST) for name in wanted}


def slack(arms: Iterable[ArmName]) -> int:
    """Cache positions that a round may use after the last token, for verified nodes or for rows of
    drafting.
    """
    shapes = [arm.shape for arm in arms]
    used = [max(one.draft_tokens, one.topk * max(one.steps - 1, 0) + 1) for one in shapes]
    return max(used, default=1) + 1
