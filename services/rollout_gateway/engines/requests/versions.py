"""Tracks the versions of one engine: the serving set, prepared versions, and the commit."""

from __future__ import annotations

from typing import Generic, TypeVar

from paceline.errors import WeightsError
from paceline.trajectory import Target, VersionSet

PREPARED_AT_MOST = 2
"""Most versions of one target that may wait for their commit; preparing more drops the oldest."""
S = TypeVar("S")
Part = tuple[int, str]
"""A version, and the profile that its policy is rounded to."""


class PreparedVersions(Generic[S]):
    """The serving set, and the prepared states of versions that may follow."""

    def __init__(self, profile: str = "") -> None:
        """`profile`: number format that the engine's first policy is rounded to."""
        self.serving = VersionSet(profile=profile)
        self._prepared: dict[Target, dict[Part, S]] = {target: {} for target in Target}

    def put(self, target: Target, version: int, state: S, profile: str = "") -> None:
        """Keep the state of a version that has been read and checked, a policy under a profile."""
        prepared = self._prepared[target]
        prepared[version, profile] = state
        while len(prepared) > PREPARED_AT_MOST:
            prepared.pop(next(iter(prepared)))

    def forget(self, target: Target, version: int) -> None:
        """Drop a prepared version, if present, under every profile."""
        prepared = self._prepared[target]
        for part in [part for part in prepared if part[0] == version]:
            del prepared[part]

    def changes(self, versions: VersionSet) -> dict[Target, S]:
        """States that a commit of this set would change, by target.

        Raises WeightsError when a part is not prepared or the set is older than the serving set.
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
        """Make the set the serving set; its parts are no longer kept as prepared."""
        self.serving = versions
        for target in Target:
            self.forget(target, getattr(versions, target))


def _part(versions: VersionSet, target: Target) -> Part:
    return getattr(versions, target), versions.profile if target is Target.POLICY else ""


def _words(part: Part) -> str:
    version, profile = part
    return f"{version} under {profile}" if profile else str(version)
