"""Follows the versions of one engine: those prepared beside the serving set, and the commit."""

from __future__ import annotations

from typing import Generic, TypeVar

from paceline.errors import WeightsError
from paceline.trajectory import Target, VersionSet

PREPARED_AT_MOST = 2
"""Versions of one target that wait for their commit; preparing more forgets the oldest."""
S = TypeVar("S")
Part = tuple[int, str]
"""A version, and the profile that a policy is rounded to."""


class PreparedVersions(Generic[S]):
    """The serving set, and what was read of versions that may follow."""

    def __init__(self, profile: str = "") -> None:
        """`profile`: that the engine's first policy is rounded to."""
        self.serving = VersionSet(profile=profile)
        self._prepared: dict[Target, dict[Part, S]] = {target: {} for target in Target}

    def put(self, target: Target, version: int, state: S, profile: str = "") -> None:
        """A version has been read and checked, a policy under a profile."""
        prepared = self._prepared[target]
        prepared[version, profile] = state
        while len(prepared) > PREPARED_AT_MOST:
            prepared.pop(next(iter(prepared)))

    def forget(self, target: Target, version: int) -> None:
        """Drop a prepared version, if there is one, under whatever profile."""
        prepared = self._prepared[target]
        for part in [part for part in prepared if part[0] == version]:
            del prepared[part]

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
            part, serving = _part(versions, target), _part(self.serving, target)
            if part in prepared:
                found[target] = prepared[part]
            elif part != serving:
                raise WeightsError(
                    f"this {target} version is not prepared",
                    seen=_words(part),
                    allowed=", ".join(map(_words, sorted({serving, *prepared}))),
                    reason="WEIGHTS_NOT_PREPARED",
                )

        return found

    def serve(self, versions: VersionSet) -> None:
        """The set serves from now on; its parts wait no longer."""
        self.serving = versions
        for target in Target:
            self.forget(target, getattr(versions, target))


def _part(versions: VersionSet, target: Target) -> Part:
    return getattr(versions, target), versions.profile if target is Target.POLICY else ""


def _words(part: Part) -> str:
    version, profile = part
    return f"{version} under {profile}" if profile else str(version)
