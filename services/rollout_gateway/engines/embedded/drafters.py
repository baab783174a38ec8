"""Holds the speculators of one engine: the untrained kinds, and of the trained ones that which
serves.

Only the serving kind is in memory. A version of another kind is built beside it at its Prepare; at
its commit it takes the place of the serving one and catches up from the states the engine keeps, so
the target computes nothing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.errors import ConfigError, WeightsError
from paceline.models.decoder import DecoderWeights
from paceline.services.rollout_gateway.engines.embedded.kinds import Kinds
from paceline.services.rollout_gateway.engines.nouns import Capability, missing
from paceline.speculators.base import DraftBatch, Speculator, SpeculatorSetup
from paceline.speculators.loading import build_drafter
from paceline.speculators.shift import AcceptanceShift, read_shift
from paceline.telemetry import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterVersion:
    """A version that was read beside the serving one."""

    kind: str
    speculator: Speculator
    """Who drafts with it."""
    state: object | None
    """For its commit_state; None: the speculator was built from the version."""
    shift: AcceptanceShift | None = None
    """What its trainer says of its drafts; None: nothing."""


class Drafters:
    """Speculators by name, and versions of the trained ones."""

    def __init__(self, kinds: Kinds, used: Mapping[str, int], setup: SpeculatorSetup) -> None:
        """used: speculators that arms name, and levels of drafts that they ask for at most; others
        are not built.

        Raises ConfigError, InvalidInput, WeightsError or DataLoss.
        """
        self._kinds = replace(
            kinds, trained={name: kind for name, kind in kinds.trained.items() if name in used}
        )
        self._setup, self._used = setup, used
        self.serving = ""
        """Name of the trained kind that drafts; empty: none yet."""
        self.live: dict[str, Speculator] = {}
        if kinds.configured in self._kinds.trained:
            self._place(
                DrafterVersion(
                    kinds.configured, self._built(kinds.configured, kinds.directory), None
                )
            )

        for name, kind in kinds.untrained.items():
            if name in used:
                self.live[name] = build_drafter(kind, replace(setup, steps=used[name]))

    @property
    def trainable(self) -> bool:
        """True when versions can be served."""
        return bool(self._kinds.trained)

    @property
    def needs_hidden(self) -> bool:
        """True when a speculator reads the target's hidden states, now or after a commit."""
        return self.trainable or any(speculator.capture.layers for speculator in self.live.values())

    def trains(self, speculator: str) -> bool:
        """True for a kind that has weights."""
        return speculator in self._kinds.trained

    def rests(self, speculator: str) -> bool:
        """True for a trained kind of which no version serves."""
        return self.trains(speculator) and speculator != self.serving

    def prepare(self, path: Path) -> DrafterVersion:
        """Read a version of any kind.

        Raises WeightsError, DataLoss, InvalidInput or MissingCapability.
        """
        kind = self._kind_of(path)
        if kind != self.serving:
            return self._beside(kind, path)
        live = self.live[kind]
        return DrafterVersion(kind, live, live.load_state(path), read_shift(path))

    def serve(self, version: DrafterVersion) -> None:
        """Draft with a version from now on."""
        if self.live.get(version.kind) is not version.speculator:
            # Built when other sequences and perhaps another policy were there.
            version.speculator.bind(self._setup.target)
            for slot in range(self._setup.slots):
                version.speculator.free(slot)
            log.info(
                "another kind of drafter serves", kind=version.kind, before=self.serving or "none"
            )
        self._place(version)

    def _place(self, version: DrafterVersion) -> None:
        if self.serving:
            del self.live[self.serving]
        self.live[version.kind], self.serving = version.speculator, version.kind
        if version.state is not None:
            version.speculator.commit_state(version.state)

    def _beside(self, kind: str, path: Path) -> DrafterVersion:
        """A version with a speculator of its own; tensors alone are read into one of the configured
        shape.
        """
        if (path / "config.json").is_file():
            return DrafterVersion(kind, self._built(kind, path), None)
        speculator = self._built(kind, self._kinds.directory)
        return DrafterVersion(kind, speculator, speculator.load_state(path))

    def _kind_of(self, path: Path) -> str:
        if not self.trainable:
            raise missing("embedded", Capability.DRAFTER_UPDATE)
        kind = self._kinds.of(path)
        if kind not in self._kinds.trained:
            raise WeightsError(
                "no arm drafts with this kind", seen=kind, allowed=", ".join(self._kinds.trained)
            )
        return kind

    @torch.inference_mode()
    def _built(self, kind: str, directory: Path | None) -> Speculator:
        setup = replace(self._setup, directory=directory, steps=self._used[kind])
        speculator = build_drafter(self._kinds.trained[kind], setup)
        kept = setup.layers.split(",")
        lacking = [
            name for name in speculator.capture.layers.split(",") if name and name not in kept
        ]
        if lacking:
            message = (
                f"{kind} reads hidden states that are not kept; gateway.features.layers "
                f"asks for more"
            )
            raise ConfigError(message, seen=", ".join(lacking), allowed=setup.layers)
        return speculator

    def ended(self, batch: DraftBatch) -> None:
        """These sequences are complete; speculators that learn from text read them."""
        for speculator in self.live.values():
            speculator.ended(batch)

    def flush(self) -> None:
        """Forget what earlier sequences taught the speculators."""
        for speculator in self.live.values():
            speculator.flush()

    def free(self, slots: Sequence[int]) -> None:
        """Nobody sits in these slots any more, or their states are to be rebuilt."""
        for speculator in self.live.values():
            for slot in slots:
                speculator.free(slot)

    def move(self, source: int, destination: int, length: int) -> None:
        """A sequence changes its slot."""
        for speculator in self.live.values():
            speculator.move(source, destination, length)

    def bind(self, target: DecoderWeights) -> None:
        """Draft for new target weights."""
        self._setup = replace(self._setup, target=target)
        for speculator in self.live.values():
            speculator.bind(target)
