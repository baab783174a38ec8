"""Names the launcher of a run's processes: this machine, or a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError

LOCAL, RAY = "local", "ray"
LAUNCHERS = (LOCAL, RAY)


@dataclass(frozen=True, slots=True)
class Launcher:
    """The launcher of a run's processes."""

    kind: str = LOCAL
    address: str | None = None  # of a Ray cluster; None: a new cluster on this machine

    @classmethod
    def of(cls, kind: str, address: str | None) -> Launcher:
        """The launcher that the command line selects. Raises ConfigError."""
        if kind not in LAUNCHERS:
            raise ConfigError("no such launcher", seen=kind, allowed=", ".join(LAUNCHERS))
        if address is not None and kind != RAY:
            raise ConfigError("--address is a Ray cluster's; add --launcher ray", seen=address)
        return cls(kind, address)

    @property
    def words(self) -> list[str]:
        """The command line options that select this launcher."""
        named = ["--launcher", self.kind] if self.kind != LOCAL else []
        return [*named, *(["--address", self.address] if self.address else [])]
