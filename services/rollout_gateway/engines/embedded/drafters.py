"""The speculators of one engine, and the drafter kinds that its settings allow.

Only the serving trained kind is in memory. A version of another kind is built beside it at its
Prepare, and replaces it at its commit. The new speculator then catches up from the states that the
engine keeps, without any computation by the target.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.arm_names import OFF, ArmName, TreeSize, parse_arm, speculator_of
from paceline.errors import ConfigError, WeightsError
from paceline.models.decoder import DecoderWeights
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Capability, missing
from paceline.speculators import base, net
from paceline.speculators.kinds import (
    SPECULATORS,
    SpeculatorKind,
    drafter_directory,
    find_kind,
    kind_of_checkpoint,
)
from paceline.speculators.shift import AcceptanceShift, read_shift
from paceline.telemetry import get_logger

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


def engine_kinds(spec: EmbeddedSpec) -> Kinds:
    """The kinds named in the settings.

    Raises ConfigError or InvalidInput for a kind that cannot be trained or does not exist.
    """
    more = [find_kind(name) for name in spec.more_drafters]
    for kind in more:
        net.net_of(kind)  # raises for a kind without weights
    directory, named = drafter_directory(spec.drafter), more
    if spec.drafter != OFF:
        known = [*SPECULATORS.values(), *more]
        first = kind_of_checkpoint(directory, known) if directory else find_kind(spec.drafter)
        # Kinds without weights to load draft beside any kind: n-grams always, others by their arms.
        named = [first, *more, SPECULATORS["ngram"]]
        if "self" in map(speculator_of, spec.arms):
            named.append(SPECULATORS["self"])
    kinds: dict[str, SpeculatorKind] = {}
    for kind in named:
        if kinds.setdefault(kind.name, kind) is not kind:
            message = "two speculators have one name"
            raise ConfigError(message, seen=kind.name, allowed="names that differ")

    trained = {name: kind for name, kind in kinds.items() if kind.trained}
    untrained = {name: kind for name, kind in kinds.items() if not kind.trained}
    configured = named[0].name if spec.drafter != OFF and named[0].trained else ""
    return Kinds(trained, untrained, configured, directory)


def engine_arms(spec: EmbeddedSpec, kinds: Kinds) -> dict[str, ArmName]:
    """Arms by name, `off` first.

    Raises ConfigError for an arm that this engine cannot draft.
    """
    speculators = {**kinds.trained, **kinds.untrained}
    names = spec.arms or tuple(arm for kind in speculators.values() for arm in kind.arms)
    trees = {name: kind.trees for name, kind in speculators.items()}
    wanted = (OFF, *(name for name in names if name != OFF))
    return {name: parse_arm(name, trees, LARGEST) for name in wanted}


def slack(arms: Iterable[ArmName]) -> int:
    """Cache positions that a round may use after the last token, for verified nodes or for rows of
    drafting.
    """
    shapes = [arm.shape for arm in arms]
    used = [max(one.draft_tokens, one.topk * max(one.steps - 1, 0) + 1) for one in shapes]
    return max(used, default=1) + 1


log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterVersion:
    """A version loaded beside the serving version."""

    kind: str
    speculator: base.Speculator
    """Its speculator."""
    state: object | None
    """Input of the speculator's commit_state; None: the speculator was built from the version."""
    shift: AcceptanceShift | None = None
    """Change in acceptance measured by its trainer; None: unknown."""


class Drafters:
    """Speculators by name, and the versions of trained kinds."""

    def __init__(self, kinds: Kinds, arms: Iterable[ArmName], setup: base.SpeculatorSetup) -> None:
        """Builds the speculators that arms name, for the most draft levels of their arms.

        Raises ConfigError, InvalidInput, WeightsError or DataLoss.
        """
        used: dict[str, int] = {}
        for arm in arms:
            used[arm.speculator] = max(used.get(arm.speculator, 0), arm.shape.steps)
        trained = {name: kind for name, kind in kinds.trained.items() if name in used}
        self._kinds = replace(kinds, trained=trained)
        self._setup, self._used = setup, used
        self.serving = ""
        """Name of the serving trained kind; empty: none yet."""
        self.live: dict[str, base.Speculator] = {}
        if kinds.configured in self._kinds.trained:
            first = self._built(kinds.configured, kinds.directory)
            self._place(DrafterVersion(kinds.configured, first, None))
        for name, kind in kinds.untrained.items():
            if name in used:
                self.live[name] = net.build_drafter(kind, replace(setup, steps=used[name]))

    @property
    def trainable(self) -> bool:
        """True if versions can be served."""
        return bool(self._kinds.trained)

    @property
    def needs_hidden(self) -> bool:
        """True if a speculator reads the target's hidden states, now or after a commit."""
        return self.trainable or any(speculator.capture.layers for speculator in self.live.values())

    def rests(self, speculator: str) -> bool:
        """True for a trained kind without a serving version."""
        return speculator in self._kinds.trained and speculator != self.serving

    def prepare(self, path: Path) -> DrafterVersion:
        """Load a version of any kind.

        Raises WeightsError, DataLoss, InvalidInput or MissingCapability, and ConfigError for a kind
        that reads states which the engine does not keep.
        """
        kind = self._kind_of(path)
        if kind != self.serving:
            return self._beside(kind, path)
        live = self.live[kind]
        return DrafterVersion(kind, live, live.load_state(path), read_shift(path))

    def serve(self, version: DrafterVersion) -> None:
        """Draft with a version from now on."""
        if self.live.get(version.kind) is not version.speculator:
            # It was built for earlier sequences, and perhaps for an earlier policy.
            version.speculator.bind(self._setup.target)
            for slot in range(self._setup.slots):
                version.speculator.free(slot)
            before = self.serving or "none"
            log.info("another kind of drafter serves", kind=version.kind, before=before)
        self._place(version)

    def _place(self, version: DrafterVersion) -> None:
        if self.serving:
            del self.live[self.serving]
        self.live[version.kind], self.serving = version.speculator, version.kind
        if version.state is not None:
            version.speculator.commit_state(version.state)

    def _beside(self, kind: str, path: Path) -> DrafterVersion:
        """A version with a new speculator; a directory with only tensors is loaded into a
        speculator of the configured shape.
        """
        if (path / "config.json").is_file():
            return DrafterVersion(kind, self._built(kind, path), None)
        speculator = self._built(kind, self._kinds.directory)
        return DrafterVersion(kind, speculator, speculator.load_state(path))

    def _kind_of(self, path: Path) -> str:
        if not self.trainable:
            raise missing("embedded", Capability.DRAFTER_UPDATE)
        # Spools of only tensors have no config.json; they are of the configured kind.
        kind = self._kinds.configured
        if not kind or (path / "config.json").is_file():
            kind = kind_of_checkpoint(path, self._kinds.trained.values()).name
        if kind not in self._kinds.trained:
            message = "no arm drafts with this kind"
            raise WeightsError(message, seen=kind, allowed=", ".join(self._kinds.trained))
        return kind

    @torch.inference_mode()
    def _built(self, kind: str, directory: Path | None) -> base.Speculator:
        setup = replace(self._setup, directory=directory, steps=self._used[kind])
        speculator = net.build_drafter(self._kinds.trained[kind], setup)
        read, kept = speculator.capture.layers.split(","), setup.layers.split(",")
        if lacking := [name for name in read if name and name not in kept]:
            message = f"{kind} reads hidden states that are not kept; name them"
            message += " in gateway.features.layers"
            raise ConfigError(message, seen=", ".join(lacking), allowed=setup.layers)
        return speculator

    def ended(self, batch: base.DraftBatch) -> None:
        """Report complete sequences; speculators that learn from text read them."""
        for speculator in self.live.values():
            speculator.ended(batch)

    def flush(self) -> None:
        """Drop everything that speculators learned from earlier sequences."""
        for speculator in self.live.values():
            speculator.flush()

    def free(self, slots: Sequence[int]) -> None:
        """Clear these slots, after their sequences ended or before their states are rebuilt."""
        for speculator in self.live.values():
            for slot in slots:
                speculator.free(slot)

    def move(self, source: int, destination: int, length: int) -> None:
        """Move a sequence to another slot."""
        for speculator in self.live.values():
            speculator.move(source, destination, length)

    def release(self) -> None:
        """Free copies of the target's weights until `bind`."""
        for speculator in self.live.values():
            speculator.release()

    def bind(self, target: DecoderWeights) -> None:
        """Draft for new target weights."""
        self._setup = replace(self._setup, target=target)
        for speculator in self.live.values():
            speculator.bind(target)
