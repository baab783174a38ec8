"""Names what starts the processes of a run: this machine, or a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError

LOCAL, RAY = "local", "ray"
LAUNCHERS = (LOCAL, RAY)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Where the processes of a run are started."""

    kind: str = LOCAL
    address: str | None = None  # of a Ray cluster; None: one of this machine's own

    @classmethod
    def of(cls, kind: str, address: str | None) -> Launcher:
        """What a command line names. Raises ConfigError."""
        if kind not in LAUNCHERS:
            raise ConfigError("no such launcher", seen=kind, allowed=", ".join(LAUNCHERS))
        if address is not None and kind != RAY:
            raise ConfigError("--address is a Ray cluster's; add --launcher ray", seen=address)
        return cls(kind, address)

    @property
    def words(self) -> list[str]:
        """What names it on a command line."""
        named = ["--launcher", self.kind] if self.kind != LOCAL else []
        return [*named, *(["--address", self.address] if self.address else [])]
