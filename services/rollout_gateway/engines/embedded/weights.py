"""Versions of one engine: prepared beside the serving ones, swapped by reference.

Owns no running request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from torch import Tensor

from paceline.models.decoder import DecoderWeights
from paceline.services.rollout_gateway.engines.embedded.drafters import DrafterVersion
from paceline.services.rollout_gateway.engines.embedded.speculative import Speculation
from paceline.services.rollout_gateway.engines.requests.versions import PreparedVersions
from paceline.trajectory import Target, VersionSet


@dataclass(frozen=True, slots=True)
class PolicyLoaders:
    """What reads a version of the policy, and the numbers that the engine then computes with."""

    load: Callable[[Path], DecoderWeights]  # as the engine serves it
    number_format: str
    full: PolicyLoaders | None = None  # without rounding; None: nothing is rounded


class EngineWeights:
    """Serving and prepared weights of one engine."""

    def __init__(
        self,
        policy: DecoderWeights,
        speculation: Speculation,
        loaders: PolicyLoaders,
        directory: Path | None = None,
    ) -> None:
        """`directory`: where it reads the serving policy again, None: that stays in memory."""
        self.policy = policy
        self._speculation = speculation
        self._loaders = loaders
        self.number_format = loaders.number_format
        self._directory = directory
        self._released = False
        self._prepared: PreparedVersions[tuple[Path, str, DecoderWeights | DrafterVersion]] = (
            PreparedVersions()
        )

    @property
    def memory_saver(self) -> bool:
        """Whether the policy can be read again."""
        return self._directory is not None

    @property
    def versions(self) -> VersionSet:
        """Serving set."""
        return self._prepared.serving

    def prepare(self, target: Target, version: int, path: Path) -> None:
        """Load and check a version.

        Raises WeightsError, DataLoss, InvalidInput or MissingCapability.
        """
        policy = target is Target.POLICY
        loaders = self._loaders
        read = loaders.load if policy else self._speculation.drafters.prepare
        self._prepared.put(target, version, (path, loaders.number_format, read(path)))

    def stop_rounding(self) -> None:
        """Policies that are prepared from now on are read without rounding."""
        self._loaders = self._loaders.full or self._loaders

    def forget(self, target: Target, version: int) -> None:
        """Drop a prepared version, if there is one."""
        self._prepared.forget(target, version)

    def commit(self, versions: VersionSet) -> bool:
        """Serve a set; True when the policy changed.

        Raises WeightsError and changes nothing when a part is missing.
        """
        changes = self._prepared.changes(versions)
        for path, numbers, new in changes.values():
            if isinstance(new, DecoderWeights):
                self.policy, self._directory = new, self._directory and path
                self.number_format = numbers
                self._speculation.bind(new)
            else:
                self._speculation.serve_drafter(new, over=self.versions.drafter)
        self._prepared.serve(versions)
        if self._released:
            self.release()
        return Target.POLICY in changes

    def release(self) -> int:
        """Free the policy's memory, also that of a policy committed before `resume`; returns bytes,
        0 where it stays.
        """
        if self._directory is None:
            return 0
        self._released = True
        freed = 0
        for tensor in _tensors(self.policy):
            storage = tensor.untyped_storage()
            if storage.resizable():  # all but the rotation table
                freed += storage.nbytes()  # 0 for one that tensors share, from the second on
                storage.resize_(0)  # whoever refers to a tensor of it keeps its shape alone
        return freed

    def resume(self) -> None:
        """Read the policy that serves again. Raises WeightsError, DataLoss or InvalidInput."""
        if self._released and self._directory is not None:
            self.policy = self._loaders.load(self._directory)
            self.number_format = self._loaders.number_format
            self._speculation.drafters.bind(self.policy)
            self._released = False


def _tensors(weights: object) -> Iterator[Tensor]:
    """The tensors of weights and of their parts."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for part in weights:
            yield from _tensors(part)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from _tensors(getattr(weights, field.name))
