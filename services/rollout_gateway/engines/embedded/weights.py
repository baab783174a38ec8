"""Weight versions of one engine: prepared beside the serving versions, then committed.

A commit writes a policy's numbers over the serving storages (models/in_place.py); a drafter is
swapped by reference.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

from torch import Tensor

from paceline.errors import PacelineError, WeightsError
from paceline.models import in_place, products
from paceline.models.decoder import DecoderWeights
from paceline.services.rollout_gateway.engines.embedded import drafters, speculative
from paceline.services.rollout_gateway.engines.requests.control import PreparedVersions
from paceline.telemetry import get_logger
from paceline.trajectory import Target, VersionSet

log = get_logger(__name__)


class EngineWeights:
    """Serving and prepared weights of one engine."""

    def __init__(
        self,
        policy: DecoderWeights,
        speculation: speculative.Speculation,
        model: in_place.ServedModel,
        directory: Path,
        *,
        memory_saver: bool = False,
    ) -> None:
        """directory: source of the policy; memory_saver: whether its memory can be freed."""
        self._policy = policy
        self._speculation = speculation
        self._model = model
        self._directory = directory
        self.memory_saver = memory_saver
        self._released = False
        self._torn: BaseException | None = None
        self._prepared: PreparedVersions[in_place.StagedWeights | drafters.DrafterVersion] = (
            PreparedVersions(model.profile.name if model.profile else "")
        )

    @property
    def policy(self) -> DecoderWeights:
        """The serving policy.

        Raises WeightsError while it mixes two versions; only a complete version or a new worker
        repairs it.
        """
        if self._torn is not None:
            raise WeightsError(
                "an update was interrupted, and the policy before it cannot be read again",
                seen=str(self._torn),
                allowed=f"another version, or a new worker of {self.versions}",
                reason="WEIGHTS_TORN",
            )
        return self._policy

    @property
    def number_format(self) -> str:
        """Number format of the serving policy."""
        return self._model.number_format

    @property
    def versions(self) -> VersionSet:
        """Serving set of versions."""
        return self._prepared.serving

    def prepare(self, target: Target, version: int, path: Path, profile: str = "") -> None:
        """Load and check a version; `profile` applies to a policy.

        Raises WeightsError, DataLoss, InvalidInput, ResourceExhausted or MissingCapability.
        """
        policy = target is Target.POLICY
        read = self._model.under(profile).staged if policy else self._speculation.drafters.prepare
        self._prepared.put(target, version, read(path), profile if policy else "")

    def forget(self, target: Target, version: int) -> None:
        """Drop a prepared version, if there is one."""
        self._prepared.forget(target, version)

    def commit(self, versions: VersionSet) -> bool:
        """Serve a set; True if the policy changed.

        Raises WeightsError and changes nothing if a part is missing. After an interrupted update it
        raises the interrupting error; the old policy serves on, unless it cannot be loaded again.
        """
        changes = self._prepared.changes(versions)
        for new in changes.values():
            if isinstance(new, in_place.StagedWeights):
                self._serve_policy(new)
            else:
                self._speculation.serve_drafter(new, over=self.versions.drafter)
        self._prepared.serve(versions)
        return Target.POLICY in changes

    def _serve_policy(self, new: in_place.StagedWeights) -> None:
        if self._released:  # `resume` loads it and binds the drafters to it
            self._policy = replace(self._policy, head_hash=new.head_hash)
            self._speculation.policy_changed()
        else:
            same_profile = new.profile == self._model.profile
            self._policy = self._written_over(new) if same_profile else self._beside(new)
        self._model, self._directory = replace(self._model, profile=new.profile), new.path

    def _written_over(self, new: in_place.StagedWeights) -> DecoderWeights:
        try:
            policy = in_place.serve_staged(self._policy, new)
            self._speculation.bind(policy)
        except BaseException as interrupted:
            self._restore(interrupted)
            raise
        self._torn = None  # a prepared version has every tensor
        return policy

    def _beside(self, new: in_place.StagedWeights) -> DecoderWeights:
        policy = in_place.beside(self._policy, new)
        self._speculation.bind(policy)
        self._torn = None
        return policy

    def _restore(self, interrupted: BaseException) -> None:
        self._torn = interrupted  # until all of it is loaded, despite other errors
        try:
            self._model.restore(self._policy, self._directory)
            self._speculation.drafters.bind(self._policy)
        except (PacelineError, OSError, RuntimeError) as error:
            self._torn = error
            log.error("the serving policy is torn", of=str(self.versions), error=str(error))
        else:
            self._torn = None
            log.warning(
                "an update was interrupted; the policy before it serves",
                of=str(self.versions),
                error=str(interrupted),
            )

    def release(self) -> int:
        """Free the policy's memory until `resume`; returns bytes, 0 without memory_saver."""
        if not self.memory_saver:
            return 0
        self._released = True
        freed = 0
        for tensor in _tensors(self._policy):
            freed += products.renew_copy(tensor)
            storage = tensor.untyped_storage()
            if storage.resizable():  # all but the rotation table
                freed += storage.nbytes()  # 0 from the second tensor of a shared storage on
                storage.resize_(0)  # remaining references keep only the tensor's shape
        return freed

    def resume(self) -> None:
        """Load the serving policy again.

        Raises WeightsError, DataLoss or InvalidInput.
        """
        if self._released:
            self._policy = self._model.load(self._directory)
            self._speculation.drafters.bind(self._policy)
            self._released = False


def _tensors(weights: object) -> Iterator[Tensor]:
    """All tensors of the weights and their parts."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for part in weights:
            yield from _tensors(part)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from _tensors(getattr(weights, field.name))
