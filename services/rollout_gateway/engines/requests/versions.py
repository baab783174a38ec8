"""Follows the versions of one engine: those prepared beside the serving set, and the commit."""

from __future__ import annotations

from typing import Generic, TypeVar

from paceline.errors import WeightsError
from paceline.trajectory import Target, VersionSet

PREPARED_AT_MOST = 2
"""Versions of one target that wait for their commit; preparing more forgets the oldest."""
S = TypeVar("S")


class PreparedVersions(Generic[S]):
    """The serving set, and what was read of versions that may follow."""

    def __init__(self) -> None:
        self.serving = VersionSet()
        self._prepared: dict[Target, dict[int, S]] = {target: {} for target in Target}

    def put(self, target: Target, version: int, state: S) -> None:
        """A version has been read and checked."""
        prepared = self._prepared[target]
        prepared[version] = state
        while len(prepared) > PREPARED_AT_MOST:
            prepared.pop(next(iter(prepared)))

    def forget(self, target: Target, version: int) -> None:
        """Drop a prepared version, if there is one."""
        self._prepared[target].pop(version, None)

    def changes(self, versions: VersionSet) -> dict[Target, S]:
        """What a commit would change.

        Raises WeightsError when a part is not prepared or the set is older than the serving one.
        """
        if versions.seq < self.serving.seq:
            raise WeightsError(
                "an older set may not follow a newer one",
                seen=versions.seq,
                allowed=self.serving.seq,
            )

        found: dict[Target, S] = {}
        for target, prepared in self._prepared.items():
            version, serving = getattr(versions, target), getattr(self.serving, target)
            if version in prepared:
                found[target] = prepared[version]
            elif version != serving:
                raise WeightsError(
                    f"this {target} version is not prepared",
                    seen=version,
                    allowed=sorted({serving, *prepared}),
                    reason="WEIGHTS_NOT_PREPARED",
                )

        return found

    def serve(self, versions: VersionSet) -> None:
        """The set serves from now on; its parts wait no longer."""
        self.serving = versions
        for target in Target:
            self.forget(target, getattr(versions, target))
