"""Versions of one engine: prepared beside the serving ones, swapped by reference.

Owns no running request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.errors import WeightsError
from paceline.models.decoder import DecoderWeights
from paceline.trajectory import Target, VersionSet
from rollout_gateway.engines.embedded.drafters import DrafterVersion
from rollout_gateway.engines.embedded.speculative import Speculation

PREPARED_AT_MOST = 2
"""Versions of one target that wait for their commit; preparing more forgets the oldest."""


class EngineWeights:
    """Serving, previous drafter and prepared weights of one engine."""

    def __init__(
        self,
        policy: DecoderWeights,
        speculation: Speculation,
        load_policy: Callable[[Path], DecoderWeights],
    ) -> None:
        """load_policy reads another version of the policy, as the engine serves it."""
        self.policy = policy
        self.versions = VersionSet()
        self._speculation = speculation
        self._load_policy = load_policy
        self._prepared: dict[Target, dict[int, object]] = {Target.POLICY: {}, Target.DRAFTER: {}}

    def prepare(self, target: Target, version: int, path: Path) -> None:
        """Load and check a version.

        Raises WeightsError, DataLoss, InvalidInput or MissingCapability.
        """
        state: object
        if target is Target.POLICY:
            state = self._load_policy(path)
        else:
            state = self._speculation.drafters.prepare(path)
        prepared = self._prepared[target]
        prepared[version] = state
        while len(prepared) > PREPARED_AT_MOST:
            prepared.pop(next(iter(prepared)))

    def forget(self, target: Target, version: int) -> None:
        """Drop a prepared version, if there is one."""
        self._prepared[target].pop(version, None)

    def commit(self, versions: VersionSet) -> bool:
        """Serve a set; True when the policy changed.

        Raises WeightsError and changes nothing when a part is missing.
        """
        if versions.seq < self.versions.seq:
            raise WeightsError(
                "an older set may not follow a newer one",
                seen=versions.seq,
                allowed=self.versions.seq,
            )
        new_policy = self._part(Target.POLICY, versions.policy, self.versions.policy)
        new_drafter = self._part(Target.DRAFTER, versions.drafter, self.versions.drafter)
        if isinstance(new_policy, DecoderWeights):
            self.policy = new_policy
            self._speculation.bind(new_policy)
        if isinstance(new_drafter, DrafterVersion):
            self._speculation.serve_drafter(new_drafter)
        self.versions = versions
        self.forget(Target.POLICY, versions.policy)
        self.forget(Target.DRAFTER, versions.drafter)
        return new_policy is not None

    def _part(self, target: Target, version: int, serving: int) -> object | None:
        if version in self._prepared[target]:
            return self._prepared[target][version]
        if version == serving:
            return None
        allowed = sorted({serving, *self._prepared[target]})
        raise WeightsError(
            f"this {target} version is not prepared",
            seen=version,
            allowed=allowed,
            reason="WEIGHTS_NOT_PREPARED",
        )
