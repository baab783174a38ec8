"""Weight versions of one engine: prepared beside the serving versions, then committed.

A commit writes a policy's numbers over the serving storages (models/in_place.py); a drafter is
swapped by reference.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.models import in_place, products
from paceline.models.decoder import DecoderWeights
from paceline.services.rollout_gateway.engines.base import EngineBroken
from paceline.services.rollout_gateway.engines.embedded import drafters, speculative
from paceline.services.rollout_gateway.engines.requests.control import PreparedVersions
from paceline.trajectory import Target, VersionSet

Prepared = in_place.StagedWeights | drafters.DrafterVersion


@dataclass(eq=False)
class EngineWeights:
    """Serving and prepared weights of one engine."""

    policy: DecoderWeights
    """The serving policy."""
    _speculation: speculative.Speculation
    model: in_place.ServedModel
    """The way of serving the policy."""
    _directory: Path
    """Source of the policy."""
    _released = False

    def __post_init__(self) -> None:
        profile = self.model.profile.name if self.model.profile else ""
        self.prepared = PreparedVersions[Prepared](profile)
        """The serving set, and the versions loaded beside it."""

    def prepare(self, target: Target, version: int, path: Path, profile: str = "") -> None:
        """Load and check a version; `profile` applies to a policy.

        Raises WeightsError, DataLoss, InvalidInput, ResourceExhausted or MissingCapability.
        """
        policy = target is Target.POLICY
        read = self.model.under(profile).staged if policy else self._speculation.drafters.prepare
        self.prepared.put(target, version, read(path), profile if policy else "")

    def commit(self, versions: VersionSet) -> bool:
        """Serve a set; True if the policy changed.

        Raises WeightsError and changes nothing if a part is missing. Raises EngineBroken after an
        interrupted update, which may leave a mixture of two versions.
        """
        changes = self.prepared.changes(versions)
        for new in changes.values():
            if isinstance(new, in_place.StagedWeights):
                self._serve_policy(new)
            else:
                self._speculation.serve_drafter(new, over=self.prepared.serving.drafter)
        self.prepared.serve(versions)
        return Target.POLICY in changes

    def _serve_policy(self, new: in_place.StagedWeights) -> None:
        same_profile = new.profile == self.model.profile
        write = in_place.serve_staged if same_profile else in_place.beside
        try:
            if not self._released:  # else `resume` reads it
                before, self.policy = self.policy, write(self.policy, new)
                if self.policy is not before:
                    self._speculation.bind(self.policy)
        except Exception as error:
            message = f"an update of the policy was interrupted: {type(error).__name__}: {error}"
            raise EngineBroken(message) from error
        self.model, self._directory = replace(self.model, profile=new.profile), new.path

    def release(self) -> int:
        """Free the policy's storages until `resume`; returns bytes."""
        self._released, freed = True, 0
        self._speculation.drafters.release()
        for tensor in in_place.storages(self.policy).values():
            freed += tensor.nbytes + products.free_copy(tensor)
            tensor.untyped_storage().resize_(0)  # other references keep the tensor's shape
        return freed

    def resume(self) -> None:
        """Load the serving policy again.

        Raises WeightsError, DataLoss or InvalidInput.
        """
        if self._released:
            self.policy = self.model.load(self._directory)
            self._speculation.bind(self.policy)
            self._released = False
