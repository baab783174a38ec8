"""Versions of one engine: prepared beside the serving ones, swapped by reference.

Owns no running request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.models.decoder import DecoderWeights
from paceline.trajectory import Target, VersionSet
from rollout_gateway.engines.embedded.drafters import DrafterVersion
from rollout_gateway.engines.embedded.speculative import Speculation
from rollout_gateway.engines.requests.versions import PreparedVersions


class EngineWeights:
    """Serving and prepared weights of one engine."""

    def __init__(
        self,
        policy: DecoderWeights,
        speculation: Speculation,
        load_policy: Callable[[Path], DecoderWeights],
    ) -> None:
        """load_policy reads another version of the policy, as the engine serves it."""
        self.policy = policy
        self._speculation = speculation
        self._load_policy = load_policy
        self._prepared: PreparedVersions[DecoderWeights | DrafterVersion] = PreparedVersions()

    @property
    def versions(self) -> VersionSet:
        """Serving set."""
        return self._prepared.serving

    def prepare(self, target: Target, version: int, path: Path) -> None:
        """Load and check a version.

        Raises WeightsError, DataLoss, InvalidInput or MissingCapability.
        """
        policy = target is Target.POLICY
        read = self._load_policy if policy else self._speculation.drafters.prepare
        self._prepared.put(target, version, read(path))

    def forget(self, target: Target, version: int) -> None:
        """Drop a prepared version, if there is one."""
        self._prepared.forget(target, version)

    def commit(self, versions: VersionSet) -> bool:
        """Serve a set; True when the policy changed.

        Raises WeightsError and changes nothing when a part is missing.
        """
        changes = self._prepared.changes(versions)
        for new in changes.values():
            if isinstance(new, DecoderWeights):
                self.policy = new
                self._speculation.bind(new)
            else:
                self._speculation.serve_drafter(new)
        self._prepared.serve(versions)
        return Target.POLICY in changes
